"""Findings: records with too few or too many outcomes, by name, and the trainers that reported them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice

import numpy as np

from edl_torch.audit.chain import Part, records_of
from edl_torch.audit.intervals import Intervals, covered
from edl_torch.audit.lineage import DatasetHistory, Lineage
from edl_torch.audit.reading import Answer, Kind, Reports
from edl_torch.core.mixture import Segments
from edl_torch.core.plan import MixedRecords, Plan
from edl_torch.errors import InvalidArgument
from edl_torch.shard import IndexArray, Shuffle, Slice, Source

MEANING = {  # of each kind: such records have …
    "lost": "no outcome",
    "doubled": "more than one outcome",
    "forgotten": "confirmed, and unknown to the master",
    "repeated": "may have been trained on once more than is counted",
    "unlearnt": "counted by a step, after zero_grad() had thrown their gradients away",
    "stale": "came too late and was refused",
}
WRONG = ("lost", "doubled", "forgotten")  # those that refute
MOST_REPORTERS = 4  # of one range, in one lineage

_Blame = Callable[[Lineage, int, int], Iterator[str]]  # for a range of records
_Runs = tuple[str, IndexArray, IndexArray]  # of one storage: its name, where they begin, and where they end
MOST_LOOKED_UP = 1 << 16  # shuffled records of an epoch that are turned into names


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Records of one kind. `by` names the trainers that reported them, or had them in vain."""

    kind: str
    records: RecordRange
    by: tuple[str, ...] = ()


class Findings:
    """Findings of each kind, in every lineage that counts; `stale` ones of all lineages."""

    def __init__(self, history: DatasetHistory, parts: Sequence[Part], *, judged: bool) -> None:
        self._history = history
        self._counting = [part.lineage for part in parts]
        self.records = {kind: Intervals() for kind in MEANING}
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
        accepted = partial(self._reporters, Answer.ACCEPTED)
        blames: dict[str, _Blame] = {
            "doubled": accepted,
            "forgotten": accepted,
            "repeated": self._had_in_vain,
            "unlearnt": self._threw_away,
            "stale": partial(self._reporters, Answer.REFUSED),
        }
        lost = name_records(self._plan, self.records["lost"], limit)
        named = [Finding(kind="lost", records=records) for records in lost]
        for kind, blame in blames.items():
            named += islice(self._blamed(kind, blame, limit), limit)
        return tuple(named)

    def unnamed(self, named: Sequence[Finding]) -> dict[str, int]:
        """Return the records of each kind that `named` leaves out, where there are any."""
        left = {kind: records.count for kind, records in self.records.items()}
        for finding in named:
            left[finding.kind] -= len(finding.records)
        return {kind: count for kind, count in left.items() if count}

    def _blamed(self, kind: str, blame: _Blame, limit: int) -> Iterator[Finding]:
        lineages = self._history.lineages.values() if kind == "stale" else self._counting
        for start, end in islice(self.records[kind], limit):
            by = tuple(who for lineage in lineages for who in blame(lineage, start, end))
            for records in name_records(self._plan, Intervals.run(start, end), limit):
                yield Finding(kind=kind, records=records, by=by)

    @cached_property
    def _plan(self) -> Plan:
        """The dataset's; of a mixture with the weights of earlier lineages up to where later ones begin."""
        plan = self._history.coordinates.plan
        if plan.mixed is None:
            return plan
        told = (segment for lineage in reversed(self._counting) for segment in lineage.segments)
        return Plan(replace(plan.spec, segments=Segments(told).all))

    def _had_in_vain(self, lineage: Lineage, start: int, end: int) -> Iterator[str]:
        for reports, why in (
            (lineage.told[Kind.RETURNED], "given back"),
            (lineage.told[Kind.VOID], "taken back"),
            (lineage.acknowledged.answered(Answer.REFUSED, Answer.LOST), "reported too late"),
        ):
            for trainer, task in self._trainers(reports, start, end):
                yield f"{trainer} ({why} in lineage {lineage.key[1]}, task {task})"

    def _threw_away(self, lineage: Lineage, start: int, end: int) -> Iterator[str]:
        for trainer, task in self._trainers(lineage.told[Kind.UNLEARNT], start, end):
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
    """Records `start` (inclusive) to `end` (exclusive) of the storage `name`, in one epoch.

    Of a mixture `epoch` is the pass over the component. Without a name they are indices of the mixture, of
    which the logs do not say what stood there.
    """

    epoch: int
    name: str
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


