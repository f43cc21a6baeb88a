"""A plan covers every record of every epoch exactly once, in an order that is the same one for ever."""

from __future__ import annotations

import re
import time
import tracemalloc
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl_torch.core.plan import Plan
from edl_torch.core.registration import validate_spec
from edl_torch.errors import InvalidArgument
from edl_torch.shard import DatasetSpec, Shuffle, Slice, Source

SOURCES = (
    Source(name="a", count=5),
    Source(name="none", count=0),
    Source(name="b", start=100, count=4),
    Source(name="a", start=50, count=3),
)
SPEC = DatasetSpec(name="training", sources=SOURCES, records_per_shard=2)
ORDERS: list[dict[str, bool]] = [
    {"shuffle": shuffle, "shuffle_shards": shards, "shuffle_in_shard": in_shard}
    for shuffle in (False, True)
    for shards in (False, True)
    for in_shard in (False, True)
]


@st.composite
def specs(draw: st.DrawFn) -> DatasetSpec:
    counts = draw(st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any))
    starts = draw(st.lists(st.integers(0, 2**40), min_size=len(counts), max_size=len(counts)))
    return DatasetSpec(
        name="training",
        sources=tuple(
            Source(name=f"s{i}", start=start, count=count)
            for i, (start, count) in enumerate(zip(starts, counts, strict=True))
        ),
        records_per_shard=draw(st.integers(1, 50)),
        seed=draw(st.integers()),
        shuffle_window=draw(st.sampled_from([1, 1, 2, 3, 16, 10**9])),
        **draw(st.sampled_from(ORDERS)),
    )


def records_of(spec: DatasetSpec) -> list[tuple[str, int]]:
    return [(s.name, s.start + i) for s in spec.sources for i in range(s.count)]


def whole(plan: Plan, epoch: int, window: int) -> Slice:
    return Slice(epoch=epoch, shard=window, skip=0, limit=plan.records_in(epoch, window))


def windows_of(plan: Plan, epoch: int) -> list[int]:
    return plan.windows_at(epoch, 0, plan.num_windows)


def epoch_of(plan: Plan, epoch: int) -> list[tuple[str, int]]:
    windows = windows_of(plan, epoch)
    return list(chain.from_iterable(plan.indices(whole(plan, epoch, window)) for window in windows))


# --- cutting -------------------------------------------------------------------------------------------


def test_a_shard_or_position_that_is_not_there_is_refused() -> None:
    plan = Plan(replace(SPEC, shuffle_shards=True))
    for call in (plan.bounds, plan.length, lambda n: plan.shard_at(0, n), lambda n: plan.position_of(0, n)):
        for number in (-1, 7):
            with pytest.raises(InvalidArgument, match=rf"{number} is not in dataset 'training', which has 7"):
                call(number)


@pytest.mark.parametrize(("skip", "limit"), [(-1, 1), (0, 3), (2, 1), (1, -1)])
def test_a_slice_outside_of_its_shard_is_refused(skip: int, limit: int) -> None:
    slice = Slice(epoch=0, shard=0, skip=skip, limit=limit)
    for order in ORDERS:
        plan = Plan(replace(SPEC, **order))
        for call in (plan.indices, plan.shard):
            with pytest.raises(InvalidArgument, match=r"outside of shard 0 .* has 2 records"):
                call(slice)


# --- every record once ---------------------------------------------------------------------------------


@given(spec=specs(), epoch=st.integers(0, 10**6))
@settings(derandomize=True)
def test_an_epoch_holds_every_record_exactly_once(spec: DatasetSpec, epoch: int) -> None:
    plan = Plan(spec)
    assert sorted(epoch_of(plan, epoch)) == sorted(records_of(spec))
    assert sum(plan.length(shard) for shard in range(plan.num_shards)) == plan.size == spec.size


@given(spec=specs(), epoch=st.integers(0, 10**6), data=st.data())
@settings(derandomize=True)
def test_any_cut_of_a_shard_into_slices_gives_the_same_order(
    spec: DatasetSpec, epoch: int, data: st.DataObject
) -> None:
    plan = Plan(spec)
    shard = data.draw(st.sampled_from(windows_of(plan, epoch)))
    length = plan.records_in(epoch, shard)
    cuts = sorted({0, length, *data.draw(st.lists(st.integers(0, length), max_size=5))})
    slices = [Slice(epoch=epoch, shard=shard, skip=a, limit=b - a) for a, b in pairwise(cuts)]
    expected = list(plan.indices(whole(plan, epoch, shard)))
    assert list(chain.from_iterable(plan.indices(slice) for slice in slices)) == expected
    assert list(chain.from_iterable(plan.shard(slice).indices() for slice in slices)) == expected
    assert [plan.locate(epoch, shard, position) for position in range(length)] == expected


