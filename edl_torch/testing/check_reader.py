"""The contract that every reader keeps, as one call: `check_reader(lambda: MyReader("data"))`.

It must not know any particular reader.
"""

from __future__ import annotations

import dataclasses
import pickle
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, pairwise, zip_longest
from typing import Any

import numpy as np

from edl_torch.errors import EdlError
from edl_torch.readers.base import AbstractDataReader, has_batch_reads, has_random_access, reader_sources
from edl_torch.shard import Shard, Source, Task, TaskType

_THREADS = 4
_BEGIN_S = 60.0
_REFUSALS = (EdlError, IndexError, KeyError, OSError)
_NO_SOURCE = "no source of this reader has this name"


def check_reader(
    factory: Callable[[], AbstractDataReader],
    *,
    mode: TaskType = TaskType.TRAINING,
    max_records: int = 64,
    pickle_bytes: int = 1 << 20,
    pickle_bytes_per_record: int = 1024,
) -> None:
    """Raise AssertionError, naming the rule, unless the readers that `factory` makes keep the contract.

    It returns nothing, and says nothing of a reader that keeps it.

    - `create_shards` gives one source or more, which do not overlap, with true counts, the same every time;
    - `read_records` of any part of a source equals that part of the whole; a second pass equals the first;
    - two iterators do not disturb each other;
    - `read_record` and `read_batch`, where the reader has them, give the same records; a batch has a record's
      structure (dict, tuple or single value) with columns in the places of values;
    - a reader that is `thread_safe` gives the same records to several threads at once;
    - a reader pickles, small, before and after use, and the copy reads the same;
    - a number beyond a source's end and an unknown source raise (EdlError, IndexError, KeyError, OSError), a
      range beyond the end raises or ends early.

    A reader that augments at random cannot pass: augment in the dataset's `transform`.

    Args:
        factory: Makes a reader; called several times.
        mode: What `create_shards` and the tasks are asked for.
        max_records: How many records of each source are read, from its start and from its end.
        pickle_bytes: What a pickled reader may take,
        pickle_bytes_per_record: and as much more for each record of the dataset.
    """
    reader = factory()
    sources = reader_sources(reader, mode)
    _check_sources(sources, reader_sources(factory(), mode))
    assert sources, "there is a source to check: create_shards gave none; is the path right?"
    limit = pickle_bytes + pickle_bytes_per_record * sum(source.count for source in sources)
    unused = _pickle(reader, limit)
    for source in sources:
        check = _SourceCheck(reader, source, mode, max_records)
        check.run()
        check.check_bounds(*_bounds(sources, source.name))
    for origin, data in (("before use", unused), ("after use", _pickle(reader, limit))):
        copy = pickle.loads(data)
        _rule(
            reader_sources(copy, mode) == sources,
            f"a reader pickled {origin} has the same sources",
            sources[0],
        )
        for source in sources:
            _SourceCheck(reader, source, mode, max_records).compare_with(copy, f"pickled {origin}")
    _check_unknown_source(reader, sources[0], mode)


def _check_sources(sources: tuple[Source, ...], again: tuple[Source, ...]) -> None:
    runs = sorted((source.name, source.start, source.start + source.count) for source in sources)
    for (name, _, end), (other, start, _) in pairwise(runs):
        assert name != other or end <= start, (
            f"no record belongs to two sources: {name!r} around record {start}"
        )
    assert sources == again, f"two readers have the same sources: {sources} and {again}"


def _bounds(sources: tuple[Source, ...], name: str) -> tuple[int, int]:
    """The first record of a storage and the one after its last: sources may be runs of one storage."""
    own = [source for source in sources if source.name == name]
    return min(source.start for source in own), max(source.start + source.count for source in own)


def _pickle(reader: AbstractDataReader, limit: int) -> bytes:
    try:
        data = pickle.dumps(reader)
    except Exception as exc:
        raise AssertionError(
            f"a reader pickles: {type(exc).__name__}: {exc}; open files on first use"
        ) from exc
    assert len(data) <= limit, f"a reader pickles small: {len(data)} bytes, at most {limit} expected"
    return data


