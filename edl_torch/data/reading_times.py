"""Times how long the records of a batch are read and transformed, where that happens.

Of batches that take no time few are timed, so that it costs nothing that can be seen. It must not know what a
record is, nor who is told.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter
from typing import Any

EACH_S = 0.1  # at most one batch in so long, where timing costs something for each record

Times = tuple[float, float]  # seconds of reading and of transforming the records of a batch


class ReadingTimes:
    """Times of the batch that is being made. One per process that collates; its threads do not share it.

    `timing` says that they will be those of all its records; `due_at` is when the next batch may be timed.
    """

    __slots__ = ("due_at", "read_s", "timing", "transform_s")

    def __init__(self) -> None:
        self.due_at = 0.0
        self.clear()

    def __repr__(self) -> str:
        return f"<ReadingTimes read={self.read_s:.6f} s transform={self.transform_s:.6f} s>"

    def clear(self) -> None:
        """Forget the batch."""
        self.timing = False
        self.read_s = self.transform_s = 0.0

    def begin(self) -> None:
        """Time the batch that begins now."""
        self.timing = True
        self.due_at = perf_counter() + EACH_S

    def add(self, read_s: float, transform_s: float) -> None:
        """Count records of the batch that were timed elsewhere."""
        self.read_s += read_s
        self.transform_s += transform_s

    def reading(self, records: Iterator[Any]) -> Iterator[Any]:
        """Return the records that a reader yields; how long it takes is counted."""
        return _Reading(self, records)

    def transforming(self, samples: Iterator[Any]) -> Iterator[Any]:
        """Return samples that are made of what `reading` yields; how long only that takes is counted."""
        return _Transforming(self, samples)

    def take(self) -> Times:
        """Return the seconds of the batch, which is made, and forget it."""
        times = self.read_s, self.transform_s
        self.clear()
        return times


class _Reading(Iterator[Any]):
    """Records as they are read. It keeps none: they would outlive their batch."""

    def __init__(self, times: ReadingTimes, records: Iterator[Any]) -> None:
        self._times = times
        self._records = records

    def __next__(self) -> Any:
        begun = perf_counter()
        try:
            return next(self._records)
        finally:
            self._times.add(perf_counter() - begun, 0.0)


class _Transforming(Iterator[Any]):
    """Samples as they are made, less the time of reading."""

    def __init__(self, times: ReadingTimes, samples: Iterator[Any]) -> None:
        self._times = times
        self._samples = samples

    def __next__(self) -> Any:
        begun, read_s = perf_counter(), self._times.read_s
        try:
            return next(self._samples)
        finally:
            self._times.add(0.0, perf_counter() - begun - (self._times.read_s - read_s))
