"""Verdict of an audit: proof, or refutation by named records, that each record had one outcome an epoch.

A verdict comes about in this order, a file for each:

1. `reading` makes chapters of the lines that `log` wrote: what a session told of records, and the answers.
2. `lineage` puts the chapters of all sessions together, by history of the model, as sets of numbers
   (`intervals`), and says which lineage is the last.
3. `chain` goes back from that, token by token, to the beginning of the data: what counts is the model that
   came out. It counts what each of these lineages did with the records that it answers for.
4. `models` compares the samples of parameters: whether one model has all.
5. `findings` names records with too few or too many outcomes; here all of it is a verdict.

A proof is exact where no record was in that model without being counted: given back, taken back, counted or
saved inexactly after a loop may have trained on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from os import PathLike

import numpy as np

from edl_torch.audit.chain import FinalWord, LineageChain, Part, records_of
from edl_torch.audit.findings import Findings
from edl_torch.audit.intervals import Intervals
from edl_torch.audit.lineage import DatasetHistory, Key, Runs, runs_of
from edl_torch.audit.models import Models, models_of
from edl_torch.audit.reading import Answer, Log, read_logs, read_order
from edl_torch.core.mixture import Segments
from edl_torch.core.token import Token
from edl_torch.errors import AuditError
from edl_torch.fingerprint import describe_change, differ, strength_of
from edl_torch.shard import TaskType
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
class ComponentShare:
    """What a component of a mixture was to give of the records that the model has, and has given.

    `wanted` is by the weights up to the last of them, and has those in quarantine too. `known_by` is as that
    of the whole verdict. Where weights are of tokens, a record of it has `mean_length`.
    """

    name: str
    size: int
    wanted: float
    acknowledged: int
    quarantined: int
    known_by: str
    mean_length: float = 0.0

    @property
    def passes(self) -> float:
        """Passes over it that these make, and those in quarantine."""
        return (self.acknowledged + self.quarantined) / self.size if self.size else 0.0


@dataclass(frozen=True, slots=True)
class Era:
    """The time in which a dataset had the same data; `left` is the token that it left them with."""

    history: DatasetHistory
    chain: LineageChain
    parts: list[Part]  # the final one first
    left: Token | None = None


class Verdict:
    """Verdict on one dataset. Unless said otherwise, counts are of records in lineages of the final model."""

    def __init__(
        self,
        era: Era,
        found: Findings,
        models: Models,
        word: FinalWord,
        used: Set[Key],
        left_out: Mapping[str, int],
        beside: Set[str],
        *,
        required: int,
        open: Intervals,
        unfinished: bool,
        may_go_on: bool,
        listed: int,
    ) -> None:
        history, parts, final = era.history, era.parts, era.parts[0]
        spec, began = history.spec, _token_of(parts[-1])
        ways = {way: sum(part.ways.get(way, 0) for part in parts) for way in Evidence}
        self.dataset = spec.name
        self.task_type = spec.task_type
        self.ledger, self.lineage = final.lineage.key
        self.size = spec.size
        self.num_epochs = spec.num_epochs  # 0 is endless
        # Epochs before it were of other data, which have a verdict of their own.
        self.first_epoch = 0 if began is None else began.first_epoch
        self.abandoned = 0 if era.left is None else era.left.abandoned  # when the job went on with other data
        self.records = required - self.first_epoch * self.size  # that must have an outcome
        self.quarantined = sum((part.quarantined - part.begun).count for part in parts)
        self.acknowledged = sum(part.own.count for part in parts) - self.quarantined
        self.dropped = sum(part.dropped.count for part in parts)
        self.lost = found.count("lost")
        self.doubled = found.count("doubled")
        self.forgotten = found.count("forgotten")
        self.open = open.count  # without an outcome, and need not have one yet
        # Reported, and no log says whether the master heard it; and those of them that are taken for
        # acknowledged: nobody else has them, and the master, if asked, does.
        self.unsettled = sum(part.unsettled for part in parts)
        self.assumed = sum(part.assumed.count for part in parts)
        # Of all lineages: acknowledgements that came too late, or after a token that the job went back to.
        every = history.lineages.values()
        self.refused = sum(lineage.acknowledged.answered(Answer.REFUSED).records for lineage in every)
        self.rolled_back = _rolled_back(history, parts, used)
        self.trainers = sum(map(bool, history.trainers))  # sessions
        self.lineages = len(history.lineages)
        # Of the acknowledged: how that came about.
        self.rests_on = {way.label: count for way, count in ways.items() if count}
        # Perhaps trained on once more than is counted, by who lives: given back by a loop that had them,
        # taken back by the master while a loop had them, or reported when the lease was another's.
        self.repeated = found.count("repeated")
        self.returned = Intervals.union(part.returned for part in parts).count
        self.void = Intervals.union(part.void for part in parts).count
        self.late = Intervals.union(part.late for part in parts).count
        # Acknowledged by counting reports on batches of several loader workers; and reported so, and trained
        # on again, as the reports do not say which.
        self.counted = ways[Evidence.COUNT]
        self.uncounted = sum(part.uncounted for part in parts)
        # Padding batches that were trained on like any other: copies, nobody knows of which records.
        self.padding = sum(part.padding for part in parts)
        # Acknowledged, though no step came on them, or none that had their gradients.
        self.unstepped = ways[Evidence.UNSTEPPED] + found.count("unlearnt")
        # An optimizer stepped on them more than once: chunks of a batch, or the batch again.
        self.several = Intervals.union(part.several for part in parts).count
        # Of which some of several optimizers used gradients, and others none.
        self.partly = Intervals.union(part.partly for part in parts).count
        self.models = models  # that learnt them
        self.known_by = history.known_by  # how sessions were seen to have the same data
        changed = dict.fromkeys((*_changes(parts), *(said for part in parts for said in part.changed)))
        self.changed = tuple(changed)  # what of the data, while the job ran
        self.unordered = history.unordered  # ledgers of which nothing tells which is the last
        self.untouched = history.untouched  # ledgers of starts that learnt nothing
        self.left_out = left_out  # records of runs that this did not go on from, by ledger
        self.beside = tuple(sorted(beside))  # ledgers of unlike runs under its name, which have verdicts too
        doubts = (f"the token that lineage {p.lineage.key[1]} began from {p.doubt}" for p in parts if p.doubt)
        self.doubts = tuple(doubts)  # why tokens that the model went through are inexact
        self.inexact_tokens = len(self.doubts)
        self.unfinished = unfinished and bool(open)  # it was asked for, and records are open
        self.judged = word.token is not None  # by the master's own word
        self.contradictions = tuple(text for part in parts for text in part.contradictions)
        # What to do where the job may be one that has not ended.
        wrong = self.doubled or self.forgotten or self.contradictions
        self.advice = _MAY_GO_ON if may_go_on and self.lost and not wrong else ""
        self.findings = found.named(listed)  # the first ranges of each kind
        self.unnamed = found.unnamed(self.findings)  # records of the others, by kind
        self.components = _components(history, parts)  # of a mixture

    def __repr__(self) -> str:
        return f"<Verdict {self.outcome.label} dataset={self.dataset!r} records={self.records}>"

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Verdict on one dataset, and what it was found from: the sets of records that it counts."""

    verdict: Verdict
    era: Era
    found: Findings
    open: Intervals


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
    for name, runs in runs_of(logs, read_order(directories)).items():
        found += _judge_all(runs, words.get(name, FinalWord()), unfinished=unfinished, listed=listed)
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


