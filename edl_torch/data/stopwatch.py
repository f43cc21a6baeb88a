"""Times what makes a batch: how long the loop waits for each and works on it, how long its records are read.

Two looks at the clock a batch; of batches that take no time few have their reading timed, so that it costs
nothing that can be seen. What a record or a batch is, and who is told, is not known here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any, TypeVar

from edl_torch.trainer.measuring import Measuring

T = TypeVar("T")


class Stopwatch:
    """Adds what it times to `measuring`. `clock` tells seconds.

    One call a batch counts its wait and the work on the batch before it. A wait that ends without a batch, as
    at the end of an epoch, is not counted. Nor is the work on a batch after which the loop was left: nobody
    says when it was done.
    """

    __slots__ = ("_for_ranks_s", "_handed_at", "_measuring", "clock")

    def __init__(self, measuring: Measuring, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._measuring = measuring
        self._handed_at: float | None = None  # None: the loop has no batch in hand
        self._for_ranks_s = 0.0  # of the wait that is under way

    def __repr__(self) -> str:
        return f"<Stopwatch handed_at={self._handed_at}>"

    def handed(self, asked_at: float, records: int) -> None:
        """The loop gets the batch, of so many records, for which it asked at a time of the clock."""
        now, handed_at = self.clock(), self._handed_at
        if handed_at is not None:
            self._measuring.stepped.add(asked_at - handed_at)
        self._handed_at = now
        self._measuring.handed(records, now - asked_at, self._for_ranks_s)
        self._for_ranks_s = 0.0

    def ended(self, asked_at: float) -> None:
        """The loop asked for a batch at a time of the clock, and there is none."""
        if self._handed_at is not None:
            self._measuring.stepped.add(asked_at - self._handed_at)
        self._handed_at = None
        self._for_ranks_s = 0.0

    def wait_for_ranks(self, wait: Callable[[], T]) -> T:
        """Return what `wait` does, which is ready when the other synchronous ranks are."""
        began = self.clock()
        result = wait()
        self._for_ranks_s += self.clock() - began
        return result


# Reading ----------------------------------------------------------------------------------------------

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
