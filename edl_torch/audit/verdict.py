"""Verdict of an audit: proof, or refutation by named records, that each record had one outcome an epoch.

What counts is the model that came out: the final lineage and those that it goes back to (`audit.chain`). A
proof is exact where no record was in that model without being counted: given back, taken back, counted or
saved inexactly after a loop may have trained on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from os import PathLike

import numpy as np

from edl_torch.audit.chain import FinalWord, LineageChain
from edl_torch.audit.findings import Finding, Findings
from edl_torch.audit.intervals import Intervals
from edl_torch.audit.lineage import DatasetHistory, Key, histories
from edl_torch.audit.models import Models, models_of
from edl_torch.audit.part import Part, records_of
from edl_torch.audit.reading import Answer, Log, read_logs, read_order
from edl_torch.core.mixture import Segments
from edl_torch.core.token import Token
from edl_torch.errors import AuditError
from edl_torch.shard import DatasetSpec, TaskType
from edl_torch.trainer.vocabulary import Evidence

_MAY_GO_ON = "if the job still runs, was killed, or was stopped and will go on: audit it with --unfinished"
LISTED = 20  # ranges of each kind that are named, unless the caller wants more

Words = Mapping[str, FinalWord]


class Outcome(Enum):
    """Outcome of a verdict, the best first, with its exit status."""

    PROVEN = "PROVEN", 0  # each record counts once, and one model has it; `Verdict.several` in several steps
    DELIVERED = "DELIVERED", 4  # each record was trained on once; that one model has all is not shown
    INEXACT = "INEXACT", 3  # each record has one outcome, and a model may have some more often
    UNFINISHED = "UNFINISHED", 2
    REFUTED = "REFUTED", 1

    def __init__(self, label: str, status: int) -> None:
        self.label = label
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Verdict on one dataset, and what it was found from: the sets of records that it counts."""

    verdict: Verdict
    history: DatasetHistory
    chain: LineageChain
    parts: Sequence[Part]  # the final one first
    found: Findings
    open: Intervals


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentShare:
    """What a component of a mixture was to give of the records that the model has, and has given.

    `wanted` is by the weights up to the last of them.
    """

    name: str
    size: int
    wanted: float
    acknowledged: int

    @property
    def passes(self) -> float:
        """Passes over it that these make."""
        return self.acknowledged / self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Verdict on one dataset. Unless said otherwise, counts are of records in lineages of the final model.

    `findings` names the first ranges of each kind, `unnamed` counts the records of the others.
    """

    dataset: str
    task_type: TaskType
    ledger: str
    lineage: int
    size: int
    num_epochs: int  # 0 is endless
    first_epoch: int  # of these data; those before were of others, which have a verdict of their own
    abandoned: int  # of the epochs begun when the job went on with other data
    records: int  # that must have an outcome
    acknowledged: int
    quarantined: int
    dropped: int
    lost: int
    doubled: int
    forgotten: int
    open: int  # without an outcome, and need not have one yet
    unsettled: int  # reported, and no log says whether the master heard it
    assumed: int  # of those, taken for acknowledged: nobody else has them, and the master, if asked, does
    refused: int  # acknowledgements that came too late; in all lineages
    rolled_back: int  # acknowledged after a token that the job went back to; in all lineages
    trainers: int  # sessions
    lineages: int
    rests_on: Mapping[str, int]  # of the acknowledged: how that came about, by `trainer.vocabulary.Evidence`
    repeated: int  # may have been trained on once more than is counted, by who lives: the next three
    returned: int  # given back by a loop that had them, and may have trained on them
    void: int  # taken back by the master while a loop had them
    late: int  # reported, when the lease was another's
    counted: int  # acknowledged by counting: by reports on batches of several loader workers
    uncounted: int  # reported so, and trained on again, as the reports do not say which
    padding: int  # padding batches that were trained on like any other: copies, nobody knows of which records
    unstepped: int  # acknowledged, though no step came on them, or none that had their gradients
    several: int  # that an optimizer stepped on more than once: chunks of a batch, or the batch again
    models: Models  # that learnt them
    known_by: str  # how sessions were seen to have the same data, the strength of their fingerprints
    inexact_tokens: int  # of those that the model went through
    changed: tuple[str, ...] = ()  # what of the data, while they were read
    unordered: tuple[str, ...] = ()  # ledgers of which nothing tells which is the last
    doubts: tuple[str, ...] = ()  # why these are inexact
    unfinished: bool = False  # it was asked for, and records are open
    judged: bool = False  # by the master's own word
    contradictions: tuple[str, ...] = ()
    advice: str = ""  # what to do where the job may be one that has not ended
    findings: tuple[Finding, ...] = ()
    unnamed: Mapping[str, int] = field(default_factory=dict)
    components: tuple[ComponentShare, ...] = ()  # of a mixture

    @property
    def proven(self) -> bool:
        """Whether one model has each record exactly once."""
        return self.outcome is Outcome.PROVEN

    @property
    def delivered(self) -> bool:
        """Whether each record has exactly one outcome, whichever model has it, and however exactly."""
        return self.outcome in (Outcome.PROVEN, Outcome.DELIVERED, Outcome.INEXACT)

    @property
    def refuted(self) -> bool:
        """Whether a record that must have an outcome has none or several, or a token was not its model's."""
        return bool(self.lost or self.doubled or self.forgotten or self.contradictions)

    @property
    def exact(self) -> bool:
        """Whether no record was, or may have been, in a model that went on without being counted there."""
        counts = (self.counted, self.uncounted, self.padding, self.unstepped, self.inexact_tokens)
        return not any((self.repeated, self.changed, self.unordered, *counts))

    @property
    def outcome(self) -> Outcome:
        """Outcome of the verdict."""
        if self.refuted:
            return Outcome.REFUTED
        if self.unfinished:
            return Outcome.UNFINISHED
        if not self.exact:
            return Outcome.INEXACT
        if self.task_type is not TaskType.TRAINING:
            return Outcome.DELIVERED
        return Outcome.PROVEN if self.models.one else Outcome.DELIVERED


