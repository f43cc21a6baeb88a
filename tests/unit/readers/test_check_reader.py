"""The contract test lets good readers pass and names the rule that a bad one breaks."""

from __future__ import annotations

import itertools
import random
import time

import numpy as np
import pytest
import torch

from edl_torch.errors import ReaderError
from edl_torch.readers.base import AbstractDataReader
from edl_torch.testing.check_reader import batch_row_equals, check_reader, records_equal


class Good(AbstractDataReader):
    """Two sources, one of which starts at 5; all optional methods."""

    sources = (("a", 0, 7), ("b", 5, 100))

    def create_shards(self):
        return {name: (start, count) for name, start, count in self.sources}

    def read_records(self, task):
        self.check(task.shard_name, task.start, task.end)
        return (self.record(task.shard_name, index) for index in range(task.start, task.end))

    def read_record(self, name, index):
        self.check(name, index, index + 1)
        return self.record(name, index)

    def read_batch(self, name, indices):
        return {"x": indices * 0.5, "y": np.stack([indices, indices], axis=1)}

    def record(self, name, index):
        return {"x": np.float64(index * 0.5), "y": np.array([index, index])}

    def check(self, name, start, end):
        bounds = {source: (first, first + count) for source, first, count in self.sources}
        if name not in bounds or not bounds[name][0] <= start <= end <= bounds[name][1]:
            raise ReaderError(f"{name} {start} {end}")


class Safe(Good):
    thread_safe = True


class SequentialOnly(AbstractDataReader):
    def create_shards(self, mode):
        return {"lines": 9, "nothing": 0}

    def read_records(self, task):
        rows = {"lines": 9, "nothing": 0}[task.shard_name]
        if not 0 <= task.start <= task.end <= rows:
            raise IndexError(task.start)
        return [float("nan")] * (task.end - task.start)


class CountTooHigh(Good):
    def read_records(self, task):
        return itertools.islice(super().read_records(task), 3)


class TwoRunsOfOneStorage(Good):
    def create_shards(self):
        return [("a", 0, 3), ("b", 50, 10), ("a", 3, 4), ("b", 5, 40), ("b", 60, 45)]


@pytest.mark.parametrize("factory", [Good, Safe, SequentialOnly, TwoRunsOfOneStorage])
def test_good_readers_pass(factory):
    check_reader(factory, max_records=10)
    check_reader(factory, max_records=1000)


def test_a_reader_that_ends_early_beyond_its_end_passes():
    check_reader(EndsEarly, max_records=10)


class Overlap(Good):
    def create_shards(self):
        return [("a", 3, 4), ("a", 0, 4)]


class NothingThere(Good):
    """As a reader of a folder whose name is mistyped."""

    def create_shards(self):
        return {}


class OtherSourcesEveryTime(Good):
    numbers = itertools.count(1)

    def __init__(self):
        self.sources = (("a", 0, next(self.numbers)),)


class Random(Good):
    def record(self, name, index):
        return random.random()


class RangeFromTheStart(Good):
    def read_records(self, task):
        self.check(task.shard_name, task.start, task.end)
        return (self.record(task.shard_name, index) for index in range(task.end - task.start))


class SharedPosition(Good):
    """One file handle for all iterators."""

    def read_records(self, task):
        self.check(task.shard_name, task.start, task.end)
        self.position = task.start
        for _ in range(task.end - task.start):
            self.position += 1
            yield self.record(task.shard_name, self.position - 1)


