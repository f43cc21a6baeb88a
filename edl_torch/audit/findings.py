"""Findings: records with too few or too many outcomes, by name, and the trainers that reported them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np

from edl_torch.audit.intervals import Coordinates, Intervals, covered
from edl_torch.audit.lineage import DatasetHistory, Lineage, Reports
from edl_torch.audit.part import Part, records_of
from edl_torch.audit.reading import Answer, Kind
from edl_torch.shard import IndexArray, Shuffle, Slice

KINDS = ("lost", "doubled", "forgotten", "repeated", "unlearnt", "stale")
MOST_REPORTERS = 4  # of one range, in one lineage

_Blame = Callable[[Lineage, int, int], Iterator[str]]  # for a range of records
MOST_LOOKED_UP = 1 << 16  # shuffled records of an epoch that are turned into names


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Records that are `lost` (no outcome), `doubled` (several), `forgotten` (the master confirmed an outcome
    and does not know it), `repeated` (a living trainer may have trained on them once more than is counted),
    `unlearnt` (counted by a step, after their gradients were thrown away) or `stale` (reported too late and
    refused, which costs no outcome).

    `by` names the trainers that reported them, or had them in vain.
    """

    kind: str
    records: RecordRange
    by: tuple[str, ...] = ()


class Findings:
    """Findings of each kind, in every lineage that counts; `stale` ones of all lineages."""

    def __init__(self, history: DatasetHistory, parts: Sequence[Part], *, judged: bool) -> None:
        self._history = history
        self._counting = [part.lineage for part in parts]
        self.records = {kind: Intervals() for kind in KINDS}
        for part in parts:
            self.records["lost"] |= part.missing
            self.records["doubled"] |= part.doubled
            self.records["repeated"] |= part.repeated
            self.records["unlearnt"] |= part.unlearnt
        if judged:  # by the master's own word
            self.records["forgotten"] = parts[0].certain - parts[0].required
        for lineage in history.lineages.values():
            self.records["stale"] |= records_of(lineage.acknowledged.answered(Answer.REFUSED))

    def count(self, kind: str) -> int:
        """Return records of one kind."""
        return self.records[kind].count

    def named(self, limit: int) -> tuple[Finding, ...]:
        """Return the first `limit` ranges of each kind."""
        every, counting = self._history.lineages.values(), self._counting
        accepted = partial(self._reporters, Answer.ACCEPTED)
        refused = partial(self._reporters, Answer.REFUSED)
        kinds = (
            self._lost(limit),
            self._blamed("doubled", accepted, counting, limit),
            self._blamed("forgotten", accepted, counting, limit),
            self._blamed("repeated", self._had_in_vain, counting, limit),
            self._blamed("unlearnt", self._threw_away, counting, limit),
            self._blamed("stale", refused, every, limit),
        )
        return tuple(finding for found in kinds for finding in islice(found, limit))

    def _lost(self, limit: int) -> Iterator[Finding]:
        for records in name_records(self._history.coordinates, self.records["lost"], limit):
            yield Finding(kind="lost", records=records)

    def _blamed(self, kind: str, blame: _Blame, lineages: Iterable[Lineage], limit: int) -> Iterator[Finding]:
        for start, end in islice(self.records[kind], limit):
            by = tuple(who for lineage in lineages for who in blame(lineage, start, end))
            for records in name_records(self._history.coordinates, Intervals.run(start, end), limit):
                yield Finding(kind=kind, records=records, by=by)

    def _had_in_vain(self, lineage: Lineage, start: int, end: int) -> Iterator[str]:
        for reports, why in (
            (lineage.repeated.answered(Kind.RETURNED), "given back"),
            (lineage.repeated.answered(Kind.VOID), "taken back"),
            (lineage.acknowledged.answered(Answer.REFUSED, Answer.LOST), "reported too late"),
        ):
            for trainer, task in self._trainers(reports, start, end):
                yield f"{trainer} ({why} in lineage {lineage.key[1]}, task {task})"

    def _threw_away(self, lineage: Lineage, start: int, end: int) -> Iterator[str]:
        for trainer, task in self._trainers(lineage.repeated.answered(Kind.UNLEARNT), start, end):
            yield f"{trainer} (lineage {lineage.key[1]}, task {task})"

    def _reporters(self, answer: Answer, lineage: Lineage, start: int, end: int) -> Iterator[str]:
        for reports in (lineage.acknowledged, lineage.quarantined):
            for trainer, task in self._trainers(reports.answered(answer), start, end):
                yield f"{trainer} (lineage {lineage.key[1]}, task {task})"

    def _trainers(self, reports: Reports, start: int, end: int) -> Iterator[tuple[str, int]]:
        hit = (reports.starts < end) & (reports.ends > start)
        for place in np.flatnonzero(hit)[:MOST_REPORTERS].tolist():
            yield self._history.trainers[int(reports.who[place])], int(reports.tasks[place])


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRange:
    """Records `start` (inclusive) to `end` (exclusive) of the storage `name`, in one epoch."""

    epoch: int
    name: str
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