@given(spec=specs(), epoch=st.integers(0, 10**6))
@settings(derandomize=True)
def test_positions_and_shards_are_inverse(spec: DatasetSpec, epoch: int) -> None:
    plan = Plan(spec)
    shards = [plan.shard_at(epoch, position) for position in range(plan.num_shards)]
    assert sorted(shards) == list(range(plan.num_shards))
    assert [plan.position_of(epoch, shard) for shard in shards] == list(range(plan.num_shards))


# --- order ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ({}, "a0 a1 a2 a3 a4 b100 b101 b102 b103 a50 a51 a52"),
        ({"shuffle_shards": True}, "a52 a2 a3 b102 b103 b100 b101 a0 a1 a50 a51 a4"),
        ({"shuffle_in_shard": True}, "a1 a0 a2 a3 a4 b100 b101 b102 b103 a50 a51 a52"),
        (
            {"shuffle_shards": True, "shuffle_in_shard": True},
            "a52 a2 a3 b102 b103 b100 b101 a1 a0 a50 a51 a4",
        ),
        (
            {"shuffle_shards": True, "shuffle_in_shard": True, "shuffle_window": 1},
            "a52 a2 a3 b102 b103 b100 b101 a1 a0 a50 a51 a4",
        ),
        ({"shuffle": True}, "b102 a0 a3 b100 b101 a50 b103 a51 a4 a2 a52 a1"),
        ({"shuffle": True, "shuffle_in_shard": True}, "b102 a0 a3 b100 b101 a50 b103 a51 a4 a2 a52 a1"),
        ({"shuffle": True, "shuffle_shards": True}, "a3 b100 b102 a0 b101 a50 b103 a51 a4 a2 a52 a1"),
    ],
)
def test_the_order_of_an_epoch_never_changes(order: dict[str, bool], expected: str) -> None:
    records = epoch_of(Plan(replace(SPEC, seed=5, **order)), 1)
    assert " ".join(f"{name}{index}" for name, index in records) == expected


# --- windows ---------------------------------------------------------------------------------------------

WINDOWED: dict[str, Any] = {"shuffle_shards": True, "shuffle_in_shard": True}


@given(spec=specs(), epoch=st.integers(0, 10**6))
@settings(derandomize=True)
def test_windows_are_runs_of_shards_in_the_order_of_the_epoch(spec: DatasetSpec, epoch: int) -> None:
    plan = Plan(spec)
    shards = [plan.shard_at(epoch, position) for position in range(plan.num_shards)]
    windows = windows_of(plan, epoch)
    assert windows == shards[:: plan.window]
    assert [plan.window_at(epoch, position) for position in range(plan.num_windows)] == windows
    assert [plan.window_position(epoch, window) for window in windows] == list(range(plan.num_windows))
    assert list(chain.from_iterable(plan.shards_in(epoch, window) for window in windows)) == shards
    before = 0
    for position, window in enumerate(windows):
        assert plan.records_before(epoch, position) == before
        records = sum(plan.length(shard) for shard in plan.shards_in(epoch, window))
        assert plan.num_shards_in(epoch, window) == len(plan.shards_in(epoch, window))
        assert plan.records_in(epoch, window) == records
        numbers = np.arange(before, before + records)
        assert plan.window_starts(epoch, numbers).tolist() == [before] * records
        for number in numbers.tolist():
            assert plan.window_position_at(epoch, number) == position
        before += records
        if plan.order is not Shuffle.GLOBAL:
            where = [(s.name, i) for s in plan.storage_of(epoch, window) for i in range(s.start, s.end)]
            assert sorted(plan.indices(whole(plan, epoch, window))) == sorted(where)
    assert plan.records_before(epoch, plan.num_windows) == before == plan.size


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        (2, "a3 a52 a2 b103 b101 b100 b102 a1 a50 a0 a51 a4"),
        (3, "a2 a3 b102 b103 a52 a1 b100 a51 a50 b101 a0 a4"),
        (100, "a1 b103 a0 a50 b100 a3 a52 a2 b102 b101 a4 a51"),
    ],
)
def test_the_order_in_windows_never_changes(window: int, expected: str) -> None:
    records = epoch_of(Plan(replace(SPEC, seed=5, shuffle_window=window, **WINDOWED)), 1)
    assert " ".join(f"{name}{index}" for name, index in records) == expected


