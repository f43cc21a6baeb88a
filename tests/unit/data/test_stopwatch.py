"""What is timed of a training loop, and what is not."""

from __future__ import annotations

import pytest

from edl_torch.testing import FakeClock
from edl_torch.trainer.measuring import Measuring, Stopwatch


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def measuring() -> Measuring:
    return Measuring()


@pytest.fixture
def stopwatch(measuring: Measuring, clock: FakeClock) -> Stopwatch:
    return Stopwatch(measuring, clock)


def test_the_wait_for_a_batch_and_the_work_on_it_are_told_apart(
    stopwatch: Stopwatch, measuring: Measuring, clock: FakeClock
) -> None:
    for _ in range(2):
        asked_at = clock()
        clock.advance(1.0)
        stopwatch.handed(asked_at, 4)
        clock.advance(3.0)
    stopwatch.ended(clock())
    measures = measuring.measures()
    assert (measures.batches, measures.records) == (2, 8)
    assert (measures.waited.count, measures.waited.sum_s) == (2, 2.0)
    assert (measures.stepped.count, measures.stepped.sum_s) == (2, 6.0)
    assert measures.waiting_share == 0.25


def test_the_end_of_a_pass_is_no_wait_for_a_batch_and_no_work(
    stopwatch: Stopwatch, measuring: Measuring, clock: FakeClock
) -> None:
    stopwatch.handed(clock(), 4)
    asked_at = clock()
    stopwatch.wait_for_ranks(lambda: clock.advance(5.0))
    stopwatch.ended(asked_at)
    stopwatch.ended(clock())  # after its end
    measures = measuring.measures()
    assert measures.waited.count == 1
    assert (measures.waited.sum_s, measures.waited_for_ranks_s) == (0.0, 0.0)
    assert (measures.stepped.count, measures.stepped.sum_s) == (1, 0.0)


def test_the_wait_for_other_ranks_is_a_part_of_the_wait(
    stopwatch: Stopwatch, measuring: Measuring, clock: FakeClock
) -> None:
    def wait() -> str:
        clock.advance(2.0)
        return "all are ready"

    asked_at = clock()
    clock.advance(1.0)
    assert stopwatch.wait_for_ranks(wait) == "all are ready"
    stopwatch.handed(asked_at, 0)
    measures = measuring.measures()
    assert (measures.waited.sum_s, measures.waited_for_ranks_s) == (3.0, 2.0)


def test_repr_shows_state(stopwatch: Stopwatch, measuring: Measuring) -> None:
    assert repr(stopwatch) == "<Stopwatch handed_at=None>"
    stopwatch.handed(stopwatch.clock(), 1)
    assert repr(stopwatch) == "<Stopwatch handed_at=1000.0>"
    assert repr(measuring).startswith("<Measuring batches=1 waited=<Durations 1 in ")
