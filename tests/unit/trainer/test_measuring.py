"""Counters that the training loop adds to, and what is seen of them."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from edl_torch.core.status import BOUNDS_S
from edl_torch.trainer.measuring import Durations, Measuring


def bucket_of(seconds: float) -> int:
    durations = Durations()
    durations.add(seconds)
    durations.histogram().check("a duration")
    return durations.histogram().counts.index(1)


@given(seconds=st.floats(0, 1e9))
def test_a_duration_is_counted_between_its_bounds(seconds: float) -> None:
    bucket = bucket_of(seconds)
    assert (0.0, *BOUNDS_S)[bucket] <= seconds
    assert seconds < (*BOUNDS_S, math.inf)[bucket]


def test_what_is_too_short_or_too_long_is_in_the_first_and_the_last_bucket() -> None:
    assert [bucket_of(seconds) for seconds in (0.0, 1e-9, 0.01, 1000.0)] == [0, 0, 10, 26]


def test_measures_are_those_of_the_moment() -> None:
    measuring = Measuring()
    measuring.handed(4, 0.5, 0.25)
    measuring.stepped.add(1.5)
    before = measuring.measures()
    measuring.handed(0, 0.5)
    measuring.reported(3)
    measuring.made(0.5, 0.125)
    measuring.made(1.5, 0.25)
    after = measuring.measures()
    assert (before.batches, before.records, before.waited.sum_s, before.waiting_share) == (1, 4, 0.5, 0.25)
    assert (before.timed, after.timed, after.read_s, after.transform_s) == (0, 2, 2.0, 0.375)
    assert (after.batches, after.records, after.waited.sum_s, after.waited_for_ranks_s) == (3, 7, 1.0, 0.25)