def name_records(plan: Plan, found: Intervals, limit: int) -> list[RecordRange]:
    """Return the first `limit` ranges of the records in `found`, by epoch, then in the order of the sources.

    `found` has their numbers on the line of `audit.intervals`; there are as few ranges as it takes.
    """
    ranges = _ranges(plan, found) if plan.mixed is None else _in_components(plan.mixed, found)
    return list(islice(ranges, limit))


def _in_components(mixed: MixedRecords, found: Intervals) -> Iterator[RecordRange]:
    """Yield indices of a mixture as runs of records, by component and pass; as many as are looked up."""
    left = MOST_LOOKED_UP
    for start, end in found:
        try:
            indices = mixed.many(start, min(end, start + left))
        except InvalidArgument:
            yield RecordRange(epoch=0, name="", start=start, end=end)
            continue
        assert indices.sources is not None
        assert indices.passes is not None
        rows = np.stack((indices.sources, indices.passes, indices.numbers))
        rows = rows[:, np.lexsort(rows[::-1])]
        is_next = (np.diff(rows[:2]) == 0).all(axis=0) & (np.diff(rows[2]) == 1)
        firsts = np.flatnonzero(np.concatenate(([True], ~is_next)))
        lasts = np.append(firsts[1:], len(indices)) - 1
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
            source, turn, number = rows[:, first].tolist()
            name = indices.names[source]
            yield RecordRange(epoch=turn, name=name, start=number, end=int(rows[2, last]) + 1)
        left -= len(indices)
        if left <= 0:
            return


def _ranges(plan: Plan, found: Intervals) -> Iterator[RecordRange]:
    places = {source.name: place for place, source in enumerate(plan.spec.sources)}
    for epoch, part in found.blocks(plan.size):
        found_in: defaultdict[str, list[tuple[IndexArray, IndexArray]]] = defaultdict(list)
        left = MOST_LOOKED_UP
        for low, high in part:
            for name, starts, ends in _runs(plan, low, high, left):
                found_in[name].append((starts, ends))
                left -= len(starts)
            if left <= 0:
                break
        for name in sorted(found_in, key=places.__getitem__):
            starts, ends = map(np.concatenate, zip(*found_in[name], strict=True))
            for start, end in covered(starts, ends):
                yield RecordRange(epoch=epoch, name=name, start=start, end=end)


def _runs(plan: Plan, low: int, high: int, most: int) -> Iterator[_Runs]:
    """Yield the records of a stretch of one epoch: of each storage where runs begin and end; `most` runs."""
    is_whole = high - low == plan.size
    in_storage_order = plan.order is Shuffle.NONE and not plan.spec.shuffle_shards
    if is_whole or in_storage_order:
        yield from _of_sources(plan.spec.sources, low % plan.size, low % plan.size + high - low)
        return
    for cut in plan.slices(low, high):
        for run in _runs_of(plan, cut, most):
            most -= len(run[1])
            yield run
        if most <= 0:
            return


def _runs_of(plan: Plan, cut: Slice, most: int) -> Iterator[_Runs]:
    """Yield the same of a slice, which lies in one window."""
    if plan.order is Shuffle.NONE:
        shards = [plan.shard(cut)]
    elif plan.order is Shuffle.SHARD and cut.limit == plan.records_in(cut.epoch, cut.shard):
        shards = list(plan.storage_of(cut.epoch, cut.shard))  # all of them, in whichever order
    else:
        indices = plan.indices(replace(cut, limit=min(cut.limit, most)))
        sources = np.zeros_like(indices.numbers) if indices.sources is None else indices.sources
        for source in np.unique(sources).tolist():
            numbers = indices.numbers[sources == source]
            yield indices.names[source], numbers, numbers + 1
        return
    for shard in shards:
        yield shard.name, np.array([shard.start]), np.array([shard.end])


def _of_sources(sources: Sequence[Source], low: int, high: int) -> Iterator[_Runs]:
    """Yield the records `low` to `high`, counted through all sources."""
    first = 0
    for source in sources:
        start, end = max(low - first, 0), min(high - first, source.count)
        if start < end:
            yield source.name, np.array([source.start + start]), np.array([source.start + end])
        first += source.count
