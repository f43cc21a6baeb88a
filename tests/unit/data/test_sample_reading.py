"""A lease is read sample by sample: each readable record once, in the plan's order; bad ones are named."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from plan_kit import PLANS as MADE
from plan_kit import Stored, in_order, part, planned

from edl_torch.core.calls import Grant
from edl_torch.core.plan import Plan
from edl_torch.data.reading.sample_reading import (
    ReadingTimes,
    SampleList,
    SampleReader,
)
from edl_torch.errors import AccountingError, BadRecord, ReaderError, SourceUnavailable
from edl_torch.readers.base import IndexedReader, Range
from edl_torch.shard import Slice

ALL_SHARDS = [("a", 0, 6), ("a", 6, 12), ("a", 12, 18), ("a", 18, 23), ("b", 0, 6), ("b", 6, 9)]


class Leaving(Stored):
    """Its source may be away."""

    is_down = False

    def number(self, name: str, index: int) -> int:
        if self.is_down and index > 7:
            raise OSError(errno.EIO, "the disk is gone")
        return super().number(name, index)


class Picking(Leaving):
    """With random access, and told what comes next."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.expected: list[tuple[list[Range], bool]] = []

    def read_record(self, name: str, index: int) -> int:
        return self.number(name, index)

    def expect(self, ranges: Any, *, in_order: bool = False) -> None:
        self.expected.append((list(ranges), in_order))
        if self.is_down:
            raise ReaderError("the disk is gone")


PLANS = MADE | {"shuffled windows": planned(shards=True, in_shard=True, window=8)}
KINDS = [
    (order, kind) for order in PLANS for kind in (Leaving, Picking) if (order, kind) != ("global", Leaving)
]


def as_it_is(plan: Plan, rest: Slice, records: Any) -> Any:
    return records


class Reading:
    """One reader, and the leases that are read through it."""

    def __init__(self, reader: Stored) -> None:
        self.samples_of = SampleReader(reader, as_it_is)
        self.said: dict[int, str] = {}

    def __call__(self, plan: Plan, grant: Grant) -> dict[int, int]:
        """The samples by position, as the run that is kept says it."""
        self.run = [grant.task, grant.slice.skip, grant.slice.skip]

        def on_bad(position: int, error: ReaderError) -> list[int]:
            assert position == self.run[2]
            if not isinstance(error, BadRecord):
                raise error
            self.said[position] = str(error)
            self.run = [grant.task, position + 1, position + 1]
            return self.run

        found: dict[int, int] = {}
        for sample in self.samples_of.samples(plan, grant, self.run, on_bad):
            found[self.run[2] - 1] = sample
        assert self.run[2] == grant.slice.stop
        return found

    def lists(self, plan: Plan, grant: Grant) -> list[int]:
        """The samples, by the list."""
        run = [grant.task, grant.slice.skip, grant.slice.skip]
        samples = SampleList(4, ReadingTimes())

        def on_bad(position: int, error: ReaderError) -> list[int]:
            return [grant.task, position + 1, position + 1]

        found = [*self.samples_of.lists(samples, plan, grant, run, on_bad), *samples.rest()]
        return [sample for batch in found for sample in batch]


@pytest.mark.parametrize(("order", "kind"), KINDS)
@pytest.mark.parametrize("bad", [(), (0,), (3, 4), (1, 5)])
def test_every_readable_record_comes_once_and_in_order(order: str, kind: Any, bad: tuple[int, ...]) -> None:
    plan = PLANS[order]
    grant = part(plan)
    numbers = in_order(plan, grant)
    reading = Reading(kind(frozenset(numbers[at] for at in bad)))
    assert reading(plan, grant) == {at: n for at, n in enumerate(numbers) if at not in bad}
    assert tuple(reading.said) == bad
    for at in bad:
        name, number = ("b", numbers[at] - 1000) if numbers[at] >= 1000 else ("a", numbers[at])
        assert f"record {number} of {name!r}" in reading.said[at]


@pytest.mark.parametrize("skip", [0, 4])
@pytest.mark.parametrize("bad", [5, 23])
def test_nothing_is_asked_for_after_the_last_record(skip: int, bad: int) -> None:
    plan = PLANS["stored"]
    grant = part(plan, skip=skip)
    for by_list in (False, True):
        reader = Stored(frozenset([bad]))
        found = Reading(reader).lists(plan, grant) if by_list else list(Reading(reader)(plan, grant).values())
        assert found == [number for number in in_order(plan, grant) if number != bad]
        assert reader.ranges == [("a", skip, 6)]