class OtherRecordAtRandomAccess(Good):
    def read_record(self, name, index):
        return super().read_record(name, index // 2 * 2)


class BatchInOtherOrder(Good):
    def read_batch(self, name, indices):
        return super().read_batch(name, np.sort(indices))


class SharedSeek(Good):
    """One position for all threads."""

    thread_safe = True
    position = 0

    def read_record(self, name, index):
        self.check(name, index, index + 1)
        self.position = index
        time.sleep(0.0001)
        return self.record(name, self.position)


class OpenFile(Good):
    def __init__(self):
        self.lock = (number for number in range(3))


class OpenFileAfterUse(Good):
    def record(self, name, index):
        self.lock = (number for number in range(3))
        return super().record(name, index)


class Fat(Good):
    def __init__(self):
        self.data = b"x" * (2 << 20)


class ForgetsWhenPickled(Good):
    read_batch = AbstractDataReader.read_batch

    def __init__(self):
        self.offset = 1

    def __setstate__(self, state):
        self.offset = 0

    def record(self, name, index):
        return index + self.offset


class ForgetsUsed(Good):
    """Its pickle is right until it was used."""

    read_batch = AbstractDataReader.read_batch

    def __getstate__(self):
        return self.__dict__ or {"nothing": 0}

    def __setstate__(self, state):
        self.shift = int(state.get("used", False))

    def record(self, name, index):
        self.used = True
        return index + getattr(self, "shift", 0)


class ShortRead(Good):
    def check(self, name, start, end):
        if name not in ("a", "b"):
            raise KeyError(name)

    def read_records(self, task):
        self.check(task.shard_name, task.start, task.end)
        first, count = {name: (s, c) for name, s, c in self.sources}[task.shard_name]
        end = min(task.end, first + count)
        return (self.record(task.shard_name, index) for index in range(task.start, end))


class EndsEarly(ShortRead):
    def read_record(self, name, index):
        self.check(name, index, index + 1)
        return Good.record(self, name, range(105 if name == "b" else 7)[index])


class GoesOn(ShortRead):
    def read_records(self, task):
        self.check(task.shard_name, task.start, task.end)
        return (self.record(task.shard_name, index) for index in range(task.start, task.end))


class AnyName(Good):
    def check(self, name, start, end):
        super().check(name if name in ("a", "b") else "a", start, end)


class OtherError(Good):
    def check(self, name, start, end):
        try:
            super().check(name, start, end)
        except ReaderError as exc:
            raise RuntimeError("out") from exc


@pytest.mark.parametrize(
    ("factory", "rule"),
    [
        (CountTooHigh, "the count is true"),
        (Overlap, "no record belongs to two sources: 'a' around record 3"),
        (NothingThere, "there is a source to check: create_shards gave none; is the path right"),
        (OtherSourcesEveryTime, "two readers have the same sources"),
        (Random, "a second pass equals the first"),
        (RangeFromTheStart, "a part equals that part of the whole"),
        (SharedPosition, "two iterators do not disturb each other"),
        (OtherRecordAtRandomAccess, "read_record equals read_records"),
        (SharedSeek, "a thread_safe reader reads the same in threads"),
        (BatchInOtherOrder, "read_batch equals read_records"),
        (OpenFile, "a reader pickles: TypeError"),
        (OpenFileAfterUse, "a reader pickles: TypeError"),
        (Fat, "a reader pickles small"),
        (ForgetsWhenPickled, "a reader pickled before use reads the same"),
        (ForgetsUsed, "a reader pickled after use reads the same"),
        (GoesOn, "a range beyond the end is refused, or ends early"),
        (AnyName, "an unknown source is refused by read_records"),
        (OtherError, r"a range beyond the end is refused, or ends early; it raised RuntimeError"),
    ],
)
def test_a_bad_reader_is_caught_and_the_rule_named(factory, rule):
    with pytest.raises(AssertionError, match=rule):
        check_reader(factory)


class BrokenDisk(Good):
    def record(self, name, index):
        raise OSError("disk")


def test_errors_of_reading_pass_through():
    with pytest.raises(OSError, match="disk"):
        check_reader(BrokenDisk)


def test_the_pickle_bound_is_the_callers():
    check_reader(Fat, pickle_bytes=3 << 20)


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        (1, 1, True),
        (1, 1.0, False),
        (1, True, False),
        (float("nan"), float("nan"), True),
        (float("nan"), 1.0, False),
        (np.datetime64("NaT"), np.datetime64("NaT"), True),
        (np.datetime64("NaT"), np.datetime64(1, "s"), False),
        (np.array(["NaT"], "M8[s]"), np.array(["NaT"], "M8[s]"), True),
        ("a", "b", False),
        (b"a", b"a", True),
        ((1, [2]), (1, [2]), True),
        ((1, [2]), [1, [2]], False),
        ([1], [1, 2], False),
        ({"a": 1, "b": 2}, {"a": 1, "b": 2}, True),
        ({"a": 1}, {"b": 1}, False),
        (np.array([1.0, np.nan]), np.array([1.0, np.nan]), True),
        (np.array([1.0]), np.array([1.0], np.float32), False),
        (np.array([1]), np.array([[1]]), False),
        (np.array(["a", None], object), np.array(["a", None], object), True),
        (np.array(["a"]), np.array(["a"]), True),
        (torch.tensor([1.0]), torch.tensor([1.0]), True),
        (torch.tensor([1.0], requires_grad=True), torch.tensor([2.0]), False),
        (None, None, True),
        (None, 0, False),
    ],
)
def test_records_are_compared_by_type_shape_and_value(left, right, equal):
    assert records_equal(left, right) is equal
    assert records_equal(right, left) is equal


def test_rows_of_columnar_batches_are_compared_by_value():
    assert batch_row_equals(np.arange(3), 2, 2)
    assert not batch_row_equals(np.arange(3), 2, 1)
    dicts = np.fromiter([{"a": 1}, None], dtype=object)
    assert batch_row_equals({"m": dicts}, 0, {"m": {"a": 1}})
    assert batch_row_equals({"m": dicts}, 1, {"m": None})
    assert not batch_row_equals({"m": dicts}, 1, {"m": {"a": 1}})
    assert batch_row_equals((np.array([1.0, np.nan]), ["a", "b"]), 1, (float("nan"), "b"))
    assert not batch_row_equals((np.zeros(2),), 1, (0.0, 0.0))
