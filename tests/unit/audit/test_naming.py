"""Numbers back to names: each record of each order, and ranges as few as they can be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edl_torch.audit import findings
from edl_torch.audit.findings import name_records
from edl_torch.audit.intervals import Coordinates, Intervals
from edl_torch.core.plan import Plan
from edl_torch.errors import AuditError
from edl_torch.shard import DatasetSpec, Slice, Source

SOURCES = (Source(name="a", start=5, count=20), Source(name="empty", count=0), Source(name="b", count=5))
ORDERS = [
    {},
    {"shuffle_in_shard": True},
    {"shuffle": True},
    {"shuffle_shards": True, "shuffle_in_shard": True},
]
WINDOWED = [
    {"shuffle_in_shard": True, "shuffle_window": 2},
    {"shuffle_shards": True, "shuffle_in_shard": True, "shuffle_window": 2},
    {"shuffle_shards": True, "shuffle_in_shard": True, "shuffle_window": 100},
]


def make(**order) -> Coordinates:
    return Coordinates(DatasetSpec(name="d", sources=SOURCES, records_per_shard=8, seed=3, **order))


def every_record(plan: Plan, epochs: int) -> list[tuple[int, str, int]]:
    """Epoch, name and index of each number on the line, by the plan alone."""
    windows = [
        (e, w)
        for e in range(epochs)
        for w in (range(plan.num_shards) if plan.window == 1 else plan.windows_at(e, 0, plan.num_windows))
    ]
    slices = [Slice(epoch=e, shard=w, skip=0, limit=plan.records_in(e, w)) for e, w in windows]
    return [(cut.epoch, *pair) for cut in slices for pair in plan.indices(cut)]


@pytest.mark.parametrize("order", ORDERS + WINDOWED)
@given(chosen=st.sets(st.integers(0, 74)))
def test_ranges_are_the_records_that_the_plan_has_there(order, chosen):
    line = make(**order)
    records = every_record(line.plan, 3)
    ranges = name_records(line, Intervals.of([(one, one + 1) for one in chosen]), 1000)
    named = [(r.epoch, r.name, index) for r in ranges for index in range(r.start, r.end)]
    assert sorted(named) == sorted(records[number] for number in chosen)
    keys = [(r.epoch, "ab".index(r.name), r.start) for r in ranges]
    assert keys == sorted(keys)
    ends = {(r.epoch, r.name, r.end) for r in ranges}
    assert not ends & {(r.epoch, r.name, r.start) for r in ranges}  # nothing that touches is apart


@pytest.mark.parametrize("order", ORDERS + WINDOWED)
def test_whole_epochs_are_one_range_a_source(order):
    ranges = name_records(make(**order), Intervals.run(25, 75), 10)
    assert [(r.epoch, r.name, r.start, r.end) for r in ranges] == [
        (1, "a", 5, 25),
        (1, "b", 0, 5),
        (2, "a", 5, 25),
        (2, "b", 0, 5),
    ]


@pytest.mark.parametrize("order", ORDERS + WINDOWED)
def test_a_million_epochs_of_loss_are_named_at_once(order):
    ranges = name_records(make(**order), Intervals.run(7, 25 * 1_000_000), 3)
    assert len(ranges) == 3


def test_few_shuffled_records_are_looked_up_of_many(monkeypatch):
    monkeypatch.setattr(findings, "MOST_LOOKED_UP", 4)
    ranges = name_records(make(shuffle=True), Intervals.run(0, 24), 100)
    assert sum(map(len, ranges)) == 4


@pytest.mark.parametrize("order", ORDERS)
def test_the_line_is_that_of_the_plan(order):
    line = make(**order)
    shards = np.arange(line.plan.num_shards)
    assert line.lengths(shards).tolist() == [line.plan.length(shard) for shard in shards.tolist()]
    assert line.starts(shards).tolist() == np.cumsum([0, *line.lengths(shards)[:-1]]).tolist()
    numbers = np.arange(75)
    firsts = np.repeat(line.starts(shards), line.lengths(shards))
    assert line.window_starts(numbers).tolist() == [25 * e + f for e in range(3) for f in firsts.tolist()]


@pytest.mark.parametrize("order", WINDOWED)
def test_the_line_of_windows_is_that_of_the_plan(order):
    line = make(**order)
    plan = line.plan
    windows = [(e, w) for e in range(3) for w in plan.windows_at(e, 0, plan.num_windows)]
    lengths = [plan.records_in(*window) for window in windows]
    firsts = [25 * e + plan.records_before(e, plan.window_position(e, w)) for e, w in windows]
    epochs, numbers = np.array(windows).T
    assert [part.tolist() for part in line.windows(epochs, numbers)] == [firsts, lengths]
    assert line.window_starts(np.arange(75)).tolist() == np.repeat(firsts, lengths).tolist()
    inside = [(e, s) for e in range(3) for s in range(plan.num_shards) if (e, s) not in windows]
    for epoch, shard in inside:
        one = np.array([0])
        assert line.unsound(one + epoch, one + shard, one, one + 1).tolist() == [0]


def test_more_than_64_bits_of_records_are_refused():
    line = Coordinates(
        DatasetSpec(name="d", sources=(Source(name="", count=2**61),), records_per_shard=2**50)
    )
    line.check_epochs(3)
    with pytest.raises(AuditError, match="5 epoch"):
        line.check_epochs(5)
