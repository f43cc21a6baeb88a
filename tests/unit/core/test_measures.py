"""What a trainer measures: how durations are counted, what is refused, and what the master keeps of it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from edl_torch.core.calls import RegisterCall, Registration
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.core.persistence import dump, load
from edl_torch.core.status import BOUNDS_S, BUCKETS, Histogram, Measures, padded, trimmed
from edl_torch.errors import InvalidArgument, SessionLost
from edl_torch.shard import Source

SOME = Histogram(counts=(2, 1) + (0,) * (BUCKETS - 2), sum_s=0.25)
MEASURED = Measures(batches=3, records=12, waited=SOME, stepped=replace(SOME, sum_s=0.75))


def test_buckets_reach_from_microseconds_to_minutes() -> None:
    assert (BOUNDS_S[0], BOUNDS_S[-1], BUCKETS) == (2.0**-16, 512.0, 27)


def test_histograms_add_up() -> None:
    both = SOME + Histogram(counts=(0, 4) + (0,) * (BUCKETS - 2), sum_s=1.0)
    assert (both.counts[:3], both.sum_s, both.count) == ((2, 5, 0), 1.25, 7)
    assert SOME.mean_s == pytest.approx(0.25 / 3)
    assert Histogram().mean_s == 0


def test_empty_buckets_at_the_end_need_not_be_told() -> None:
    assert trimmed(SOME.counts) == (2, 1)
    assert padded((2, 1)) == SOME.counts
    assert trimmed((0, 3, 0)) == (0, 3)
    assert trimmed(Histogram().counts) == ()
    assert padded(()) == Histogram().counts


def test_waiting_share_is_of_the_time_that_was_timed() -> None:
    assert MEASURED.waiting_share == 0.25
    assert Measures(batches=3).waiting_share is None


def test_what_makes_a_batch_is_the_mean_of_those_that_were_timed() -> None:
    some = Measures(batches=9, timed=4, read_s=2.0, transform_s=0.5)
    assert (some.mean_read_s, some.mean_transform_s) == (0.5, 0.125)
    assert (MEASURED.mean_read_s, MEASURED.mean_transform_s) == (None, None)


@pytest.mark.parametrize(
    "bad",
    [
        Measures(batches=-1),
        Measures(records=-1),
        Measures(waited_for_ranks_s=math.nan),
        Measures(waited_for_ranks_s=math.inf),
        Measures(waited_for_ranks_s=-0.5),
        Measures(timed=-1),
        Measures(read_s=-0.5),
        Measures(transform_s=math.nan),
        Measures(waited=Histogram(counts=(1,) * (BUCKETS + 1))),
        Measures(waited=Histogram(counts=(-1,) * BUCKETS)),
        Measures(stepped=Histogram(sum_s=1e300)),
    ],
    ids=str,
)
def test_measures_that_cannot_be_are_refused_and_nothing_is_noted(bad: Measures) -> None:
    master = joined()
    with pytest.raises(InvalidArgument):
        master.heartbeat("s", 1, 5.0, 1, bad)
    (trainer,) = master.status(5.0).trainers
    assert (trainer.measures, trainer.idle_s) == (None, 5.0)


def test_the_last_measures_are_shown_of_each_trainer() -> None:
    master = joined()
    assert master.status(0.0).trainers[0].measures is None
    master.heartbeat("s", 1, 1.0, 1, MEASURED)
    assert master.status(1.0).trainers[0].measures == MEASURED
    master.heartbeat("s", 1, 2.0, 2)  # as of a trainer that sends none
    assert master.status(2.0).trainers[0].measures == MEASURED
    with pytest.raises(SessionLost):
        master.heartbeat("other", 1, 2.0, 1, MEASURED)


def test_measures_are_not_journalled() -> None:
    master = joined()
    before = dump(master)
    master.heartbeat("s", 1, 1.0, 1, MEASURED)
    assert dump(master) == before
    assert load(before, ledger_id="ledger", now=0.0).status(0.0).trainers[0].measures is None


def joined() -> Dispatcher:
    master = Dispatcher(ledger_id="ledger")
    data = Registration(name="d", sources=(Source(name="a", count=8),))
    master.register(RegisterCall(session="s", worker_id="w", batch_size=4, registration=data), 0.0)
    return master


def test_a_heartbeat_with_another_count_is_progress() -> None:
    master = joined()
    for now, count in ((10.0, 0), (20.0, 7), (25.0, 7)):
        master.heartbeat("s", 1, now, count)
    (member,) = master.members
    assert (member.progressed, member.seen) == (20.0, 25.0)