def audit(
    directories: Sequence[str | PathLike[str]],
    *,
    words: Words | Callable[[], Words] | None = None,
    unfinished: bool = False,
    listed: int = LISTED,
) -> list[Verdict]:
    """Return the verdict on every dataset in the logs of `directories`, by name.

    `words` is the master's final word by dataset; where it is a function, it has a word on every dataset, and
    must say the same before and after the logs are read. With `unfinished` a record without an outcome is
    open, not lost: for a job that still runs or was stopped. Raises AuditError when the logs cannot be used.
    """
    found = judge(directories, words=words, unfinished=unfinished, listed=listed)
    return [judgement.verdict for judgement in found]


def judge(
    directories: Sequence[str | PathLike[str]],
    *,
    words: Words | Callable[[], Words] | None = None,
    unfinished: bool = False,
    listed: int = LISTED,
) -> list[Judgement]:
    """Return what `audit` does, and with each verdict the sets of records that it counts."""
    logs, words = _read(directories, words or {})
    found: list[Judgement] = []
    last = {name: word.ledger for name, word in words.items()}
    for history in histories(logs, last, read_order(directories)):
        found += _judge_all(history, words.get(history.spec.name), unfinished=unfinished, listed=listed)
    return found


def _read(
    directories: Sequence[str | PathLike[str]], words: Words | Callable[[], Words]
) -> tuple[list[Log], Words]:
    if not callable(words):
        return read_logs(directories), words
    # What was answered is in a trainer's log after it is in the master's journal, what is about to be told
    # before: so where the journal rests while the logs are read, the two are of one moment.
    said = words()
    logs = read_logs(directories)
    if words() != said:
        raise AuditError(
            "the job went on while its logs were read: audit it when its trainers or its master have ended"
        )
    for name in {chapter.dataset.name for log in logs for chapter in log.chapters} - set(said):
        raise AuditError(
            f"the master has no dataset {name!r}, which the logs are of: give journal and logs of one job"
        )
    return logs, said