def name_records(coordinates: Coordinates, found: Intervals, limit: int) -> list[RecordRange]:
    """The first `limit` ranges of the records in `found`, by epoch, then in the order of the sources.

    `found` has their numbers on the line of `audit.intervals`; there are as few ranges as it takes.
    """
    return list(islice(_Names(coordinates).ranges(found), limit))


class _Names:
    def __init__(self, coordinates: Coordinates) -> None:
        self._line = coordinates
        self._plan = coordinates.plan
        sources = coordinates.plan.spec.sources
        self._sources = sources
        self._counts = np.array([source.count for source in sources], dtype=np.int64)
        self._ends = np.cumsum(self._counts)
        # Added to a record's number in the epoch it gives the number in its storage.
        self._shifts = (
            np.array([source.start for source in sources], dtype=np.int64) + self._counts - self._ends
        )

    def ranges(self, found: Intervals) -> Iterator[RecordRange]:
        for epoch, part in found.blocks(self._line.size):
            first = epoch * self._line.size
            for start, end in self._unshuffled(epoch, Intervals(part.starts - first, part.ends - first)):
                yield from self._within_sources(epoch, start, end)

    def _within_sources(self, epoch: int, start: int, end: int) -> Iterator[RecordRange]:
        """Return a run of records in the order of the sources."""
        while start < end:
            place = int(np.searchsorted(self._ends, start, side="right"))
            stop, shift = min(end, int(self._ends[place])), int(self._shifts[place])
            name = self._sources[place].name
            yield RecordRange(epoch=epoch, name=name, start=start + shift, end=stop + shift)
            start = stop

    def _unshuffled(self, epoch: int, part: Intervals) -> Intervals:
        """Positions in the epoch's order as records in the order of the sources, as many as are looked up."""
        if self._plan.order is Shuffle.NONE:
            return part
        starts, ends, left = [], [], MOST_LOOKED_UP
        pieces = (piece for start, end in part for piece in self._pieces(epoch, start, end))
        for low, high, whole in pieces:
            lows, highs = self._runs(epoch, low, high if whole else min(high, low + left), whole)
            starts.append(lows)
            ends.append(highs)
            left -= len(lows)
            if left <= 0:
                break
        return covered(np.concatenate(starts), np.concatenate(ends))

    def _runs(self, epoch: int, low: int, high: int, whole: bool) -> tuple[IndexArray, IndexArray]:
        """Return a piece as runs of records in the order of the sources."""
        if not whole:
            lows = self._look_up(epoch, low, high)
            return lows, lows + 1
        if self._plan.window == 1 or high - low == self._line.size:
            return np.array([low]), np.array([high])
        window, _, _ = self._window_of(epoch, low)
        shards = np.array(self._plan.shards_in(epoch, window))
        lows = self._line.starts(shards)
        return lows, lows + self._line.lengths(shards)

    def _pieces(self, epoch: int, start: int, end: int) -> Iterator[tuple[int, int, bool]]:
        """Return the run cut into what is the same records in any order, and parts of one window each."""
        if start == 0 and end == self._line.size:
            yield start, end, True
            return
        while start < end:
            _, first, length = self._window_of(epoch, start)
            stop = first + length
            if self._plan.order is Shuffle.SHARD and start == first and stop <= end:
                if self._plan.window == 1:
                    stop = self._whole_shards(end)
                yield start, stop, True
            else:
                stop = min(stop, end)
                yield start, stop, False
            start = stop

    def _window_of(self, epoch: int, number: int) -> tuple[int, int, int]:
        """Return the window that a number within an epoch is in, the number of its first record, and its
        length."""
        if self._plan.window == 1:
            return self._shard_of(number)
        position = self._plan.window_position_at(epoch, number)
        first = self._plan.records_before(epoch, position)
        return (
            self._plan.window_at(epoch, position),
            first,
            self._plan.records_before(epoch, position + 1) - first,
        )

    def _shard_of(self, number: int) -> tuple[int, int, int]:
        line = self._line
        source = int(np.searchsorted(line.record_ends, number, side="right"))
        shard = int(line.first_shards[source] + (number - line.first_records[source]) // line.per_shard)
        shards = np.array([shard])
        return shard, int(line.starts(shards)[0]), int(line.lengths(shards)[0])

    def _whole_shards(self, end: int) -> int:
        """Return the end of the last shard that lies before `end`."""
        if end == self._line.size:
            return end
        _, first, _ = self._shard_of(end)
        return first

    def _look_up(self, epoch: int, low: int, high: int) -> IndexArray:
        """Return the numbers, in the order of the sources, of positions of one window."""
        window, first, _ = self._window_of(epoch, low)
        indices = self._plan.indices(Slice(epoch=epoch, shard=window, skip=low - first, limit=high - low))
        if indices.sources is None:
            source = np.full(len(indices), self._source_of(window), dtype=np.int64)
        else:
            source = indices.sources
        return indices.numbers - self._shifts[source]

    def _source_of(self, shard: int) -> int:
        """Return the place of an unshuffled shard's source; where sources are mixed there is one only."""
        if self._plan.order is Shuffle.GLOBAL or self._plan.window > 1:
            return 0
        return int(np.searchsorted(self._line.shard_ends, shard, side="right"))
