"""Part of one lineage in the proof: the outcomes that it gave to the records that it is answerable for."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from edl_torch.audit.intervals import Coordinates, Intervals, covered
from edl_torch.audit.lineage import Lineage, Reports
from edl_torch.audit.reading import Answer, Kind
from edl_torch.core.leases import Range
from edl_torch.trainer.vocabulary import Evidence

_UNSURE = Answer.NONE, Answer.LOST  # an earlier try may have been heard

Settled = Mapping[tuple[int, int], list[Range]]  # (task, attempt) -> positions of a lease with outcomes


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Question to a lineage: the outcomes of `required`, where `begun` had theirs before.

    `quarantine` is what the token or the master that requires them has there, `remainders` those of the token
    that the lineage began from. `left` says at which line of which log the token was taken by which the
    model left the lineage: what a log has after it is not in the model.
    """

    required: Intervals
    begun: Intervals
    quarantine: Intervals
    remainders: Intervals
    settled: Settled = field(default_factory=dict)
    left: Mapping[int, int] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Part:
    """Answer of a lineage. `outcomes` includes `begun`; `certain` are those of them that are not assumed.

    Three sets have what loops had before others had it: `returned` was given back, `void` taken back, and
    `late` reported in vain. `doubt` says what makes the token that the lineage began from inexact.
    """

    lineage: Lineage
    required: Intervals
    begun: Intervals
    certain: Intervals
    outcomes: Intervals
    quarantined: Intervals
    dropped: Intervals
    perhaps_dropped: Intervals  # of the assumed: others may have had them last, as a remainder
    missing: Intervals
    doubled: Intervals
    unsettled: int
    returned: Intervals
    void: Intervals
    unlearnt: Intervals  # acknowledged by a step that had no gradients of them
    several: Intervals  # an optimizer stepped on them more than once
    late: Intervals
    uncounted: int  # records reported in vain, nobody knows which
    padding: int  # padding batches that were trained on like any other
    changed: list[str]  # what of the data was changed while they were read
    ways: Mapping[Evidence, int]  # how the records came to be acknowledged that have their outcome from here
    doubt: str = ""
    contradictions: list[str] = field(default_factory=list)

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


def examine(line: Coordinates, lineage: Lineage, question: Question) -> Part:
    """Count the outcomes in one lineage."""
    required, begun = question.required, question.begun
    acknowledged = _settle(lineage.acknowledged, question.settled, line)
    accepted = acknowledged.answered(Answer.ACCEPTED)
    bad = records_of(lineage.quarantined.answered(Answer.ACCEPTED)) | (question.quarantine - begun)
    starts = np.concatenate((accepted.starts, bad.starts, begun.starts))
    ends = np.concatenate((accepted.ends, bad.ends, begun.ends))
    certain = covered(starts, ends)
    unsure, unsure_bad = acknowledged.answered(*_UNSURE), lineage.quarantined.answered(*_UNSURE)
    # Of two trainers that reported a record and were never answered, at most one was heard.
    assumed = (records_of(unsure) | records_of(unsure_bad)) - certain
    missing = required - (certain | assumed)
    remainders = lineage.remainders | question.remainders
    dropped = _dropped(line, missing & remainders, lineage.batch_size)
    untold = (missing | assumed) & required
    perhaps_dropped = _dropped(line, untold & remainders, lineage.batch_size) - dropped
    quarantined = ((bad - begun) | (records_of(unsure_bad) & assumed)) & required
    trained = ((certain | assumed) - begun - quarantined) & required
    repeated, reported = lineage.repeated.until(question.left), lineage.acknowledged.until(question.left)
    return Part(
        lineage=lineage,
        required=required,
        begun=begun,
        certain=certain,
        outcomes=certain | assumed,
        quarantined=quarantined,
        dropped=dropped,
        perhaps_dropped=perhaps_dropped,
        missing=missing - dropped,
        doubled=covered(starts, ends, 2) & required,
        unsettled=unsure.records + unsure_bad.records,
        returned=records_of(repeated.answered(Kind.RETURNED)),
        void=records_of(repeated.answered(Kind.VOID)),
        unlearnt=records_of(repeated.answered(Kind.UNLEARNT)) & trained,
        several=records_of(repeated.answered(Kind.SEVERAL)) & trained,
        late=_late(reported, required),
        uncounted=sum(n for place, at, n in lineage.uncounted if at < question.left.get(place, at + 1)),
        padding=sum(n for place, at, n in lineage.padding if at < question.left.get(place, at + 1)),
        changed=[said for place, at, said in lineage.changed if at < question.left.get(place, at + 1)],
        ways=_ways(acknowledged.at(acknowledged.answers != Answer.REFUSED), trained),
    )


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
    reports = Reports.join([lineage.acknowledged, lineage.quarantined])
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
