"""A slice comes as columnar batches, in the plan's order; a record that cannot be read costs no other."""

from __future__ import annotations

import errno
from typing import Any

import numpy as np
import pytest
from plan_kit import COUNTS, PLANS, in_order, part, planned

from edl_torch.core.calls import Grant
from edl_torch.core.plan import Plan
from edl_torch.data.reading import columns
from edl_torch.data.reading.columns import read_columns
from edl_torch.errors import BadRecord, ReaderError, SourceUnavailable
from edl_torch.readers.base import AbstractDataReader, Range
from edl_torch.shard import IndexArray

SIZE = 4


class Columns(AbstractDataReader):
    """Record `i` of "a" is `i`, of "b" `1000 + i`; notes what it is asked for."""

    def __init__(self, bad: frozenset[int] = frozenset(), down: frozenset[int] = frozenset()) -> None:
        super().__init__()
        self.bad, self.down = bad, down
        self.asked: list[list[int]] = []
        self.expected: list[tuple[list[Range], bool]] = []

    def create_shards(self, mode: Any = None) -> dict[str, int]:
        return COUNTS

    def read_records(self, task: Any) -> Any:
        raise AssertionError("columns are read in batches")

    def expect(self, ranges: Any, *, in_order: bool = False) -> None:
        self.expected.append((list(ranges), in_order))

    def read_batch(self, name: str, indices: IndexArray) -> Any:
        numbers = indices + 1000 * (name == "b")
        self.asked.append(numbers.tolist())
        for number in numbers.tolist():
            if number in self.bad:
                raise ValueError(f"no byte of {number}")
            if number in self.down:
                raise OSError(errno.EIO, "the disk is gone")
        return self.made(numbers)

    def made(self, numbers: IndexArray) -> Any:
        return numbers


class Tables(Columns):
    """Columns, one of them of rows."""

    def made(self, numbers: IndexArray) -> Any:
        return {"id": numbers, "more": {"half": numbers / 2, "row": np.stack([numbers, -numbers], axis=1)}}


class Texts(Columns):
    """Batches that nobody can put together."""

    def made(self, numbers: IndexArray) -> Any:
        return [str(number) for number in numbers.tolist()]


class Book:
    """The positions that were bad, and what was said of them."""

    def __init__(self) -> None:
        self.said: dict[int, str] = {}

    def __call__(self, position: int, error: ReaderError) -> None:
        assert isinstance(error, BadRecord)
        self.said[position] = str(error)


def read(
    reader: Columns, plan: Plan, grant: Grant | None = None, size: int = SIZE
) -> tuple[list[tuple[list[tuple[int, int]], Any]], dict[int, str]]:
    book = Book()
    grant = part(plan) if grant is None else grant
    return list(read_columns(reader, plan, grant, size, book)), book.said


def positions(batches: list[tuple[list[tuple[int, int]], Any]]) -> list[int]:
    return [at for runs, _ in batches for first, after in runs for at in range(first, after)]


@pytest.mark.parametrize("kind", [Columns, Tables])
@pytest.mark.parametrize("skip", [0, 3])
@pytest.mark.parametrize("order", list(PLANS))
def test_batches_have_the_records_of_the_slice_in_its_order(order: str, skip: int, kind: Any) -> None:
    plan = PLANS[order]
    grant = part(plan, skip=skip)
    batches, bad = read(kind(), plan, grant)
    found = [batch if kind is Columns else batch["id"] for _, batch in batches]
    assert np.concatenate(found).tolist() == in_order(plan, grant)
    assert positions(batches) == list(range(skip, grant.slice.stop))
    assert [len(batch) for batch in found[:-1]] == [SIZE] * (len(found) - 1)
    assert bad == {}
    for _, batch in batches if kind is Tables else ():
        assert batch["more"]["half"].tolist() == (batch["id"] / 2).tolist()
        assert batch["more"]["row"].tolist() == [[number, -number] for number in batch["id"].tolist()]


@pytest.mark.parametrize("order", ["windows", "global"])
def test_batches_that_nobody_can_put_together_are_of_one_source(order: str) -> None:
    plan = PLANS[order]
    grant = part(plan)
    batches, _ = read(reader := Texts(), plan, grant)
    assert sum(map(len, reader.asked)) == grant.slice.limit + SIZE, "the first batch is tried together, once"
    assert [int(text) for _, batch in batches for text in batch] == in_order(plan, grant)
    assert positions(batches) == list(range(grant.slice.stop))
    assert all(len({int(text) >= 1000 for text in batch}) == 1 for _, batch in batches)


@pytest.mark.parametrize(
    ("plan", "size", "read_at_once"),
    [
        (PLANS["stored"], SIZE, [4, 2]),
        (planned(in_shard=True, counts={"a": 6}), 1, [1] * 6),
        (planned(in_shard=True, window=2, counts={"a": 12}), 1, [1, 11]),
        (PLANS["windows"], SIZE, [2, 2, 21, 7]),
    ],
    ids=["together", "mixed in a shard", "mixed over two", "of two sources"],
)
def test_scattered_records_of_several_batches_are_read_at_once(
    plan: Plan, size: int, read_at_once: list[int]
) -> None:
    """The first batch says how large one is; then a block costs one read of each source."""
    reader = Columns()
    read(reader, plan, size=size)
    assert [len(asked) for asked in reader.asked] == read_at_once


