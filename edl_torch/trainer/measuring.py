"""Measures of this trainer as they grow: counters that the training loop adds to.

They cost a batch half a microsecond, and twice that where other code has the caches. The clock is given, and
what the measures are for is not known here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from edl_torch.core.status import BUCKETS, LEAST_EXPONENT, Histogram, Measures

_FIRST_BOUNDS = 2.0**-LEAST_EXPONENT  # in a second
_POWERS = 64  # of two first bounds: more seconds than any clock counts

T = TypeVar("T")


class Durations:
    """A histogram that durations are added to."""

    __slots__ = ("_by_power", "_sum_s")

    def __init__(self) -> None:
        self._by_power = [0] * _POWERS
        self._sum_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration. Called twice a batch: `frexp`, which makes a tuple, takes twice as long."""
        self._by_power[int(seconds * _FIRST_BOUNDS).bit_length()] += 1
        self._sum_s += seconds

    def histogram(self) -> Histogram:
        """Return what was counted by now."""
        counts = self._by_power.copy()
        return Histogram(counts=(*counts[: BUCKETS - 1], sum(counts[BUCKETS - 1 :])), sum_s=self._sum_s)

    def __repr__(self) -> str:
        return f"<Durations {sum(self._by_power)} in {self._sum_s:.3f} s>"


class Measuring:
    """Counters of one session. The loop adds; any thread may look, without a lock.

    A look beside the loop may see a batch in one counter and not yet in another.
    """

    def __init__(self) -> None:
        self.waited = Durations()
        self.stepped = Durations()
        self.batches = 0
        self.records = 0
        self.waited_for_ranks_s = 0.0
        self.timed = 0
        self.read_s = 0.0
        self.transform_s = 0.0

    def __repr__(self) -> str:
        return f"<Measuring batches={self.batches} waited={self.waited} stepped={self.stepped}>"

    def made(self, read_s: float, transform_s: float) -> None:
        """Count how long the records of a batch were read and transformed."""
        self.timed += 1
        self.read_s += read_s
        self.transform_s += transform_s

    def reported(self, records: int) -> None:
        """Count a batch of a loop that is not timed."""
        self.batches += 1
        self.records += records

    def measures(self) -> Measures:
        """Return what was measured by now."""
        return Measures(
            batches=self.batches,
            records=self.records,
            waited=self.waited.histogram(),
            stepped=self.stepped.histogram(),
            waited_for_ranks_s=self.waited_for_ranks_s,
            timed=self.timed,
            read_s=self.read_s,
            transform_s=self.transform_s,
        )


class Stopwatch:
    """Adds to `measuring` how long a loop waits for each batch, and works on it. `clock` tells seconds.

    One call a batch counts its wait and the work on the batch before it. A wait that ends without a batch, as
    at the end of an epoch, is not counted. Nor is the work on a batch after which the loop was left: nobody
    says when it was done.
    """

    __slots__ = ("_for_ranks_s", "_handed_at", "_measuring", "clock")

    def __init__(self, measuring: Measuring, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._measuring = measuring
        self._handed_at: float | None = None  # None: the loop has no batch in hand
        self._for_ranks_s = 0.0  # of the wait that is under way

    def __repr__(self) -> str:
        return f"<Stopwatch handed_at={self._handed_at}>"

    def handed(self, asked_at: float, records: int) -> None:
        """The loop gets the batch, of so many records, for which it asked at a time of the clock."""
        now, handed_at, measuring = self.clock(), self._handed_at, self._measuring
        if handed_at is not None:
            measuring.stepped.add(asked_at - handed_at)
        measuring.waited.add(now - asked_at)
        measuring.waited_for_ranks_s += self._for_ranks_s
        measuring.batches += 1
        measuring.records += records
        self._handed_at, self._for_ranks_s = now, 0.0

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
