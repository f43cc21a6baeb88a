"""Sets of records: each has a number on one line, and a set is a few intervals of integers, on numpy arrays.

Record `position` of a window has the number `epoch * size + records of the windows that stand before it in
that epoch's order + position`: so what is lent one after the other is one interval.
`audit.findings` says where a record stands in its storage. All operations on sets are exact, O(n log n) and
vectorised.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from edl_torch.core.plan import MixedRecords, Plan
from edl_torch.core.quarantine import QuarantinedRecord, places_of
from edl_torch.core.token import Token
from edl_torch.errors import AuditError
from edl_torch.shard import DatasetSpec, IndexArray, Indices, MixtureSegment, Slice

_NOTHING: IndexArray = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Intervals:
    """The integers in `[starts[i], ends[i])` for any i: int64, ascending, not empty, not touching."""

    starts: IndexArray = field(default_factory=lambda: _NOTHING)
    ends: IndexArray = field(default_factory=lambda: _NOTHING)

    @classmethod
    def run(cls, start: int, end: int) -> Intervals:
        """Return one interval; nothing where `end` is not above `start`."""
        if end <= start:
            return cls()
        return cls(np.array([start], dtype=np.int64), np.array([end], dtype=np.int64))

    @classmethod
    def of(cls, runs: list[tuple[int, int]]) -> Intervals:
        """Runs from one integer up to another, in any order; what is named twice counts once."""
        starts, ends = np.array(runs, dtype=np.int64).reshape(-1, 2).T
        return covered(starts, ends)

    @classmethod
    def union(cls, sets: Iterable[Intervals]) -> Intervals:
        """Return the integers of all these sets."""
        together = cls()
        for one in sets:
            together |= one
        return together

    @property
    def count(self) -> int:
        """How many integers."""
        return int((self.ends - self.starts).sum())

    def __bool__(self) -> bool:
        return len(self.starts) > 0

    def __len__(self) -> int:
        return len(self.starts)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self.starts.tolist(), self.ends.tolist(), strict=True)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Intervals):
            return NotImplemented
        return np.array_equal(self.starts, other.starts) and np.array_equal(self.ends, other.ends)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<Intervals n={len(self)} integers={self.count}>"

    def __or__(self, other: Intervals) -> Intervals:
        return self._together(other, 1)

    def __and__(self, other: Intervals) -> Intervals:
        return self._together(other, 2)  # each alone covers an integer at most once

    def __sub__(self, other: Intervals) -> Intervals:
        if not self or not other:
            return self
        return self & other._complement(int(self.starts[0]), int(self.ends[-1]))

    def between(self, low: int, high: int) -> Intervals:
        """Return those of `[low, high)`, in O(log n) and what is copied."""
        first = int(np.searchsorted(self.ends, low, side="right"))
        last = int(np.searchsorted(self.starts, high, side="left"))
        if first >= last or low >= high:
            return Intervals()
        return Intervals(np.maximum(self.starts[first:last], low), np.minimum(self.ends[first:last], high))

    def blocks(self, size: int) -> Iterator[tuple[int, Intervals]]:
        """Yield each block of `size` integers that has any, by its number, with those of it."""
        left = self
        while left:
            number = int(left.starts[0]) // size
            end = (number + 1) * size
            yield number, left.between(number * size, end)
            left = left.between(end, int(left.ends[-1]))

    def _together(self, other: Intervals, times: int) -> Intervals:
        if not self or not other:
            return (self or other) if times == 1 else Intervals()
        starts = np.concatenate((self.starts, other.starts))
        return covered(starts, np.concatenate((self.ends, other.ends)), times)

    def _complement(self, low: int, high: int) -> Intervals:
        """Return all integers of `[low, high)` that are not in here."""
        starts = np.concatenate(([low], np.clip(self.ends, low, high)))
        ends = np.concatenate((np.clip(self.starts, low, high), [high]))
        kept = starts < ends
        return Intervals(starts[kept], ends[kept])


def covered(starts: IndexArray, ends: IndexArray, times: int = 1) -> Intervals:
    """The integers that lie in at least `times` of the intervals `[starts[i], ends[i])`, which may overlap.

    With `times=1` that is the union, with 2 what is there more than once. Empty intervals cover nothing.
    """
    kept = starts < ends
    if not kept.all():
        starts, ends = starts[kept], ends[kept]
    starts, ends = np.sort(starts), np.sort(ends)
    if times > 1 and bool((starts[1:] >= ends[:-1]).all()):
        return Intervals()  # the usual case: disjoint, for the i-th end is then that of the i-th start
    points = np.concatenate((starts, ends))
    # Starts before ends where they fall together, so that what touches becomes one.
    order = np.argsort(points, kind="stable")
    depth = np.cumsum(np.where(order < len(starts), 1, -1))
    inside = depth >= times
    flips = np.flatnonzero(np.diff(inside, prepend=False))
    edges = points[order[flips]]
    lows, highs = edges[::2], edges[1::2]
    kept = lows < highs
    return Intervals(lows[kept], highs[kept])


# Numbers of records on one line -----------------------------------------------------------------------

_LARGEST = np.iinfo(np.int64).max


class Coordinates:
    """Line of one dataset: its epochs one after the other, each in its order."""

    def __init__(self, spec: DatasetSpec) -> None:
        self.plan = Plan(spec)
        self.size = spec.size

        self.most_epochs = int(_LARGEST // self.size)  # whose records still have a number of 64 bits

    @property
    def epochs(self) -> int:
        """Epochs of the job, or those that can be numbered."""
        return min(self.plan.spec.num_epochs or self.most_epochs, self.most_epochs)

    def check_epochs(self, epochs: int) -> None:
        """Raise AuditError when the records of so many epochs cannot be numbered."""
        if epochs > self.most_epochs:
            raise AuditError(
                f"{epochs} epoch(s) of dataset {self.plan.spec.name!r} are more than 2**63 records: "
                f"that is more than an audit can number"
            )

    def windows(self, epochs: IndexArray, windows: IndexArray) -> tuple[IndexArray, IndexArray]:
        """Return the number of each window's first record, and how many it has; none where there is none."""
        starts, lengths = np.zeros_like(windows), np.zeros_like(windows)
        for epoch, places in _by_epoch(epochs):
            places = places[windows[places] < self.plan.num_shards]
            begins, ends = self.plan.window_bounds(epoch, windows[places])
            starts[places], lengths[places] = begins + epoch * self.size, ends - begins
        return starts, lengths

    def window_starts(self, numbers: IndexArray) -> IndexArray:
        """Return the number of the first record of the window that each number lies in."""
        starts = np.zeros_like(numbers)
        for epoch, places in _by_epoch(numbers // self.size):
            first = epoch * self.size
            starts[places] = self.plan.window_starts(epoch, numbers[places] - first) + first
        return starts

    def slices(self, cuts: Iterable[Slice]) -> Intervals:
        """Return the records of slices that lie in the plan."""
        cuts = tuple(cuts)
        numbers = np.array([(s.epoch, s.shard, s.skip, s.stop) for s in cuts], dtype=np.int64).reshape(-1, 4)
        epochs, shards, skips, stops = numbers.T
        base, _ = self.windows(epochs, shards)
        return covered(base + skips, base + stops)

    def quarantine(
        self, records: Iterable[QuarantinedRecord], told: Intervals, segments: tuple[MixtureSegment, ...]
    ) -> Intervals:
        """Return the records that a token has in quarantine; of a mixture, those of later passes where logs
        have `told` of them. `segments` are those of who told."""
        records = tuple(records)
        first = self.slices(Slice(epoch=q.epoch, shard=q.shard, skip=q.position, limit=1) for q in records)
        again = [q for q in records if q.times > 1]
        if not again:
            return first
        mixed, found = MixedRecords(replace(self.plan.spec, segments=segments)), []
        for start, end in told:
            indices = mixed.many(start, end)
            named = Indices(mixed.below, indices.numbers, indices.sources, indices.passes)
            found += [(start + place, start + place + 1) for place in places_of(again, named)]
        return first | Intervals.of(found)

    def done(self, token: Token) -> Intervals:
        """Return the records that have an outcome in a token: all behind its cursor but what is open."""
        self.check_epochs(token.epoch + 1)
        passed = self.plan.records_before(token.epoch, token.position) + token.offset
        cursor = token.epoch * self.size + passed
        return Intervals.run(0, cursor) - self.slices((*token.open, *token.remainders))


def _by_epoch(epochs: IndexArray) -> Iterator[tuple[int, IndexArray]]:
    """Return each epoch, and its places in the array."""
    order = np.argsort(epochs, kind="stable")
    found, firsts = np.unique(epochs[order], return_index=True)
    yield from zip(found.tolist(), np.split(order, firsts[1:]), strict=False)  # of nothing: one empty part
