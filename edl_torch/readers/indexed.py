"""What readers of one source with random access share: the plan, the ranges and their checks.

It must not know what a record is.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

from edl_torch.errors import ReaderError
from edl_torch.readers.base import AbstractDataReader
from edl_torch.shard import Task, TaskType


def check_source(name: str, expected: str, reader: str) -> None:
    """Raise ReaderError when a reader is asked for a source that is not its own."""
    if name != expected:
        raise ReaderError(
            f"{reader} reads the source {expected!r}, not {name!r}: make the reader with the same arguments "
            "in every trainer as where the dataset was registered"
        )


def check_range(start: int, end: int, first: int, last: int, name: str) -> None:
    """Raise ReaderError unless `start … end - 1` lies within the records `first … last - 1` of a source."""
    if not first <= start <= end <= last:
        asked = f"record {start}" if end == start + 1 else f"records {start} to {end}"
        raise ReaderError(
            f"source {name!r} has the records {first} to {last} here, but {asked} was asked for: "
            "the data on this machine differs from what the dataset was registered with"
        )


class IndexedReader(AbstractDataReader):
    """A reader of one source `name` with `count` records; a subclass loads one record by its number."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    @property
    @abstractmethod
    def count(self) -> int:
        """Number of records."""

    @abstractmethod
    def load(self, index: int) -> Any:
        """Record `index`, which lies in `[0, count)`."""

    def create_shards(self, mode: TaskType = TaskType.TRAINING) -> dict[str, int]:
        """One source, the same for every mode."""
        return {self.name: self.count}

    def read_records(self, task: Task) -> Iterator[Any]:
        """Yield the records one by one. Raises ReaderError for another source or a range outside of it."""
        return map(self.load, self._range(task))

    def read_record(self, name: str, index: int) -> Any:
        """Record `index`. Raises ReaderError for another source or a number outside of it."""
        self._check(name, index, index + 1)
        return self.load(int(index))

    def _range(self, task: Task) -> range:
        shard = task.shard
        self._check(shard.name, shard.start, shard.end)
        return range(shard.start, shard.end)

    def _check(self, name: str, start: int, end: int) -> None:
        check_source(name, self.name, type(self).__name__)
        check_range(start, end, 0, self.count, name)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} records={self.count}>"