@pytest.mark.parametrize("order", ["stored", "in shard", "windows"])
def test_what_a_reader_promised_and_does_not_have_is_bad(order: str) -> None:
    plan = PLANS[order]
    grant = part(plan)
    numbers = in_order(plan, grant)
    reading = Reading(Stored(ends=4))
    there = {at: number for at, number in enumerate(numbers) if number % 1000 < 4}
    if order == "stored":
        assert reading(plan, grant) == there
        assert reading.said[4].endswith(
            "Stored.read_records() ended 2 record(s) early; create_shards() promised them"
        )
        assert "ended 1 record(s) early" in reading.said[5]
    else:
        assert reading(plan, grant) == there
        assert "ended 2 record(s) early" in reading.said[numbers.index(4)]
        assert "ended 1 record(s) early" in reading.said[numbers.index(5)]
    assert set(reading.said) == set(range(len(numbers))) - set(there)


def test_a_window_is_read_once_for_leases_that_come_in_order() -> None:
    plan = PLANS["windows"]
    reader = Stored()
    reading = Reading(reader)
    found = []
    for skip, stop in ((0, 5), (5, 9), (12, plan.records_in(1, 0))):
        found += reading(plan, part(plan, skip=skip, stop=stop)).values()
    assert len(reader.ranges) == len(ALL_SHARDS)
    assert found == in_order(plan, part(plan, stop=9)) + in_order(plan, part(plan, skip=12))
    reading(plan, part(plan, skip=9, stop=12))
    assert len(reader.ranges) == 2 * len(ALL_SHARDS), "what was let go is read again"


IN_SHARD = PLANS["in shard"]


@pytest.mark.parametrize(
    ("plan", "epoch", "shard"),
    [(IN_SHARD, 1, 1), (IN_SHARD, 2, 0), (Plan(replace(IN_SHARD.spec, seed=4)), 1, 0)],
    ids=["shard", "epoch", "plan"],
)
def test_a_window_of_another_one_is_read_anew(plan: Plan, epoch: int, shard: int) -> None:
    reading = Reading(Stored())
    reading(IN_SHARD, part(IN_SHARD, stop=3))
    rest = Grant(task=7, attempt=1, slice=Slice(epoch=epoch, shard=shard, skip=3, limit=3))
    assert list(reading(plan, rest).values()) == in_order(plan, rest)


@pytest.mark.parametrize(("order", "kind"), KINDS)
def test_a_source_that_is_gone_puts_no_record_in_quarantine_and_may_come_back(order: str, kind: Any) -> None:
    plan = PLANS[order]
    grant = part(plan, shard=1) if order in ("stored", "in shard") else part(plan)
    reader = kind()
    reading = Reading(reader)
    reader.is_down = True
    with pytest.raises(SourceUnavailable, match="the disk is gone"):
        reading(plan, grant)
    assert reading.said == {}
    reader.is_down = False
    assert list(reading(plan, grant).values()) == in_order(plan, grant)


def test_a_source_that_is_gone_is_asked_once_for_a_window() -> None:
    plan = PLANS["windows"]
    reader = Leaving()
    reader.is_down = True
    reading = Reading(reader)
    with pytest.raises(SourceUnavailable):
        reading(plan, part(plan))
    failed = [name for name, start, end in reader.ranges if end > 8]
    assert len(failed) == 1


@pytest.mark.parametrize(
    ("order", "expected"),
    [("stored", []), ("in shard", [ALL_SHARDS[:1]]), ("windows", [ALL_SHARDS]), ("global", [])],
)
def test_a_reader_hears_which_records_of_blocks_are_picked_next(
    order: str, expected: list[list[Range]]
) -> None:
    reader = Picking()
    Reading(reader)(PLANS[order], part(PLANS[order]))
    assert [sorted(ranges) for ranges, _ in reader.expected] == expected
    assert not any(in_order for _, in_order in reader.expected)


def test_a_global_shuffle_needs_random_access() -> None:
    with pytest.raises(AccountingError, match=r"Stored has no read_record\(name, index\)"):
        Reading(Stored())(PLANS["global"], part(PLANS["global"]))


@pytest.mark.parametrize("order", ["stored", "in shard", "windows"])
def test_a_reader_that_gives_more_than_it_is_asked_for_is_cut(order: str) -> None:
    drawn: list[int] = []

    class Endless(Stored):
        def read_records(self, task: Any) -> Iterator[int]:
            for index in count(task.start):
                drawn.append(index)
                yield self.number(task.shard_name, index)

    plan = PLANS[order]
    grant = part(plan)
    assert Reading(Endless()).lists(plan, grant) == in_order(plan, grant)
    assert len(drawn) == len(in_order(plan, grant))


def test_a_reader_of_one_source_is_given_all_numbers_of_a_slice_at_once() -> None:
    asked: list[list[int]] = []

    class One(IndexedReader):
        count = 12

        def load(self, index: int) -> int:
            raise AssertionError("records are loaded together")

        def load_each(self, indices: Any) -> Iterator[int]:
            asked.append(list(indices))
            return iter(asked[-1])

    plan = planned(in_shard=True, counts={"a": 12})
    grant = part(plan)
    assert Reading(One("a")).lists(plan, grant) == in_order(plan, grant)  # type: ignore[arg-type]
    assert asked == [in_order(plan, grant)]