def test_a_window_mixes_its_shards_evenly() -> None:
    spec = DatasetSpec(
        name="t",
        sources=(Source(name="a", count=64 * 50),),
        records_per_shard=50,
        shuffle_window=16,
        **WINDOWED,
    )
    plan = Plan(spec)
    for window in windows_of(plan, 3):
        numbers = plan.indices(whole(plan, 3, window)).numbers
        for batch in numbers[: 16 * 50].reshape(-1, 50):
            assert len(set((batch // 50).tolist())) > 10  # of 16; 15.3 on average


def test_only_records_shuffled_in_shards_have_windows() -> None:
    for order in ORDERS:
        plan = Plan(replace(SPEC, shuffle_window=3, **order))
        assert plan.window == (3 if plan.order is Shuffle.SHARD else 1)
    assert Plan(replace(SPEC, shuffle_window=100, **WINDOWED)).window == 7


def test_a_shard_inside_of_a_window_names_none() -> None:
    plan = Plan(replace(SPEC, shuffle_window=3, **WINDOWED))
    inside = plan.shard_at(0, 1)
    for call in (plan.window_position, plan.records_in, plan.shards_in, plan.num_shards_in):
        with pytest.raises(InvalidArgument, match=rf"no window .* begins with shard {inside} in epoch 0"):
            call(0, inside)
    with pytest.raises(InvalidArgument, match="no window"):
        plan.indices(Slice(epoch=0, shard=inside, skip=0, limit=1))


def test_windows_of_shards_that_are_more_than_64_bits_are_refused() -> None:
    sources = tuple(Source(name=str(i), count=1) for i in range(3))
    spec = DatasetSpec(name="t", sources=sources, records_per_shard=2**61)
    assert Plan(spec).records_before(0, 3) == 3
    more = tuple(Source(name=str(i), count=1) for i in range(9))
    assert Plan(replace(spec, sources=more)).records_before(0, 9) == 9
    with pytest.raises(InvalidArgument, match="3 shards of 2305843009213693952 records"):
        Plan(replace(spec, shuffle_window=2, shuffle_in_shard=True))


def test_the_order_of_a_large_dataset_never_changes() -> None:
    large = DatasetSpec(
        name="large",
        sources=(Source(name="a", count=10**11), Source(name="b", start=7, count=9 * 10**11)),
        records_per_shard=1000,
        seed=1,
        shuffle_shards=True,
        shuffle_in_shard=True,
    )
    plan = Plan(large)
    assert [plan.shard_at(2, position) for position in (0, 1, 10**9 - 1)] == [731656333, 687072700, 433690036]
    assert plan.position_of(2, plan.shard_at(2, 123_456_789)) == 123_456_789
    inside = plan.indices(Slice(epoch=2, shard=10**8, skip=0, limit=3))
    assert list(inside) == [("b", 445), ("b", 978), ("b", 924)]
    mixed = Plan(replace(large, shuffle_window=16))
    window = mixed.window_at(2, 10**6)
    assert list(mixed.indices(Slice(epoch=2, shard=window, skip=0, limit=3))) == [
        ("b", 453048238696),
        ("a", 34627947111),
        ("b", 222945189137),
    ]
    everywhere = Plan(replace(large, shuffle=True)).indices(Slice(epoch=2, shard=0, skip=0, limit=3))
    assert list(everywhere) == [("b", 186308091575), ("b", 420108679170), ("b", 762021895417)]


# --- the public shard ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "cut", "shown"),
    [
        ({}, Slice(epoch=6, shard=4, skip=1, limit=1), ("b", 103, 104, False)),
        # Shuffled, it has the bounds of all among which its records are.
        ({"shuffle_in_shard": True}, Slice(epoch=6, shard=4, skip=1, limit=1), ("b", 102, 104, True)),
        ({"shuffle": True}, Slice(epoch=6, shard=5, skip=0, limit=2), ("", 10, 12, True)),
    ],
)
def test_a_shard_shows_where_its_records_lie(
    order: dict[str, bool], cut: Slice, shown: tuple[str, int, int, bool]
) -> None:
    shard = Plan(replace(SPEC, **order)).shard(cut)
    assert (shard.name, shard.start, shard.end, shard.shuffled) == shown
    assert (shard.epoch, len(shard), len(shard.indices())) == (6, cut.limit, cut.limit)


# --- size ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "order", [*ORDERS, {**WINDOWED, "shuffle_window": 16}, {**WINDOWED, "shuffle_window": 10**9}]
)
def test_a_trillion_records_cost_neither_time_nor_memory(order: dict[str, Any]) -> None:
    sources = tuple(Source(name=f"s{i}", count=10**11) for i in range(10))
    spec = DatasetSpec(name="large", sources=sources, records_per_shard=256, **order)
    tracemalloc.start()
    began = time.process_time()
    plan = Plan(spec)
    shard = plan.window_at(0, plan.num_windows // 2)
    first = list(plan.indices(Slice(epoch=0, shard=shard, skip=0, limit=32)))
    took = time.process_time() - began
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(set(first)) == 32
    assert peak < 200_000
    assert took < 1  # a thousandth of it here; what grows with the records would take hours


def test_many_sources_are_planned_quickly() -> None:
    sources = tuple(Source(name=f"folder/{i}.csv", count=i % 100) for i in range(100_000))
    began = time.process_time()
    plan = Plan(DatasetSpec(name="many", sources=sources, records_per_shard=30, shuffle=True))
    assert time.process_time() - began < 10  # a fiftieth of it here
    assert plan.size == 4_950_000
    indices = plan.indices(whole(plan, 0, 5))
    assert list(indices) == [plan.locate(0, 5, position) for position in range(30)]
    for name, number in indices:
        assert 0 <= number < int(name.split("/")[1].split(".")[0]) % 100
    assert indices.numbers.dtype == np.int64


# --- what a dataset may be -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": ""}, "name is ''"),
        ({"name": 3}, "name is 3"),
        ({"sources": ()}, r"size is 0 records in 0 source\(s\)"),
        ({"sources": (Source(name="a", count=0),)}, r"size is 0 records in 1 source\(s\)"),
        ({"sources": (Source(name="a", count=-1),)}, "source 'a': count is -1"),
        ({"sources": (Source(name="a", start=-2, count=1),)}, "source 'a': start is -2"),
        ({"sources": (Source(name="a", count=1.5),)}, "count is 1.5 of type float"),  # type: ignore[arg-type]
        ({"sources": (Source(name="a", count=np.int64(2)),)}, "count .* of type int64: give a Python int"),
        ({"sources": (Source(name=None, count=1),)}, "name is not a string"),  # type: ignore[arg-type]
        (
            {"sources": (Source(name="a", start=3, count=2**62),)},
            f"source 'a': start \\+ count is {2**62 + 3}: 2\\*\\*62 is the most",
        ),
        ({"sources": tuple(Source(name=n, count=2**61) for n in "abc")}, "2\\*\\*62 is the most"),
        (
            {
                "sources": (
                    Source(name="a", count=5),
                    Source(name="b", count=9),
                    Source(name="a", start=4, count=1),
                )
            },
            r"records 0\.\.5 and 4\.\.5 of 'a' overlap: make the ranges disjoint",
        ),
        (
            {"records_per_shard": 0},
            "records_per_shard is 0: give the number of records in a shard, 1 or more",
        ),
        ({"records_per_shard": True}, "records_per_shard is True of type bool"),
        ({"num_epochs": -1}, "num_epochs is -1: give the number of epochs, or 0 for endless"),
        ({"max_bad_records": -1}, "max_bad_records is -1"),
        ({"seed": "x"}, "seed is 'x' of type str"),
        ({"shuffle": 1}, "shuffle is 1: give True or False"),
        ({"shuffle_in_shard": 1}, "shuffle_in_shard is 1: give True, False or None"),
        ({"task_type": 1}, "task_type is 1"),
    ],
)
def test_an_unusable_dataset_is_refused_by_field_value_and_remedy(
    change: dict[str, Any], message: str
) -> None:
    spec = replace(SPEC, **change)
    with pytest.raises(InvalidArgument, match=message):
        validate_spec(spec)
    with pytest.raises(InvalidArgument, match=message):
        Plan(spec)


def test_positions_outside_of_a_shard_are_named() -> None:
    plan = Plan(replace(SPEC, sources=(Source(name="a", start=100, count=20),), records_per_shard=8))
    message = "positions 7..9 are outside of shard 0 of dataset 'training', which has 8 records"
    with pytest.raises(InvalidArgument, match=f"^{re.escape(message)}$"):
        plan.shard(Slice(epoch=0, shard=0, skip=7, limit=2))


def test_a_plan_shows_what_it_plans() -> None:
    assert repr(Plan(replace(SPEC, shuffle=True))) == "<Plan 'training' shards=6 records=12 order=global>"
