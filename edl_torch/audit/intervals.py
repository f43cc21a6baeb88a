"""Sets of records: each has a number on one line, and a set is a few intervals of integers, on numpy arrays.

Record `position` of a shard in an epoch has the number `epoch * size + records of the shards before, by
shard number + position`; where windows have several shards, the windows before it in that epoch count.
`audit.findings` says where a record stands in its storage. All operations on sets are exact, O(n log n) and
vectorised.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from edl_torch.core.plan import Plan
from edl_torch.core.quarantine import QuarantinedRecord
from edl_torch.core.token import Token
from edl_torch.errors import AuditError
from edl_torch.shard import DatasetSpec, IndexArray, Slice, Source

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
    """Line of one dataset: shards by number, or windows of shards in order, epoch after epoch."""

    def __init__(self, spec: DatasetSpec) -> None:
        self.plan = Plan(spec)
        self.size = spec.size
        self.per_shard = spec.records_per_shard
        pieces = (Source(name="", count=self.size),) if spec.shuffle else spec.sources
        counts = np.array([piece.count for piece in pieces], dtype=np.int64)
        shards = -(-counts // self.per_shard)
        # By source: its first shard and record, and the number after its last one, as in `core.plan`.
        self.shard_ends = np.cumsum(shards)
        self.first_shards: IndexArray = self.shard_ends - shards
        self.record_ends = np.cumsum(counts)
        self.first_records: IndexArray = self.record_ends - counts

    @property
    def most_epochs(self) -> int:
        """Epochs whose records still have a number of 64 bits."""
        return int(_LARGEST // self.size)

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

    def starts(self, shards: IndexArray) -> IndexArray:
        """Return the number of each shard's first record, within an epoch."""
        source, inside = self._places(shards)
        return self.first_records[source] + inside

    def lengths(self, shards: IndexArray) -> IndexArray:
        """Return records of each shard."""
        source, inside = self._places(shards)
        lengths: IndexArray = np.minimum(
            self.record_ends[source] - self.first_records[source] - inside, self.per_shard
        )
        return lengths

    def _places(self, shards: IndexArray) -> tuple[IndexArray, IndexArray]:
        source = np.searchsorted(self.shard_ends, shards, side="right")
        return source, (shards - self.first_shards[source]) * self.per_shard

    def windows(self, epochs: IndexArray, windows: IndexArray) -> tuple[IndexArray, IndexArray]:
        """Return the number of each window's first record, and how many it has; none where there is none."""
        if self.plan.window == 1:
            return self.starts(windows) + epochs * self.size, self.lengths(windows)
        starts, lengths = np.zeros_like(windows), np.zeros_like(windows)
        for epoch, places in _by_epoch(epochs):
            begins, ends = self.plan.window_bounds(epoch, windows[places])
            starts[places], lengths[places] = begins + epoch * self.size, ends - begins
        return starts, lengths

    def window_starts(self, numbers: IndexArray) -> IndexArray:
        """Return the number of the first record of the window that each number lies in."""
        inside = numbers % self.size
        if self.plan.window > 1:
            starts = numbers - inside
            for epoch, places in _by_epoch(numbers // self.size):
                starts[places] += self.plan.window_starts(epoch, inside[places])
            return starts
        source = np.searchsorted(self.record_ends, inside, side="right")
        return numbers - (inside - self.first_records[source]) % self.per_shard

    def unsound(
        self, epochs: IndexArray, shards: IndexArray, starts: IndexArray, stops: IndexArray
    ) -> IndexArray:
        """Return the places of those runs that are not a part of a window of the job's epochs."""
        known = (epochs < self.epochs) & (shards < self.plan.num_shards)
        _, lengths = self.windows(np.where(known, epochs, 0), np.where(known, shards, 0))
        return np.flatnonzero(~(known & (starts < stops) & (stops <= lengths)))

    def run(self, cut: Slice) -> tuple[int, int]:
        """Return the numbers of a slice that lies in the plan."""
        starts, _ = self.windows(np.array([cut.epoch]), np.array([cut.shard]))
        start = int(starts[0])
        return start + cut.skip, start + cut.stop

    def slices(self, cuts: Iterable[Slice]) -> Intervals:
        """Return the records of slices that lie in the plan."""
        cuts = tuple(cuts)
        numbers = np.array([(s.epoch, s.shard, s.skip, s.stop) for s in cuts], dtype=np.int64).reshape(-1, 4)
        epochs, shards, skips, stops = numbers.T
        base, _ = self.windows(epochs, shards)
        return covered(base + skips, base + stops)

    def quarantine(self, records: Iterable[QuarantinedRecord]) -> Intervals:
        """Return the records that a token has in quarantine."""
        return self.slices(Slice(epoch=q.epoch, shard=q.shard, skip=q.position, limit=1) for q in records)

    def done(self, token: Token) -> Intervals:
        """Return the records that have an outcome in a token: all behind its cursor but what is open."""
        self.check_epochs(token.epoch + 1)
        passed = Intervals.run(0, token.epoch * self.size) | self._begun(token)
        return passed - self.slices((*token.open, *token.remainders))

    def _begun(self, token: Token) -> Intervals:
        """What the cursor has passed of its epoch."""
        if self.plan.window > 1 or not self.plan.spec.shuffle_shards:
            base = token.epoch * self.size
            passed = self.plan.records_before(token.epoch, token.position) + token.offset
            return Intervals.run(base, base + passed)
        shards = np.array(self.plan.windows_at(token.epoch, 0, token.position), dtype=np.int64)
        lengths = self.lengths(shards)
        if token.offset:
            shards = np.append(shards, self.plan.shard_at(token.epoch, token.position))
            lengths = np.append(lengths, token.offset)
        starts = self.starts(shards) + token.epoch * self.size
        return covered(starts, starts + lengths)


def _by_epoch(epochs: IndexArray) -> Iterator[tuple[int, IndexArray]]:
    """Return each epoch, and its places in the array."""
    order = np.argsort(epochs, kind="stable")
    found, firsts = np.unique(epochs[order], return_index=True)
    yield from zip(found.tolist(), np.split(order, firsts[1:]), strict=False)  # of nothing: one empty part