def _check_unknown_source(reader: AbstractDataReader, source: Source, mode: TaskType) -> None:
    unknown = Source(name=_NO_SOURCE, start=source.start, count=source.count)
    check = _SourceCheck(reader, unknown, mode, 1)
    check.refuses("an unknown source is refused by read_records", lambda: check.read(0, min(1, source.count)))
    if has_random_access(reader):
        check.refuses(
            "an unknown source is refused by read_record",
            lambda: reader.read_record(_NO_SOURCE, source.start),
        )


def _rule(kept: bool, rule: str, source: Source, detail: str = "") -> None:
    assert kept, f"rule broken: {rule}; source {source.name!r} {detail}".rstrip()


class _SourceCheck:
    """The rules of one source. Positions count from its start: record number = source.start + position."""

    def __init__(self, reader: AbstractDataReader, source: Source, mode: TaskType, max_records: int) -> None:
        self.reader, self.source, self.mode = reader, source, mode
        self.n = min(source.count, max_records)

    def run(self) -> None:
        whole = self.read(0, self.n)
        self.same(self.read(0, self.n), whole, 0, "a second pass equals the first")
        self._check_parts(whole)
        self._check_end()
        self._check_interleaved(whole)
        if has_random_access(self.reader):
            self._check_random_access(whole)
            if getattr(self.reader, "thread_safe", False):
                self._check_threads(whole)
        if has_batch_reads(self.reader) and self.n:
            self._check_batches(whole)

    def read(self, start: int, end: int) -> list[Any]:
        return list(self.iterate(self.reader, start, end))

    def iterate(self, reader: AbstractDataReader, start: int, end: int) -> Iterator[Any]:
        first = self.source.start
        shard = Shard(name=self.source.name, start=first + start, end=first + end)
        return iter(reader.read_records(Task(shard=shard, type=self.mode)))

    def compare_with(self, copy: AbstractDataReader, what: str) -> None:
        found = list(self.iterate(copy, 0, self.n))
        self.same(found, self.read(0, self.n), 0, f"a reader {what} reads the same")

    def same(self, found: list[Any], expected: list[Any], start: int, rule: str) -> None:
        count = f"start={start}: {len(found)} records, expected {len(expected)}"
        _rule(len(found) == len(expected), rule, self.source, count)
        for position, (left, right) in enumerate(zip(found, expected, strict=True), start):
            _rule(
                records_equal(left, right),
                rule,
                self.source,
                f"record {self.source.start + position} differs",
            )

    def refuses(self, rule: str, call: Callable[[], object]) -> None:
        _rule(self._refused(rule, call), rule, self.source, "but nothing was raised")

    def _refused(self, rule: str, call: Callable[[], object]) -> bool:
        try:
            call()
        except _REFUSALS:
            return True
        except Exception as exc:
            raise AssertionError(
                f"rule broken: {rule}; it raised {exc!r}, expected EdlError, IndexError, KeyError, OSError"
            ) from exc
        return False

    def refuses_or_ends(self, rule: str, start: int, end: int, most: int) -> None:
        """Datasets notice a reader that ends early; one that goes on delivers somebody else's records."""
        found: list[Any] = []
        if not self._refused(rule, lambda: found.extend(self.iterate(self.reader, start, end))):
            _rule(len(found) <= most, rule, self.source, f"{len(found)} records read, {most} are there")

    def _check_parts(self, whole: list[Any]) -> None:
        n, half = self.n, self.n // 2
        _rule(len(whole) == n, "the count is true", self.source, f"{len(whole)} records read, {n} expected")
        parts = {
            (0, 0),
            (n, n),
            (0, half),
            (half, n),
            (n // 3, n - n // 3),
            (0, min(1, n)),
            (max(n - 1, 0), n),
        }
        for start, end in sorted(parts):
            self.same(self.read(start, end), whole[start:end], start, "a part equals that part of the whole")

    def _check_end(self) -> None:
        """The last records by themselves, where the source is longer than what is read."""
        count, start = self.source.count, max(self.source.count - self.n, self.n)
        tail = self.read(start, count)
        _rule(len(tail) == count - start, "the count is true", self.source, f"{len(tail)} records at the end")

    def _check_interleaved(self, whole: list[Any]) -> None:
        start = self.n // 2
        one, two = self.iterate(self.reader, 0, self.n), self.iterate(self.reader, start, self.n)
        rows = list(zip_longest(one, two))
        rule = "two iterators do not disturb each other"
        self.same([left for left, _ in rows], whole, 0, rule)
        self.same([right for _, right in islice(rows, self.n - start)], whole[start:], start, rule)

    def _check_random_access(self, whole: list[Any]) -> None:
        for position in reversed(range(self.n)):
            record = self.reader.read_record(self.source.name, self.source.start + position)
            self.same([record], [whole[position]], position, "read_record equals read_records")

    def _check_threads(self, whole: list[Any]) -> None:
        """Each thread reads all records, in an order of its own."""
        begin = threading.Barrier(_THREADS)

        def read(number: int) -> list[tuple[int, Any]]:
            order = random.Random(number).sample(range(self.n), self.n)
            begin.wait(_BEGIN_S)
            first = self.source.start
            return [(at, self.reader.read_record(self.source.name, first + at)) for at in order]

        with ThreadPoolExecutor(_THREADS) as pool:
            for found in pool.map(read, range(_THREADS)):
                for at, record in found:
                    self.same([record], [whole[at]], at, "a thread_safe reader reads the same in threads")

    def _check_batches(self, whole: list[Any]) -> None:
        positions = np.arange(self.n, dtype=np.int64)[::-1][:: 1 + (self.n > 2)]
        batch = self.reader.read_batch(self.source.name, self.source.start + positions)
        for row, position in enumerate(positions.tolist()):
            equal = batch_row_equals(batch, row, whole[position])
            where = f"record {self.source.start + position} differs"
            _rule(equal, "read_batch equals read_records", self.source, where)

    def check_bounds(self, first: int, last: int) -> None:
        """The storage has the records `first … last - 1`."""
        name, end = self.source.name, last - self.source.start
        one = min(1, last - first)
        self.refuses_or_ends("a range beyond the end is refused, or ends early", end, end + 1, 0)
        self.refuses_or_ends("a range across the end is refused, or ends early", end - one, end + 1, one)
        if has_random_access(self.reader):
            self.refuses("a number beyond the end is refused", lambda: self.reader.read_record(name, last))


def records_equal(left: Any, right: Any) -> bool:
    """Compare types, shapes, dtypes and values; NaN equals NaN and NaT NaT; containers by element."""
    left, right = _as_array(left), _as_array(right)
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray):
        return _arrays_equal(left, right)
    if isinstance(left, Mapping):
        return list(left) == list(right) and all(records_equal(left[key], right[key]) for key in left)
    if isinstance(left, tuple | list):
        return len(left) == len(right) and all(map(records_equal, left, right))
    if dataclasses.is_dataclass(left):
        names = [field.name for field in dataclasses.fields(left)]
        return all(records_equal(getattr(left, name), getattr(right, name)) for name in names)
    if isinstance(left, float | np.inexact) and np.isnan(left):
        return bool(np.isnan(right))
    if isinstance(left, np.datetime64 | np.timedelta64) and np.isnat(left):
        return bool(np.isnat(right))
    return bool(np.all(left == right))


def batch_row_equals(batch: Any, row: int, record: Any) -> bool:
    """Whether row `row` of a columnar batch is `record`; numbers are compared by value, not by type."""
    if isinstance(batch, np.ndarray) and batch.dtype == object:
        return records_equal(batch[row], record)
    if isinstance(record, Mapping) or isinstance(batch, Mapping):
        same_keys = isinstance(record, Mapping) and isinstance(batch, Mapping) and set(record) == set(batch)
        return same_keys and all(batch_row_equals(batch[key], row, record[key]) for key in record)
    if isinstance(record, tuple):
        return len(batch) == len(record) and all(
            batch_row_equals(column, row, value) for column, value in zip(batch, record, strict=True)
        )
    left, right = np.asarray(_as_array(batch[row])), np.asarray(_as_array(record))
    return left.shape == right.shape and bool(np.all((left == right) | ((left != left) & (right != right))))


def _as_array(value: Any) -> Any:
    return value.detach().cpu().numpy() if hasattr(value, "detach") and hasattr(value, "numpy") else value


def _arrays_equal(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if left.dtype == object:
        return all(map(records_equal, left.ravel().tolist(), right.ravel().tolist()))
    return np.array_equal(left, right, equal_nan=left.dtype.kind in "fcmM")