@pytest.mark.parametrize(
    ("batches_that_fit", "read_at_once"),
    [(0, [1] * 40), (1, [1] * 40), (3, [1] + [3] * 13), (99, [1, 16, 16, 7])],
)
def test_no_more_is_read_at_once_than_fits(
    batches_that_fit: int, read_at_once: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = Columns()
    monkeypatch.setattr(columns, "MOST_BYTES", batches_that_fit * 8)
    read(reader, planned(in_shard=True, window=8, counts={"a": 40}), size=1)
    assert [len(asked) for asked in reader.asked] == read_at_once


@pytest.mark.parametrize(
    ("batches_that_fit", "bad", "read_at_once"),
    [
        (2, 2, [1, 2, 1, 2, 1, 1, 1, 1] + [2] * 18),
        (99, 2, [1, 16, 1, 16, 1, 1, 1, 1, 16, 16, 4]),
        (99, 0, [1, 1, 1, 1, 16, 16, 6]),  # thrice: alone, as a batch, and by name
    ],
)
def test_a_batch_beside_a_bad_record_is_read_again_by_itself(
    batches_that_fit: int, bad: int, read_at_once: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "MOST_BYTES", batches_that_fit * 8)
    plan = planned(in_shard=True, window=8, counts={"a": 40})
    reader = Columns(bad=frozenset(in_order(plan, part(plan))[bad : bad + 1]))
    batches, said = read(reader, plan, size=1)
    assert positions(batches) == [at for at in range(40) if at != bad]
    assert list(said) == [bad]
    assert [len(asked) for asked in reader.asked] == read_at_once


@pytest.mark.parametrize(("bytes_that_fit", "sizes"), [(3, [1, 3, 3, 3, 2]), (99, [1, 11])])
def test_the_least_batch_is_of_a_byte(
    bytes_that_fit: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Bytes(Columns):
        def made(self, numbers: IndexArray) -> Any:
            return numbers.astype(np.int8)

    reader = Bytes()
    monkeypatch.setattr(columns, "MOST_BYTES", bytes_that_fit)
    read(reader, planned(in_shard=True, window=8, counts={"a": 12}), size=1)
    assert [len(asked) for asked in reader.asked] == sizes


@pytest.mark.parametrize(("order", "expected"), [("stored", [([("a", 0, 6)], True)]), ("global", [])])
def test_the_reader_hears_what_comes_next(order: str, expected: Any) -> None:
    reader = Columns()
    read(reader, PLANS[order])
    assert reader.expected == expected


@pytest.mark.parametrize("order", list(PLANS))
def test_a_record_that_cannot_be_read_costs_no_other(order: str) -> None:
    plan = PLANS[order]
    numbers = in_order(plan, part(plan))
    bad = frozenset(numbers[at] for at in (1, 4, len(numbers) - 1))
    batches, said = read(Columns(bad), plan)
    assert np.concatenate([batch for _, batch in batches]).tolist() == [n for n in numbers if n not in bad]
    assert positions(batches) == [at for at, number in enumerate(numbers) if number not in bad]
    assert {numbers[at] for at in said} == bad
    for at, words in said.items():
        name = "b" if numbers[at] >= 1000 else "a"
        assert f"record {numbers[at] % 1000} of {name!r}" in words


@pytest.mark.parametrize("order", list(PLANS))
def test_a_source_that_is_gone_is_named_by_its_record_and_puts_none_in_quarantine(order: str) -> None:
    plan = PLANS[order]
    numbers = in_order(plan, part(plan))
    reader = Columns(down=frozenset(numbers[5:6]))
    with pytest.raises(SourceUnavailable, match=r"record \d+ of '[ab]'.*the disk is gone"):
        read(reader, plan)
    assert sum(numbers[5] in asked for asked in reader.asked) == 1, "records are not tried one by one"


def test_batches_of_other_kinds_from_each_source_are_read_by_source() -> None:
    class Mixed(Columns):
        def made(self, numbers: IndexArray) -> Any:
            return numbers.astype(np.int32 if numbers[0] < 1000 else np.int64)

    plan = PLANS["global"]
    grant = part(plan)
    batches, _ = read(Mixed(), plan, grant)
    assert [int(number) for _, batch in batches for number in batch] == in_order(plan, grant)
    for _, batch in batches:
        assert batch.dtype == (np.int32 if batch[0] < 1000 else np.int64)


@pytest.mark.parametrize(
    ("left", "right", "together"),
    [
        ((2, 3), (1, 3), (3, 3)),
        ((2,), (1,), (3,)),
        ((2, 3), (1, 4), None),
        ((2, 3, 4), (1, 3, 5), None),
        ((2, 3), (1,), None),
        ((), (), None),
    ],
)
def test_arrays_of_equal_rows_make_one(left: Any, right: Any, together: Any) -> None:
    joined = columns._joined([np.zeros(left), np.zeros(right)])
    assert joined is None if together is None else joined.shape == together
