"""Measures of this trainer as they grow: counters that the training loop adds to.

They cost a batch one or two microseconds. They must not know a clock, nor what the measures are for.
"""

from __future__ import annotations

from collections import defaultdict
from math import frexp

from edl_torch.core.measures import BUCKETS, LEAST_EXPONENT, Histogram, Measures

_SHORTEST_S = 1e-9  # stands for no time at all, which has no exponent


class Durations:
    """A histogram that durations are added to."""

    __slots__ = ("_by_exponent", "_sum_s")

    def __init__(self) -> None:
        self._by_exponent: defaultdict[int, int] = defaultdict(int)
        self._sum_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration. Called twice a batch: it is put into a bucket when somebody looks."""
        self._by_exponent[frexp(seconds or _SHORTEST_S)[1]] += 1
        self._sum_s += seconds

    def histogram(self) -> Histogram:
        """Return what was counted by now."""
        counts = [0] * BUCKETS
        for exponent, count in self._by_exponent.copy().items():
            counts[min(max(exponent - LEAST_EXPONENT, 0), BUCKETS - 1)] += count
        return Histogram(counts=tuple(counts), sum_s=self._sum_s)

    def __repr__(self) -> str:
        return f"<Durations {sum(self._by_exponent.values())} in {self._sum_s:.3f} s>"


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

    def handed(self, records: int, waited_s: float, waited_for_ranks_s: float = 0.0) -> None:
        """Count a batch of so many records, and how long the loop has waited for it."""
        self.waited.add(waited_s)
        if waited_for_ranks_s:
            self.waited_for_ranks_s += waited_for_ranks_s
        self.batches += 1
        self.records += records

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
