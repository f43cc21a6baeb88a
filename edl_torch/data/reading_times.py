"""Times how long the records of a batch are read and transformed, where that happens.

Of batches that take no time few are timed, so that it costs nothing that can be seen. It must not know what a
record is, nor who is told.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter
from typing import Any

EACH_S = 0.1  # at most one batch in so long: what is timed costs some calls

Times = tuple[float, float]  # seconds of reading and of transforming the records of a batch


class ReadingTimes:
    """Times of the batch that is being made. One per process that collates; its threads do not share it.

    `timing` says that they will be those of all its records; `due_at` is when the next batch may be timed.
    """

    __slots__ = ("_drawn_s", "_read_s", "_transform_s", "due_at", "timing")

    def __init__(self) -> None:
        self.due_at = 0.0
        self.clear()

    def __repr__(self) -> str:
        return f"<ReadingTimes read={self._read_s:.6f} s transform={self._transform_s:.6f} s>"

    def clear(self) -> None:
        """Forget the batch."""
        self.timing = False
        self._read_s = self._transform_s = 0.0
        self._drawn_s = 0.0  # of reading, until it is known how long all took

    def begin(self) -> None:
        """Time the batch that begins now."""
        self.timing = True
        self.due_at = perf_counter() + EACH_S

    def begin_if_due(self) -> bool:
        """Time the batch that begins now, unless the last one that was timed began a moment ago. Returns
        whether it is timed."""
        if perf_counter() < self.due_at:
            return False
        self.begin()
        return True

    def add(self, read_s: float, transform_s: float) -> None:
        """Count work on records of the batch."""
        self._read_s += read_s
        self._transform_s += transform_s

    def reading(self, records: Iterator[Any]) -> Iterator[Any]:
        """Yield the records, which a reader yields; the time of each is kept until `drew`."""
        while True:
            began = perf_counter()
            try:
                record = next(records)
            except StopIteration:
                return
            finally:  # where reading fails too
                self._drawn_s += perf_counter() - began
            yield record

    def drew(self, since: float) -> None:
        """Count what was drawn `since` then of samples that are made of what `reading` returned."""
        read_s, self._drawn_s = self._drawn_s, 0.0
        self.add(read_s, perf_counter() - since - read_s)

    def take(self) -> Times:
        """Return the seconds of the batch, which is made, and forget it."""
        times = self._read_s, self._transform_s
        self.clear()
        return times