def _judge_all(runs: Runs, word: FinalWord, *, unfinished: bool, listed: int) -> list[Judgement]:
    """Judge what lies under one name: the last run, then the last of what that does not account for, and so
    on until nothing is left. The oldest comes first.

    The master's `word` is on the run that it names, which is the last then, or on the last.
    """
    found: list[Judgement] = []
    left = runs.used
    while not found or left:
        eras = _eras(runs.history(left, word.ledger), word)
        used = {part.lineage.key for era in eras for part in era.parts}
        # Of earlier data, what is not known to have come before this run is a run of its own.
        before = runs.earlier[eras[0].history.final[0]] | {ledger for ledger, _ in used}
        accounted = set(eras[0].history.alike).union(*(era.history.alike & before for era in eras))
        # Of other data, what a token ties to this run, which did not go on from it, is thrown away.
        accounted |= {one for one in before if runs.origins[one] & accounted}
        left -= accounted
        thrown_away = sorted(accounted - {ledger for ledger, _ in used})
        left_out = {ledger: learnt for ledger in thrown_away if (learnt := runs.learnt(ledger))}
        beside = runs.used - accounted
        earlier: list[Judgement] = []
        for number in reversed(range(len(eras))):
            # The model went through the lineages of all data before, too.
            models = models_of([(era.history, part) for era in eras[number:] for part in era.parts])
            said, is_open = (FinalWord(), False) if number else (word, unfinished)
            thrown = {} if number else left_out
            judgement = _judge(
                *(eras[number], said, models, used, thrown, beside), unfinished=is_open, listed=listed
            )
            earlier.append(judgement)
        found = earlier + found
        word = FinalWord()
    return found


