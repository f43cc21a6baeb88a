"""Part of one lineage in the proof: the outcomes that it gave to the records that it is answerable for."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np

from edl_torch.audit.intervals import Coordinates, Intervals, covered
from edl_torch.audit.lineage import Lineage
from edl_torch.audit.reading import Answer, Kind, Reports
from edl_torch.core.leases import Range
from edl_torch.core.token import Token
from edl_torch.trainer.vocabulary import Evidence

_UNSURE = Answer.NONE, Answer.LOST  # an earlier try may have been heard

Settled = Mapping[tuple[int, int], list[Range]]  # (task, attempt) -> positions of a lease with outcomes


class Part:
    """What one lineage did with the records that it is answerable for: those that are `required` of it.

    `begun` had their outcome before. `outcomes` includes them; `certain` are those that are not assumed.
    """

    def __init__(
        self,
        line: Coordinates,
        lineage: Lineage,
        *,
        required: Intervals,
        begun: Intervals,
        later: Token | None,
        settled: Settled,
        left: Mapping[int, int],
    ) -> None:
        """Count the outcomes.

        Args:
            line: The numbers of records.
            lineage: What was told.
            required: The records that must have an outcome from it, or before it.
            begun: Those that had one before it.
            later: The token that requires them, where one does.
            settled: What the master knows of reports without an answer.
            left: The line of each log with the token by which the model left the lineage: what a log has
                after it is not in the model.
        """
        self.lineage = lineage
        self.required = required
        self.begun = begun
        began_from = Token.decode(lineage.token) if lineage.token is not None else None
        acknowledged = _settle(lineage.acknowledged, settled, line)
        accepted = acknowledged.answered(Answer.ACCEPTED)
        bad = records_of(lineage.quarantined.answered(Answer.ACCEPTED))
        self.contradictions: list[str] = []
        if later is not None:
            reported = records_of(lineage.quarantined.answered(Answer.ACCEPTED, *_UNSURE))
            in_token = line.quarantine(later.quarantine, reported, lineage.segments)
            if denied := ((bad & required) - begun - in_token).count:
                self.contradictions.append(
                    f"the logs have {denied} record(s) in quarantine that a token has as trained on"
                )
            bad |= in_token - begun
        starts = np.concatenate((accepted.starts, bad.starts, begun.starts))
        ends = np.concatenate((accepted.ends, bad.ends, begun.ends))
        self.certain = covered(starts, ends)
        self.doubled = covered(starts, ends, 2) & required
        unsure, unsure_bad = acknowledged.answered(*_UNSURE), lineage.quarantined.answered(*_UNSURE)
        self.unsettled = unsure.records + unsure_bad.records
        # Of two trainers that reported a record and were never answered, at most one was heard.
        assumed = (records_of(unsure) | records_of(unsure_bad)) - self.certain
        self.outcomes = self.certain | assumed
        missing = required - self.outcomes
        remainders = records_of(lineage.told[Kind.REMAINDER])
        if began_from is not None:
            remainders |= line.slices(began_from.remainders)
        self.dropped = _dropped(line, missing & remainders, lineage.batch_size)
        self.missing = missing - self.dropped
        # Of the assumed: others may have had them last, as a remainder.
        untold = (missing | assumed) & required
        self.perhaps_dropped = _dropped(line, untold & remainders, lineage.batch_size) - self.dropped
        self.quarantined = ((bad - begun) | (records_of(unsure_bad) & assumed)) & required
        trained = self.own - self.quarantined
        # How the records came to be acknowledged that have their outcome from here.
        self.ways = _ways(acknowledged.at(acknowledged.answers != Answer.REFUSED), trained)
        told = {kind: records_of(lineage.told[kind].until(left)) for kind in Kind if kind > Kind.REMAINDER}
        # What loops had before others had it: given back, taken back, and reported in vain.
        self.returned = told[Kind.RETURNED]
        self.void = told[Kind.VOID]
        self.late = _late(lineage.acknowledged.until(left), required)
        self.unlearnt = told[Kind.UNLEARNT] & trained  # acknowledged by a step without gradients of them
        self.several = told[Kind.SEVERAL] & trained  # an optimizer stepped on them more than once
        self.partly = told[Kind.PARTLY] & trained  # of several optimizers some alone used their gradients
        notes = [note for place, note in lineage.notes if note.line < left.get(place, note.line + 1)]
        # Records reported in vain, nobody knows which; padding batches that were trained on like any other.
        self.uncounted = sum(note.said for note in notes if note.kind == "uncounted")
        self.padding = sum(note.said for note in notes if note.kind == "padding")
        self.changed = [note.said for note in notes if note.kind == "changed"]  # of the data
        self.doubt = ""  # what makes the token that the lineage began from inexact

    @property
    def sound(self) -> bool:
        """Whether every required record has exactly one outcome."""
        return not (self.missing or self.doubled or self.contradictions)

    @property
    def assumed(self) -> Intervals:
        """Records reported without an answer, required, and reported by nobody else."""
        return (self.outcomes - self.certain) & self.required

    @property
    def repeated(self) -> Intervals:
        """Records that a loop had, and may have trained on, without an outcome from that."""
        return self.returned | self.void | self.late

    @property
    def own(self) -> Intervals:
        """The required records that have their outcome from this lineage."""
        return (self.outcomes - self.begun) & self.required


def _late(reported: Reports, required: Intervals) -> Intervals:
    """Return records that a trainer reported in vain: it lives, and the lease was another's by then."""
    refused, unheard = records_of(reported.answered(Answer.REFUSED)), reported.answered(Answer.LOST)
    lost, twice = records_of(unheard), covered(unheard.starts, unheard.ends, 2)
    # What an earlier try may have told has its outcome from that, unless others have it, or no token has.
    return refused | (lost & records_of(reported.answered(Answer.ACCEPTED))) | (lost - required) | twice