@dataclass(frozen=True, slots=True)
class _Era:
    """The time in which a dataset had the same data; `left` is the token that it left them with."""

    history: DatasetHistory
    chain: LineageChain
    parts: list[Part]
    left: Token | None = None


def _judge_all(
    history: DatasetHistory, word: FinalWord | None, *, unfinished: bool, listed: int
) -> Iterator[Judgement]:
    """Judge one dataset, and before it the data that it had earlier. Raises AuditError when the logs do not
    reach back to its beginning."""
    word = word or FinalWord()
    chain = LineageChain(history, word)
    eras = [_Era(history, chain, chain.parts())]
    while (left := _token_of(eras[-1].parts[-1])) is not None and left.before:
        before = Token.decode(left.before)
        earlier = history.of(before)
        chain = LineageChain(earlier, FinalWord())
        parts = chain.left_for(eras[-1].parts[-1], left.before)
        if not parts:
            break
        eras.append(_Era(earlier, chain, parts, before))
    used = {part.lineage.key for era in eras for part in era.parts}
    for number in reversed(range(len(eras))):
        # The model went through the lineages of all data before, too.
        models = models_of([(era.history, part) for era in eras[number:] for part in era.parts])
        said = FinalWord() if number else word
        yield _judge(eras[number], said, models, used, unfinished=unfinished and not number, listed=listed)


def _token_of(part: Part) -> Token | None:
    return None if part.lineage.token is None else Token.decode(part.lineage.token)


def _judge(
    era: _Era, word: FinalWord, models: Models, used: set[Key], *, unfinished: bool, listed: int
) -> Judgement:
    history, chain, parts, left = era.history, era.chain, era.parts, era.left
    final, spec = parts[0], history.spec
    began = _token_of(parts[-1])
    first_epoch = 0 if began is None else began.first_epoch
    excused = final.missing & (Intervals() if left else _excused(history, final, word, unfinished))
    final.missing -= excused
    ahead = _ahead(history, final, word)
    late = Intervals() if unfinished else ahead  # a job that is said to be over has nothing ahead of it
    final.missing |= late - final.certain
    found = Findings(history, parts, judged=word.token is not None)
    named = found.named(listed)
    quarantined = sum((part.quarantined - part.begun).count for part in parts)
    ways = {way: sum(part.ways.get(way, 0) for part in parts) for way in Evidence}
    left_open = excused | (ahead - late)
    changed = dict.fromkeys(said for part in parts for said in part.changed)
    doubts = [f"the token that lineage {p.lineage.key[1]} began from {p.doubt}" for p in parts if p.doubt]
    verdict = Verdict(
        dataset=spec.name,
        task_type=spec.task_type,
        ledger=final.lineage.key[0],
        lineage=final.lineage.key[1],
        size=spec.size,
        num_epochs=spec.num_epochs,
        first_epoch=first_epoch,
        abandoned=0 if left is None else left.abandoned,
        records=final.required.count - first_epoch * spec.size - excused.count + late.count,
        acknowledged=sum(part.own.count for part in parts) - quarantined,
        quarantined=quarantined,
        dropped=sum(part.dropped.count for part in parts),
        lost=found.count("lost"),
        doubled=found.count("doubled"),
        forgotten=found.count("forgotten"),
        open=left_open.count,
        unfinished=unfinished and bool(left_open),
        rests_on={way.label: count for way, count in ways.items() if count},
        repeated=found.count("repeated"),
        returned=Intervals.union(part.returned for part in parts).count,
        void=Intervals.union(part.void for part in parts).count,
        late=Intervals.union(part.late for part in parts).count,
        counted=ways[Evidence.COUNT],
        uncounted=sum(part.uncounted for part in parts),
        padding=sum(part.padding for part in parts),
        unstepped=ways[Evidence.UNSTEPPED] + found.count("unlearnt"),
        several=Intervals.union(part.several for part in parts).count,
        models=models,
        known_by=history.known_by,
        inexact_tokens=len(doubts),
        unordered=history.unordered,
        changed=tuple(changed),
        doubts=tuple(doubts),
        unsettled=sum(part.unsettled for part in parts),
        assumed=sum(part.assumed.count for part in parts),
        refused=sum(item.acknowledged.answered(Answer.REFUSED).records for item in history.lineages.values()),
        rolled_back=_rolled_back(history, parts, used),
        trainers=sum(map(bool, history.trainers)),
        lineages=len(history.lineages),
        judged=word.token is not None,
        contradictions=tuple(text for part in parts for text in part.contradictions),
        findings=named,
        unnamed=_unnamed(found, named),
        components=_components(spec, parts),
    )
    wrong = verdict.doubled or verdict.forgotten or verdict.contradictions
    may_go_on = late.count if word.token is not None else verdict.lost and not unfinished and left is None
    if may_go_on and not wrong:
        verdict = replace(verdict, advice=_MAY_GO_ON)
    return Judgement(verdict=verdict, history=history, chain=chain, parts=parts, found=found, open=left_open)


