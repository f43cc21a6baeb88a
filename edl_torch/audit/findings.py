"""Findings: records with too few or too many outcomes, and the trainers that reported them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from edl_torch.audit.intervals import Intervals
from edl_torch.audit.lineage import History, Lineage
from edl_torch.audit.naming import RecordRange, name_records
from edl_torch.audit.part import Part, records_of
from edl_torch.audit.reading import Answer, Kind

KINDS = ("lost", "doubled", "forgotten", "repeated", "stale")
MOST_REPORTERS = 4  # of one range, in one lineage


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Records that are `lost` (no outcome), `doubled` (several), `forgotten` (the master confirmed an outcome
    and does not know it), `repeated` (a living trainer may have trained on them once more than is counted) or
    `stale` (reported too late and refused, which costs no outcome).

    `by` names the trainers that reported them, or had them in vain.
    """

    kind: str
    records: RecordRange
    by: tuple[str, ...] = ()


class Findings:
    """Findings of each kind, in every lineage that counts; `stale` ones of all lineages."""

    def __init__(self, history: History, parts: Sequence[Part], *, judged: bool) -> None:
        self._history = history
        self._counting = [part.lineage for part in parts]
        self.records = {kind: Intervals() for kind in KINDS}
        for part in parts:
            self.records["lost"] |= part.missing
            self.records["doubled"] |= part.doubled
            self.records["repeated"] |= part.repeated
        if judged:  # by the master's own word
            self.records["forgotten"] = parts[0].certain - parts[0].required
        for lineage in history.lineages.values():
            self.records["stale"] |= records_of(lineage.acknowledged.answered(Answer.REFUSED))

    def count(self, kind: str) -> int:
        """Return records of one kind."""
        return self.records[kind].count

    def named(self, limit: int) -> tuple[Finding, ...]:
        """Return the first `limit` ranges of each kind."""
        kinds = {
            "lost": self._lost(limit),
            "doubled": self._reported("doubled", Answer.ACCEPTED, self._counting, limit),
            "forgotten": self._reported("forgotten", Answer.ACCEPTED, self._counting, limit),
            "repeated": self._repeated(limit),
            "stale": self._reported("stale", Answer.REFUSED, self._history.lineages.values(), limit),
        }
        return tuple(finding for found in kinds.values() for finding in islice(found, limit))

    def _lost(self, limit: int) -> Iterator[Finding]:
        for records in name_records(self._history.coordinates, self.records["lost"], limit):
            yield Finding(kind="lost", records=records)

    def _reported(
        self, kind: str, answer: Answer, lineages: Iterable[Lineage], limit: int
    ) -> Iterator[Finding]:
        for start, end in islice(self.records[kind], limit):
            by = tuple(who for lineage in lineages for who in self._reporters(lineage, answer, start, end))
            for records in name_records(self._history.coordinates, Intervals.run(start, end), limit):
                yield Finding(kind=kind, records=records, by=by)

    def _repeated(self, limit: int) -> Iterator[Finding]:
        for start, end in islice(self.records["repeated"], limit):
            by = tuple(who for lineage in self._counting for who in self._had_in_vain(lineage, start, end))
            for records in name_records(self._history.coordinates, Intervals.run(start, end), limit):
                yield Finding(kind="repeated", records=records, by=by)

    def _had_in_vain(self, lineage: Lineage, start: int, end: int) -> Iterator[str]:
        late = lineage.acknowledged.answered(Answer.REFUSED, Answer.LOST)
        for reports, why in (
            (lineage.repeated.answered(Kind.RETURNED), "given back"),
            (lineage.repeated.answered(Kind.VOID), "taken back"),
            (late, "reported too late"),
        ):
            hit = (reports.starts < end) & (reports.ends > start)
            for place in np.flatnonzero(hit)[:MOST_REPORTERS].tolist():
                trainer = self._history.trainers[int(reports.who[place])]
                yield f"{trainer} ({why} in lineage {lineage.key[1]}, task {reports.tasks[place]})"

    def _reporters(self, lineage: Lineage, answer: Answer, start: int, end: int) -> Iterator[str]:
        for reports in (lineage.acknowledged, lineage.quarantined):
            hit = (reports.starts < end) & (reports.ends > start) & (reports.answers == answer)
            for place in np.flatnonzero(hit)[:MOST_REPORTERS].tolist():
                trainer = self._history.trainers[int(reports.who[place])]
                yield f"{trainer} (lineage {lineage.key[1]}, task {reports.tasks[place]})"