def _eras(history: DatasetHistory, word: FinalWord) -> list[Era]:
    """Return the eras of a run, the last first. Raises AuditError when the logs do not reach back to its
    beginning."""
    chain = LineageChain(history, word)
    eras = [Era(history, chain, chain.parts())]
    while (left := _token_of(eras[-1].parts[-1])) is not None and left.before:
        before = Token.decode(left.before)
        earlier = history.of(before)
        chain = LineageChain(earlier, FinalWord())
        parts = chain.left_for(eras[-1].parts[-1], left.before)
        if not parts:
            break
        eras.append(Era(earlier, chain, parts, before))
    return eras


def _token_of(part: Part) -> Token | None:
    return None if part.lineage.token is None else Token.decode(part.lineage.token)


def _judge(
    era: Era,
    word: FinalWord,
    models: Models,
    used: Set[Key],
    left_out: Mapping[str, int],
    beside: Set[str],
    *,
    unfinished: bool,
    listed: int,
) -> Judgement:
    history, final, judged = era.history, era.parts[0], word.token is not None
    excused = final.missing & (Intervals() if era.left else _excused(history, final, word, unfinished))
    ahead = _ahead(history, final, word)
    late = Intervals() if unfinished else ahead  # a job that is said to be over has nothing ahead of it
    final.missing = (final.missing - excused) | (late - final.certain)
    left_open = excused | (ahead - late)
    found = Findings(history, era.parts, judged=judged)
    verdict = Verdict(
        *(era, found, models, word, used, left_out, beside),
        required=final.required.count + late.count - excused.count,
        open=left_open,
        unfinished=unfinished,
        may_go_on=bool(late) if judged else not unfinished and era.left is None,
        listed=listed,
    )
    return Judgement(verdict=verdict, era=era, found=found, open=left_open)


def _components(history: DatasetHistory, parts: list[Part]) -> tuple[ComponentShare, ...]:
    """Return the shares of a mixture's components: by its plan, and by what each lineage acknowledged."""
    spec = history.spec
    if not spec.components or not all(part.lineage.segments for part in parts):
        return ()
    given, bad = np.zeros((2, len(spec.components)), np.int64)
    last = 0
    for part in parts:
        segments = Segments(part.lineage.segments)
        for total, runs in ((given, part.own - part.quarantined), (bad, part.own & part.quarantined)):
            for first, after in runs:
                total += segments.counts(after) - segments.counts(first)
        last = max(last, int(part.own.ends.max(initial=0)))
    whole = Segments(parts[0].lineage.segments)
    lags = whole.lags(last)
    wanted = [float(count + lag) for count, lag in zip(whole.counts(last).tolist(), lags, strict=True)]
    return tuple(
        ComponentShare(
            name=one.name,
            size=one.size,
            wanted=wanted[c],
            acknowledged=int(given[c]),
            quarantined=int(bad[c]),
            known_by=history.components_known_by[one.name],
            mean_length=one.mean_length,
        )
        for c, one in enumerate(history.coordinates.plan.spec.components)
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


def _rolled_back(history: DatasetHistory, parts: list[Part], used: Set[Key]) -> int:
    beyond = sum((part.outcomes - part.begun - part.required).count for part in parts[1:])
    unused = [lineage.acknowledged for key, lineage in history.lineages.items() if key not in used]
    return beyond + sum(records_of(r.at(r.answers != Answer.REFUSED)).count for r in unused)


def _changes(parts: list[Part]) -> Iterator[str]:
    """Yield what differs in the data between sessions of the job: who gave `fingerprint=`, or had no look,
    may stand between two that differ."""
    last: dict[tuple[str, bool], str] = {}
    for name, look in (look for part in reversed(parts) for look in part.lineage.looks):
        kind = name, strength_of(look) == "given"
        if differ(last.get(kind, look), look):
            of_component = f"component {name!r}: " if name else ""
            yield f"{of_component}{describe_change(last[kind], look)}"
        last[kind] = look