def _components(spec: DatasetSpec, parts: list[Part]) -> tuple[ComponentShare, ...]:
    """Return the shares of a mixture's components: by its plan, and by what each lineage acknowledged."""
    if not spec.components or not all(part.lineage.segments for part in parts):
        return ()
    given = np.zeros(len(spec.components), np.int64)
    last = 0
    for part in parts:
        segments = Segments(part.lineage.segments)
        for first, after in part.own - part.quarantined:
            given += segments.counts(after) - segments.counts(first)
        last = max(last, int(part.own.ends.max(initial=0)))
    whole = Segments(parts[0].lineage.segments)
    lags = whole.lags(last)
    wanted = [float(count + lag) for count, lag in zip(whole.counts(last).tolist(), lags, strict=True)]
    return tuple(
        ComponentShare(name=one.name, size=one.size, wanted=wanted[c], acknowledged=int(given[c]))
        for c, one in enumerate(spec.components)
    )


def _excused(history: DatasetHistory, final: Part, word: FinalWord, unfinished: bool) -> Intervals:
    """Return records that may be without an outcome yet."""
    if word.token is not None:
        return Intervals()  # the master says which have one
    if unfinished:
        return final.required
    if history.spec.num_epochs:
        return Intervals()
    # An endless job was stopped somewhere in the last epoch that it began.
    end = final.required.count
    return Intervals.run(max(0, end - history.spec.size), end)


def _ahead(history: DatasetHistory, final: Part, word: FinalWord) -> Intervals:
    """Return records of the job that have no outcome by the master's word."""
    if word.token is None or not history.spec.num_epochs:
        return Intervals()
    history.coordinates.check_epochs(history.spec.num_epochs)
    return Intervals.run(0, history.spec.num_epochs * history.spec.size) - final.required


def _rolled_back(history: DatasetHistory, parts: list[Part], used: set[Key]) -> int:
    beyond = sum((part.outcomes - part.begun - part.required).count for part in parts[1:])
    unused = [lineage.acknowledged for key, lineage in history.lineages.items() if key not in used]
    return beyond + sum(records_of(r.at(r.answers != Answer.REFUSED)).count for r in unused)


def _unnamed(found: Findings, named: Sequence[Finding]) -> dict[str, int]:
    left = {kind: records.count for kind, records in found.records.items()}
    for finding in named:
        left[finding.kind] -= len(finding.records)
    return {kind: count for kind, count in left.items() if count}
