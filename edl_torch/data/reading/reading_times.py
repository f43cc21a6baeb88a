"""Times how long the records of a batch are read and transformed.

Of batches that take no time few are timed, so that it costs nothing that can be seen. What a record or a
batch is, and who is told, is not known here.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import compress
from operator import not_, sub
from time import perf_counter
from typing import Any

EACH_S = 0.1  # at most one batch in so long: what is timed costs some calls

Times = tuple[float, float]  # seconds of reading and of transforming the records of a batch


class ReadingTimes:
    """Times of the batch that is being made. One per process that collates; its threads do not share it.

    `timing` says that they will be those of all its records; `due_at` is when the next batch may be timed.
    """

    __slots__ = ("_after", "_before", "_read_s", "_transform_s", "due_at", "timing")

    def __init__(self) -> None:
        self.due_at = 0.0
        self._before: list[float] = []  # when the reading of each record began
        self._after: list[float] = []  # and ended
        self.clear()

    def __repr__(self) -> str:
        return f"<ReadingTimes read={self._read_s:.6f} s transform={self._transform_s:.6f} s>"

    def clear(self) -> None:
        """Forget the batch."""
        self.timing = False
        self._read_s = self._transform_s = 0.0
        self._before.clear()
        self._after.clear()

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
        """Return the records, which a reader yields; the time of each is noted until `drew`.

        It keeps none, and runs no Python for one: `append` returns None, of which an empty dict's `get` makes
        the record, and `not_` what lets it pass.
        """
        now = iter(perf_counter, None)
        read = compress(records, map(not_, map(self._after.append, now)))
        return map({}.get, map(self._before.append, now), read)  # type: ignore[arg-type]

    def drew(self, since: float) -> None:
        """Count what was drawn `since` then of samples that are made of what `reading` returned."""
        now = perf_counter()
        read_s = sum(map(sub, self._after, self._before))
        if len(self._before) > len(self._after):  # reading the last one failed
            read_s += now - self._before[-1]
        self.add(read_s, now - since - read_s)
        self._before.clear()
        self._after.clear()

    def take(self) -> Times:
        """Return the seconds of the batch, which is made, and forget it."""
        times = self._read_s, self._transform_s
        self.clear()
        return times
