"""Measures of one trainer: how long its loop waited for batches and worked on them, and what made them.

Values only: a trainer's heartbeats carry them, the master shows them. They decide nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edl_torch.errors import InvalidArgument

LEAST_EXPONENT = -16
# Upper bounds of a histogram's buckets in seconds, 15 µs to 512 s; one more bucket is for what took longer.
# They are part of the wire, and never change.
BOUNDS_S = tuple(2.0**exponent for exponent in range(LEAST_EXPONENT, 10))
BUCKETS = len(BOUNDS_S) + 1
MOST_SECONDS = 1e12  # of a sum: sums of sums stay finite
_NONE = (0,) * BUCKETS


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Durations, counted by powers of two.

    `counts[i]` is how many were shorter than `BOUNDS_S[i]` and not shorter than the bound before it; the last
    item is for what took longer. `sum_s` is their sum in seconds.
    """

    counts: tuple[int, ...] = _NONE
    sum_s: float = 0.0

    @property
    def count(self) -> int:
        """How many durations there were."""
        return sum(self.counts)

    @property
    def mean_s(self) -> float:
        """The mean in seconds; 0 where there were none."""
        return self.sum_s / (self.count or 1)

    def __add__(self, other: Histogram) -> Histogram:
        """Return the histogram of the durations of both."""
        counts = tuple([mine + its for mine, its in zip(self.counts, other.counts, strict=True)])
        return Histogram(counts=counts, sum_s=self.sum_s + other.sum_s)

    def check(self, what: str) -> None:
        """Raise InvalidArgument for counts or a sum that no durations have."""
        if len(self.counts) != BUCKETS:
            raise InvalidArgument(f"{what} has {len(self.counts)} buckets: a histogram has {BUCKETS}")
        check_counts(what, *self.counts)
        check_seconds(what, self.sum_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """What one session has measured since it began. All of it only grows.

    Only loops over an `ElasticDataLoader` are timed. Of other loops `batches` and `records` are those that
    were reported.

    Attributes:
        batches: that the loop was given, padding batches of synchronous ranks too.
        records: in these batches.
        waited: how long the loop waited for each batch.
        stepped: how long it worked on each: from when it got the batch to when it asked for the next one.
        waited_for_ranks_s: of the seconds in `waited` those in which it waited for other synchronous ranks.
        timed: batches whose reading was timed, in the loop's thread, another one, or a loader worker.
        read_s: seconds in which the reader read the records of these.
        transform_s: seconds in which these records were transformed.
    """

    batches: int = 0
    records: int = 0
    waited: Histogram = Histogram()
    stepped: Histogram = Histogram()
    waited_for_ranks_s: float = 0.0
    timed: int = 0
    read_s: float = 0.0
    transform_s: float = 0.0

    @property
    def waiting_share(self) -> float | None:
        """The share of its time that the loop waited for data, of 0 to 1; None where nothing was timed."""
        whole_s = self.waited.sum_s + self.stepped.sum_s
        return self.waited.sum_s / whole_s if whole_s else None

    @property
    def mean_read_s(self) -> float | None:
        """Seconds in which the records of a batch are read, in sum; None where no batch was timed."""
        return self.read_s / self.timed if self.timed else None

    @property
    def mean_transform_s(self) -> float | None:
        """Seconds in which the records of a batch are transformed, in sum."""
        return self.transform_s / self.timed if self.timed else None

    def check(self) -> None:
        """Raise InvalidArgument for values that cannot have been measured."""
        check_counts("measures", self.batches, self.records, self.timed)
        check_seconds("measures", self.waited_for_ranks_s, self.read_s, self.transform_s)
        self.waited.check("waited")
        self.stepped.check("stepped")


def padded(counts: Sequence[int]) -> tuple[int, ...]:
    """Return the counts of a histogram of which the last buckets, that are empty, were left out."""
    return (*counts, *_NONE[len(counts) :])


def trimmed(counts: Sequence[int]) -> Sequence[int]:
    """Return the counts without the empty buckets at the end."""
    used = len(counts)
    while used and not counts[used - 1]:
        used -= 1
    return counts[:used]


def check_counts(what: str, *counts: int) -> None:
    """Raise InvalidArgument for a negative count."""
    if min(counts) < 0:
        raise InvalidArgument(f"{what}: {min(counts)} is no count")


def check_seconds(what: str, *sums: float) -> None:
    """Raise InvalidArgument for what is no number of seconds, or too many."""
    for seconds in sums:
        if not 0 <= seconds <= MOST_SECONDS:
            raise InvalidArgument(f"{what}: {seconds} is no number of seconds")
