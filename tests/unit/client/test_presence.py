"""How sure a trainer is of its presence, by numbers for time."""

from __future__ import annotations

import threading
import time

import pytest

from edl_torch.client.presence import Presence, suspended_clock
from edl_torch.testing import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(100.0)


@pytest.fixture
def presence(clock: FakeClock) -> Presence:
    """One that stands, with a lease timeout of 30 s."""
    presence = Presence(clock)
    presence.stood(100.0, lease_timeout_s=30.0)
    return presence


def confirm(presence: Presence) -> None:
    presence.confirmed(presence.doubts, presence.clock())


def test_before_the_stream_has_stood_nothing_is_sure(clock: FakeClock) -> None:
    presence = Presence(clock)
    presence.answered(100.0)
    assert not presence.sure
    assert not presence.standing


def test_it_is_sure_for_two_thirds_of_the_timeout(presence: Presence, clock: FakeClock) -> None:
    clock.advance(19.9)
    assert presence.sure
    clock.advance(0.1)
    assert not presence.sure


def test_an_answered_heartbeat_counts_from_when_it_was_sent(presence: Presence, clock: FakeClock) -> None:
    clock.advance(25.0)
    presence.answered(110.0)  # sent at 110; the process was stopped before the answer
    assert presence.sure
    clock.advance(5.0)
    assert not presence.sure


def test_a_late_answer_to_an_earlier_heartbeat_takes_nothing_back(
    presence: Presence, clock: FakeClock
) -> None:
    clock.advance(15.0)
    presence.answered(115.0)
    presence.answered(105.0)
    clock.advance(19.0)
    assert presence.sure


@pytest.mark.parametrize("event", ["broke", "doubt"])
def test_a_doubt_outlives_a_heartbeat_and_a_new_stream(presence: Presence, event: str) -> None:
    getattr(presence, event)()
    presence.answered(100.0)
    presence.stood(100.0, lease_timeout_s=30.0)
    assert not presence.sure
    confirm(presence)
    assert presence.sure


def test_what_happens_while_leases_are_presented_is_not_settled_by_the_answer(presence: Presence) -> None:
    presence.broke()
    presence.stood(100.0, lease_timeout_s=30.0)
    doubts = presence.doubts
    presence.broke()  # the call is on its way
    presence.confirmed(doubts, 100.0)
    assert not presence.sure


def test_a_stream_that_does_not_stand_breaks_once(presence: Presence) -> None:
    for _ in range(3):
        presence.broke()
    assert presence.doubts == 1


def test_a_loop_that_rested_long_is_in_doubt_where_the_master_asks_for_progress(clock: FakeClock) -> None:
    presence = Presence(clock)
    presence.stood(100.0, lease_timeout_s=600.0, progress_timeout_s=30.0)
    for _ in range(5):
        clock.advance(9.9)
        presence.moved_on()
    assert presence.sure
    assert presence.progress == 5
    clock.advance(10.0)
    presence.moved_on()
    assert not presence.sure
    confirm(presence)
    presence.moved_on()
    assert presence.sure


def test_a_new_stream_is_no_progress_of_the_loop(clock: FakeClock) -> None:
    """The master may have taken the leases while the stream was away."""
    presence = Presence(clock)
    presence.stood(100.0, lease_timeout_s=600.0, progress_timeout_s=30.0)
    presence.moved_on()
    clock.advance(29.0)
    presence.stood(129.0, lease_timeout_s=600.0, progress_timeout_s=30.0)
    presence.moved_on()
    assert not presence.sure


def test_without_a_progress_timeout_a_step_may_be_long(presence: Presence, clock: FakeClock) -> None:
    clock.advance(1e6)
    presence.answered(clock())
    presence.moved_on()
    assert presence.sure


def test_who_waits_for_the_stream_is_woken(clock: FakeClock) -> None:
    presence = Presence(clock)
    assert not presence.wait_standing(0.01)
    stands = threading.Timer(0.02, presence.stood, (100.0,), {"lease_timeout_s": 30.0})
    stands.start()
    assert presence.wait_standing(10)
    stands.join()


def test_the_clock_counts_seconds_and_never_goes_back() -> None:
    began = time.monotonic()
    before, after = suspended_clock(), suspended_clock()
    assert 0 <= after - before <= time.monotonic() - began + 0.01


def test_the_question_costs_less_than_a_microsecond_or_two() -> None:
    presence = Presence()
    presence.stood(presence.clock(), lease_timeout_s=30.0)

    def batches(count: int = 1000) -> float:
        began = time.perf_counter()
        for _ in range(count):
            presence.moved_on()
            assert presence.sure
        return (time.perf_counter() - began) / count

    assert min(batches() for _ in range(20)) < 10e-6  # 0.5 µs on a quiet machine


def test_repr_shows_state(presence: Presence) -> None:
    assert repr(presence) == "<Presence sure standing=True doubts=0>"
    presence.broke()
    assert repr(presence) == "<Presence unsure standing=False doubts=1>"
