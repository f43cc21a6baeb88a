"""How sure a trainer is that the master counts on it, with the time as an argument."""

from __future__ import annotations

import time

import pytest

from edl_torch.trainer.liveness import Liveness


@pytest.fixture
def liveness() -> Liveness:
    """One that stands since 100 s, with a lease timeout of 30 s."""
    liveness = Liveness()
    liveness.stood(100.0, lease_timeout_s=30.0)
    return liveness


def confirm(liveness: Liveness, now: float = 100.0) -> None:
    liveness.confirmed(liveness.doubts, now)


def test_before_the_stream_has_stood_nothing_is_sure() -> None:
    liveness = Liveness()
    liveness.answered(100.0)
    assert not liveness.sure(100.0)
    assert not liveness.standing


def test_it_is_sure_for_two_thirds_of_the_timeout(liveness: Liveness) -> None:
    assert liveness.sure(119.9)
    assert not liveness.sure(120.0)


def test_an_answered_heartbeat_counts_from_when_it_was_sent(liveness: Liveness) -> None:
    liveness.answered(110.0)  # sent at 110; the process was stopped until 125
    assert liveness.sure(125.0)
    assert not liveness.sure(130.0)


def test_a_late_answer_to_an_earlier_heartbeat_takes_nothing_back(liveness: Liveness) -> None:
    liveness.answered(115.0)
    liveness.answered(105.0)
    assert liveness.sure(134.0)


@pytest.mark.parametrize("event", ["broke", "doubt"])
def test_a_doubt_outlives_a_heartbeat_and_a_new_stream(liveness: Liveness, event: str) -> None:
    getattr(liveness, event)()
    liveness.answered(100.0)
    liveness.stood(100.0, lease_timeout_s=30.0)
    assert not liveness.sure(100.0)
    confirm(liveness)
    assert liveness.sure(100.0)


def test_what_happens_while_leases_are_presented_is_not_settled_by_the_answer(liveness: Liveness) -> None:
    liveness.broke()
    liveness.stood(100.0, lease_timeout_s=30.0)
    doubts = liveness.doubts
    liveness.broke()  # the call is on its way
    liveness.confirmed(doubts, 100.0)
    assert not liveness.sure(100.0)


def test_the_answer_of_an_earlier_question_takes_no_certainty_back(liveness: Liveness) -> None:
    liveness.doubt()
    confirm(liveness)
    liveness.confirmed(0, 100.0)
    assert liveness.sure(100.0)


def test_leases_that_were_presented_are_sure_from_when_they_were(liveness: Liveness) -> None:
    liveness.confirmed(liveness.doubts, 115.0)
    assert liveness.sure(134.9)
    assert not liveness.sure(135.0)


def test_a_stream_that_does_not_stand_breaks_once(liveness: Liveness) -> None:
    for _ in range(3):
        liveness.broke()
    assert liveness.doubts == 1
    assert not liveness.standing


def test_a_loop_that_rested_long_is_in_doubt_where_the_master_asks_for_progress() -> None:
    liveness = Liveness()
    liveness.stood(100.0, lease_timeout_s=600.0, progress_timeout_s=30.0)
    liveness.begin(100.0)
    now = 100.0
    for _ in range(5):
        now += 9.9
        liveness.moved_on(now)
    assert liveness.sure(now)
    assert liveness.progress == 5
    now += 10.0
    liveness.moved_on(now)
    assert not liveness.sure(now)
    assert liveness.doubts == 1
    confirm(liveness, now)
    liveness.moved_on(now)
    assert liveness.sure(now)


def test_a_session_that_is_not_attended_yet_does_not_rest() -> None:
    """Its loop may have done anything else for any time, and it holds no lease."""
    liveness = Liveness()
    liveness.moved_on(1e6)
    liveness.stood(1e6, lease_timeout_s=600.0, progress_timeout_s=30.0)
    liveness.begin(1e6)
    liveness.moved_on(1e6 + 9.9)
    assert liveness.sure(1e6 + 9.9)


def test_a_new_stream_is_no_progress_of_the_loop() -> None:
    """The master may have taken the leases while the stream was away."""
    liveness = Liveness()
    liveness.stood(100.0, lease_timeout_s=600.0, progress_timeout_s=30.0)
    liveness.begin(100.0)
    liveness.moved_on(100.0)
    liveness.stood(129.0, lease_timeout_s=600.0, progress_timeout_s=30.0)
    liveness.moved_on(129.0)
    assert not liveness.sure(129.0)


def test_without_a_progress_timeout_a_step_may_be_long(liveness: Liveness) -> None:
    liveness.begin(100.0)
    liveness.answered(1e6)
    liveness.moved_on(1e6)
    assert liveness.sure(1e6)


def test_the_question_costs_less_than_a_microsecond_or_two() -> None:
    liveness = Liveness()
    liveness.stood(100.0, lease_timeout_s=30.0)

    def batches(count: int = 1000) -> float:
        began = time.perf_counter()
        for _ in range(count):
            liveness.moved_on(100.0)
            assert liveness.sure(100.0)
        return (time.perf_counter() - began) / count

    assert min(batches() for _ in range(20)) < 10e-6  # 0.5 µs on a quiet machine


def test_repr_shows_state(liveness: Liveness) -> None:
    assert repr(liveness) == "<Liveness standing=True doubts=0>"
    liveness.broke()
    assert repr(liveness) == "<Liveness standing=False doubts=1>"
    liveness.doubt()
    assert repr(liveness) == "<Liveness standing=False doubts=2>"
    confirm(liveness)
    assert repr(liveness) == "<Liveness standing=False doubts=0>"