def _ways(reports: Reports, trained: Intervals) -> dict[Evidence, int]:
    """How many of the records were acknowledged in which way; of several the one that proves the least."""
    used = [way for way in sorted(Evidence, reverse=True) if (reports.ways == way).any()]
    if len(used) == 1:
        return {used[0]: trained.count}
    ways = {}
    for way in used:
        ways[way] = (records_of(reports.at(reports.ways == way)) & trained).count
        trained = trained - records_of(reports.at(reports.ways == way))
    return ways


def all_reports(lineage: Lineage) -> Reports:
    """Return all reports of a lineage that may have been heard, of bad records too."""
    reports = lineage.outcomes
    return reports.at(reports.answers != Answer.REFUSED)


def records_of(reports: Reports) -> Intervals:
    """Return the records that were reported, each once."""
    return covered(reports.starts, reports.ends)


def _settle(reports: Reports, settled: Settled, line: Coordinates) -> Reports:
    """Answer what had no answer and the master's journal knows: what has its outcome there was heard."""
    unsure = reports.answered(*_UNSURE)
    leases = list(zip(unsure.tasks.tolist(), unsure.attempts.tolist(), strict=True))
    known = np.array([lease in settled for lease in leases], dtype=np.bool_)
    if not known.any():
        return reports
    told = unsure.at(known)
    bases = line.window_starts(told.starts).tolist()
    parts: list[tuple[int, int, int, Answer]] = []
    for place, lease in enumerate(itertools.compress(leases, known)):
        run = Intervals.run(int(told.starts[place]), int(told.ends[place]))
        heard = run & Intervals.of(
            [(bases[place] + first, bases[place] + after) for first, after in settled[lease]]
        )
        parts += [(place, *piece, Answer.ACCEPTED) for piece in heard]
        parts += [(place, *piece, Answer.REFUSED) for piece in run - heard]
    places, starts, ends, answers = np.array(parts, dtype=np.int64).reshape(-1, 4).T
    told = told.at(places)
    told.starts, told.ends, told.answers = starts, ends, answers
    return Reports.join([reports.answered(Answer.ACCEPTED, Answer.REFUSED), unsure.at(~known), told])


def _dropped(line: Coordinates, remainders: Intervals, batch_size: int) -> Intervals:
    """Remainders that nobody trained on: `drop_last` dropped them where an epoch has too few for a batch."""
    epochs = remainders.blocks(line.size)
    return Intervals.union(part for _, part in epochs if part.count < batch_size)
