"""Models of a job: whether the trainers whose records count had one, by the samples in their logs.

Sessions of one lineage have one model where their parameters had moved and were the same after the last of
their records that counts, and differed at no moment that both were looked at: a token, a number of steps. A
lineage goes on with the model of the one before where its parameters were, before its first step, those that
were saved with the token, and one that begins at the beginning has a model that has learnt nothing of these
data. The same is equal to the bit: a checkpoint is a copy, and replicas compute alike. Those on unlike
processors round otherwise. What cannot be compared is not the same, but for shards, which only compute
together, and where the user says that it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from edl_torch.audit.chain import Part, records_of
from edl_torch.audit.intervals import Intervals
from edl_torch.audit.lineage import DatasetHistory, Key, saved_with
from edl_torch.audit.log import token_digest
from edl_torch.audit.reading import Answer, Chapter, Kind, Reports, Seen
from edl_torch.shard import TaskType
from edl_torch.trainer.vocabulary import Evidence

ROUNDING = 1e-5  # of a value and its move, or twice its dtype's: how far replicas on unlike processors part
OF_MOVE = 0.01  # but not further, of how far the value has moved
_ADDING = 1e-12  # of a sum: the order of adding
_TELLING = 16  # places at least, for two models that are equal to be no chance

_DDP = "ElasticDataLoader(…, synchronous=True) and model = DistributedDataParallel(model), under torchrun"
_WORD = 'loader.attach(optimizer, one_model="how they become one")'

_UNSEEN = (
    "among {} record(s) that an optimizer stepped on are some of which no gradient was seen in its "
    "parameters: a GradScaler is named by loader.attach(optimizer, scaler=scaler); a wrapper that reads "
    'ahead tells with lookahead="manual" and loader.passed_on(); a batch that is skipped goes back with '
    "loader.give_back(); gradients come into parameter.grad before the next batch is asked for, and stay "
    "there until the step"
)
_DOUBTS = {
    "written": (
        "parameters of {} were written after {} step(s), or replaced, by what is no step of an attached "
        "optimizer: loader.attach(optimizer) for each that trains them, loader.load_state_dict(…) with each "
        f"model.load_state_dict(…), or, where nothing learnt is lost: {_WORD}"
    ),
    "again": (
        "{} stepped, after {} step(s), on gradients that it, or another loader's optimizer, had stepped on "
        "before, or that were of no batch: optimizer.zero_grad() before each backward() that begins a window"
    ),
    "padding": (
        "{} stepped, after {} step(s), on padding batches whose gradients were not 0: multiply the loss as a "
        "whole by loader.weight, or give it to loader.weigh()"
    ),
    "bad": (
        "{} stepped, after {} step(s), on gradients of a batch that was reported as bad: "
        "optimizer.zero_grad() after report_batch_done(err_msg=…), and no backward() with it"
    ),
    "left out": (
        "the optimizer of {} left out steps, before the first that wrote parameters, as was seen after {} "
        "step(s): begin with a loss scale that does not overflow, or, where a GradScaler skips: "
        "loader.attach(optimizer, scaler=scaler)"
    ),
    "unattached": (
        "on batches of {}, after {} step(s), an optimizer stepped that is not attached: "
        f"loader.attach(optimizer) for it too, or, where it trains no part of the model: {_WORD}"
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Records that one model has learnt, and the trainers that it learnt them with."""

    trainers: tuple[str, ...]
    records: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """Models of a job; one share says that one model has all, unless records are `unattached`.

    Those were acknowledged by trainers without an attached optimizer: nothing shows the model. `reasons` says
    what parts the models and which code would not, `shown` what ties them, and `perhaps_trained` which
    trainers began at the beginning of the data after an earlier run, and nothing shows that with a new model.
    """

    shares: tuple[Share, ...] = ()
    unattached: int = 0
    reasons: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()
    perhaps_trained: tuple[str, ...] = ()

    @property
    def one(self) -> bool:
        """Whether it is shown, or its user says, that one model has all."""
        return len(self.shares) <= 1 and not self.unattached and not self.reasons


@dataclass(kw_only=True, eq=False)
class _Learner:
    """A model of one session in one lineage: the records that count, and what it looked like."""

    place: int  # of the session's log
    name: str
    records: Intervals
    last: int  # the line that settled the last of these records
    seen: list[Seen] = field(default_factory=list)
    doubts: list[Seen] = field(default_factory=list)  # samples of when something spoke against one model

    @property
    def word(self) -> str:
        return self.seen[-1].word if self.seen else ""

    @property
    def began(self) -> Seen:
        """What it looked like before its first step."""
        return _as_it_began(self.seen)

    @cached_property
    def by_steps(self) -> dict[int, Seen]:
        """The last sample at each number of steps."""
        return {seen.steps: seen for seen in self.seen}

    @cached_property
    def moved(self) -> Set[int]:
        """The numbers of steps after which it was not what it began as."""
        return {steps for steps, seen in self.by_steps.items() if is_copy(seen, self.began) is False}

    @cached_property
    def shards(self) -> dict[int, int]:
        """By the number of steps, the places that its shard has, as bits."""
        return {
            steps: int.from_bytes(np.packbits(~np.isnan(seen.places)).tobytes())
            for steps, seen in self.by_steps.items()
        }

    def shares(self, other: _Learner, steps: int) -> bool:
        """Whether both have a value of one place, or are no shards of one model."""
        mine, its = self.by_steps[steps], other.by_steps[steps]
        comparable = mine.shape != its.shape or not mine.shape
        return comparable or bool(self.shards[steps] & other.shards[steps])


Values = npt.NDArray[np.float32] | npt.NDArray[np.float64]
_Group = list[_Learner]  # of one lineage, with one model


def models_of(parts: Sequence[tuple[DatasetHistory, Part]]) -> Models:
    """Return the models of a job, of whose lineages, each with its data's history, the final comes first."""
    reasons: list[str] = []
    perhaps_trained: list[str] = []
    chains: list[_Group] = []  # groups of several lineages that have one model
    base: _Group | None = None  # the chain whose model was saved with the token that the next part began from
    taken: list[_Learner] = []  # who saved it
    learners: list[_Learner] = []
    unattached = restores = compared = unseen = 0
    for (history, part), later in zip(reversed(parts), [*reversed(parts[:-1]), None], strict=True):
        digest = "" if later is None else token_digest(saved_with(later[1].lineage.token or ""))
        here = list(_learners(history, part, digest))
        learners += here
        unattached += sum(_unattached(part, learner) for learner in here)
        unseen += part.ways.get(Evidence.UNSEEN, 0)
        groups = _groups([learner for learner in here if learner.seen])
        compared += sum(len(group) > 1 for group in groups)
        if len(groups) > 1:
            reasons.append(_parted(part, groups))
        # All began with the parameters that were saved with the token, or so their user says.
        goes_on = [
            bool(part.begun) and base is not None and all(one.word or _loaded(one, taken) for one in group)
            for group in groups
        ]
        restores += any(goes_on)
        if part.begun and groups and not unattached:
            if base is None and not reasons:
                reasons.append(_unsaved(part))
            elif base is not None and not all(goes_on):
                reasons.append(_not_loaded(part, groups[goes_on.index(False)]))
        if not part.begun:
            for one, learnt in _had_learnt(history, part, here):
                if learnt:
                    reasons.append(_not_anew(history, one))
                elif learnt is None:
                    perhaps_trained.append(one.name)
        for group, tied in zip(groups, goes_on, strict=True):
            if tied and len(groups) == 1 and base is not None:
                base += group
            else:
                chains.append(list(group))
        took = {one.place for one in history.taken.get(digest, ()) if one.key == part.lineage.key}
        taken = [learner for learner in here if learner.seen and learner.place in took]
        base = next((chain for chain in chains if taken and all(one in chain for one in taken)), None)
    unsaid = [learner for learner in learners if learner.seen and not learner.word]
    reasons += (*_went_back(unsaid), *_changed(unsaid), *_doubted(learners))
    if unseen:
        reasons.append(_UNSEEN.format(unseen))
    return Models(
        shares=tuple(share for share in map(_share, chains) if share.records),
        unattached=unattached,
        reasons=tuple(reasons),
        shown=tuple(_shown(learners, compared, restores)),
        perhaps_trained=tuple(perhaps_trained),
    )


# Who learnt what ----------------------------------------------------------------------------------------


def _learners(history: DatasetHistory, part: Part, digest: str) -> Iterator[_Learner]:
    """Yield the models of each session that has records which count, or took the token that ended it.

    Where no records were left, as after a token of the end: of those that went on from there.
    """
    lineage, own = part.lineage, part.own - part.quarantined
    told = lineage.acknowledged.at(lineage.acknowledged.answers != Answer.REFUSED)
    told = told.at(_meets(told, own))
    taken = [one for one in history.taken.get(digest, ()) if one.key == lineage.key]
    places = {*np.unique(told.who).tolist(), *(one.place for one in taken)}
    for place in sorted(places or (lineage.seen if part.begun else ())):
        rows = told.at(told.who == place)
        left = max((one.snapshot.line for one in taken if one.place == place), default=None)
        looked = [one for one in lineage.seen.get(place, ()) if left is None or one.line <= left]
        seen = [one for one in looked if one.at not in _DOUBTS]
        firsts = {
            number: next(s.line for s in seen if s.number == number) for number in {s.number for s in seen}
        }
        lines = [firsts[number] for number in sorted(firsts)][1:]  # from which another model was trained
        of = np.searchsorted(np.array(lines, dtype=np.int64), rows.settled, side="right")
        for order, number in enumerate(sorted(firsts) or [0]):
            mine = rows.at(of == order)
            yield _Learner(
                place=place,
                name=_name(history, place),
                records=records_of(mine) & own,
                last=int(mine.settled.max(initial=-1)),
                seen=[one for one in seen if one.number == number],
                doubts=[one for one in looked if one.number == number and one.at in _DOUBTS],
            )


def _meets(reports: Reports, records: Intervals) -> npt.NDArray[np.bool_]:
    """Return which reports have some of these records."""
    if not records:
        return np.zeros(len(reports), dtype=np.bool_)
    after = np.searchsorted(records.ends, reports.starts, side="right")
    found = records.starts[np.minimum(after, len(records.starts) - 1)] < reports.ends
    return found & (after < len(records.starts))


def _unattached(part: Part, learner: _Learner) -> int:
    """Return the records that no step of an attached optimizer with parameters shows."""
    if not learner.seen:
        return learner.records.count
    told = part.lineage.acknowledged
    asked = told.at(
        (told.who == learner.place) & np.isin(told.ways, (Evidence.NEXT, Evidence.TOKEN, Evidence.REPORT))
    )
    return (records_of(asked) & learner.records).count


def _groups(learners: Sequence[_Learner]) -> list[_Group]:
    """Return the learners of one lineage, those with one model together."""
    groups: list[_Group] = []
    firsts: list[dict[tuple[str, int], _Learner]] = []  # of each group, the first with each shard
    for learner in learners:
        # Of shards the first may be another than this one, and say nothing of it.
        began = learner.began
        shard = (began.shape, learner.shards[began.steps]) if began.sharded else ("", 0)
        for group, first in zip(groups, firsts, strict=True):
            others = first.values() if began.sharded else group[:1]
            if all(_is_one(one, learner) for one in others):
                group.append(learner)
                first.setdefault(shard, learner)
                break
        else:
            groups.append([learner])
            firsts.append({shard: learner})
    learnt = [group for group in groups if any(one.records for one in group)]
    return learnt or groups


# What is one model --------------------------------------------------------------------------------------


def _is_one(one: _Learner, other: _Learner) -> bool:
    """Whether two sessions of one lineage trained one model."""
    if one.word and other.word:
        return True
    if one.place == other.place:
        return False
    mine, its = one.by_steps, other.by_steps
    agreed = covered = False
    for steps in mine.keys() & its.keys():
        same = are_replicas(mine[steps], its[steps], one.began) if one.shares(other, steps) else None
        if same is False:
            return False
        agreed = agreed or same is True
        covered = covered or (
            mine[steps].line >= one.last and its[steps].line >= other.last and steps in one.moved
        )
    both_sharded = one.began.sharded and other.began.sharded
    untrained = not (one.records or other.records)  # they have what they loaded
    return (covered or untrained) and (agreed or both_sharded)


def _loaded(learner: _Learner, taken: Sequence[_Learner]) -> bool:
    """Whether a learner began with what one of these had when it took the token.

    Other weights may have been in place just then, as averaged ones are for an evaluation: these are not the
    model. Parameters may be added between the restore and the first step.
    """
    for one in taken:
        tokens = (seen.steps for seen in reversed(one.seen) if seen.at in ("token", "swapped"))
        steps = next(tokens, None)
        for saved in (seen for seen in one.seen if seen.steps == steps and seen.at != "swapped"):
            began = [seen for seen in learner.seen if not seen.steps and seen.shape == saved.shape]
            if began and is_copy(began[-1], saved):
                return True
    return False


def _had_learnt(
    history: DatasetHistory, part: Part, learners: Sequence[_Learner]
) -> Iterator[tuple[_Learner, bool | None]]:
    """Yield the models that began at the beginning of the data, and whether they had learnt before.

    That is so where one began with what another lineage had trained, on whichever data: those may share
    records with these, as where one was added, or the order changed. It is not where it began as all models
    of a run did that may have been the first, and where there was no run before; None: nothing tells.
    """
    lineages: defaultdict[Key, list[tuple[int, Chapter]]] = defaultdict(list)
    for place, _, chapter in history.runs.chapters:
        lineages[chapter.ledger, chapter.lineage].append((place, chapter))
    own = part.lineage.key
    trained = [seen for key in lineages if key != own for seen in _trained(lineages[key])]
    before = [
        key
        for key, chapters in lineages.items()
        if _is_before(history, key, own) and any(_trains(chapter) for _, chapter in chapters)
    ]
    first = [key for key in before if not any(_is_before(history, other, key) for other in before)]
    firsts = [[_as_it_began(c.seen) for _, c in lineages[key] if c.seen] for key in first]
    for one in learners:
        if one.seen and not one.word:
            learnt: bool | None = any(is_copy(one.began, seen) for seen in trained)
            if not learnt and firsts:
                is_new = any(run and all(is_copy(one.began, seen) for seen in run) for run in firsts)
                learnt = False if is_new else None
            yield one, learnt


def _trained(chapters: Sequence[tuple[int, Chapter]]) -> Iterator[Seen]:
    """Yield the samples in a lineage that differ from the first of their session."""
    sessions: defaultdict[int, list[Seen]] = defaultdict(list)
    for place, chapter in chapters:
        sessions[place] += chapter.seen
    for samples in sessions.values():
        yield from (seen for seen in samples if seen.steps and not is_copy(seen, samples[0]))


def _trains(chapter: Chapter) -> bool:
    stepped = any(seen.steps for seen in chapter.seen)
    acknowledged = bool((chapter.runs.kinds == Kind.ACKNOWLEDGED).any())
    return chapter.dataset.task_type is TaskType.TRAINING and (stepped or acknowledged)


def _is_before(history: DatasetHistory, one: Key, other: Key) -> bool:
    """Whether a lineage came before another, as far as tokens and sessions tell."""
    earlier = history.runs.earlier
    if one[0] == other[0]:
        return one[1] < other[1]
    return one[0] in earlier[other[0]] and other[0] not in earlier[one[0]]


def _as_it_began(samples: Sequence[Seen]) -> Seen:
    """Return the sample of before the first step: what was loaded by then is in it."""
    return [samples[0], *(seen for seen in samples if not seen.steps)][-1]


@np.errstate(over="ignore")  # where a sum was infinite
def is_copy(one: Seen, other: Seen) -> bool | None:
    """Whether two samples are of the same parameters, to the bit of the coarser dtype.

    None where they have no place in common: they are of different shards.
    """
    if one.shape != other.shape or not one.shape:
        return None if one.sharded and other.sharded else False
    here = ~(np.isnan(one.places) | np.isnan(other.places))
    if not here.any():
        return None
    mine, its = (seen.places[here].astype(np.float64) for seen in (one, other))
    if one.eps != other.eps:
        return bool((np.abs(mine - its) <= max(one.eps, other.eps) * np.abs(mine)).all())
    adding = _ADDING * (np.abs(one.totals) + np.abs(other.totals))
    return bool((mine == its).all() and (np.abs(one.totals - other.totals) <= adding).all())


def are_replicas(one: Seen, other: Seen, before: Seen) -> bool | None:
    """Whether two samples are of replicas of one model; `before` is one of before it moved.

    None where they have no place in common.
    """
    same = is_copy(one, other)
    if same is not False or one.processor == other.processor or not one.shape == other.shape == before.shape:
        return same
    rounding = max(ROUNDING, 2 * one.eps, 2 * other.eps)
    return _is_near(one.places, other.places, before.places, rounding) and _is_near(
        one.totals, other.totals, before.totals, rounding
    )


@np.errstate(over="ignore")
def _is_near(one: Values, other: Values, before: Values, rounding: float) -> bool:
    here = ~(np.isnan(one) | np.isnan(other) | np.isnan(before))
    mine, its, was = (values[here].astype(np.float64) for values in (one, other, before))
    moved = np.abs(mine - was)
    allowed = np.minimum(rounding * (np.abs(mine) + np.abs(its) + moved), OF_MOVE * moved)
    return bool((np.abs(mine - its) <= allowed).all())


def _went_back(learners: Sequence[_Learner]) -> Iterator[str]:
    """Yield whose parameters became what they had been some steps before, though the data went on."""
    for learner in learners:
        known: dict[bytes, int] = {}  # the steps when they were so
        before = b""
        for seen in learner.seen:
            looks = seen.values + seen.sums
            went_back = looks != before and known.get(looks, seen.steps) < seen.steps
            if went_back and len(seen.places) >= _TELLING:
                yield (
                    f"the model of {learner.name} was, after {seen.steps} step(s), again what it "
                    f"had been before, and its data did not go back: loader.load_state_dict(…) with each "
                    f"model.load_state_dict(…)"
                )
                break
            if seen.at != "restored":  # another model may be loaded after the data
                known[looks] = seen.steps
            before = looks


def _changed(learners: Sequence[_Learner]) -> Iterator[str]:
    """Yield whose parameters were written between two passes, by what is no step.

    With a token the loop may have other weights in place, as averaged ones, and just after a step it may not
    have bounded them yet.
    """
    for learner in learners:
        first: dict[int, Seen] = {}
        last: dict[int, Seen] = {}
        for seen in learner.seen:
            if seen.shape and seen.steps and seen.at in ("begin", "end"):
                first.setdefault(seen.steps, seen)
                last[seen.steps] = seen
        changed = (n for n, one in first.items() if one.shape == last[n].shape and not is_copy(one, last[n]))
        if (steps := next(changed, None)) is not None:
            yield (
                f"the model of {learner.name} was changed after {steps} step(s), by what is no step of an "
                f"attached optimizer: loader.load_state_dict(…) with each model.load_state_dict(…), or, "
                f"where nothing learnt is lost: {_WORD}"
            )


def _doubted(learners: Sequence[_Learner]) -> Iterator[str]:
    """Yield what trained or wrote parameters beside the steps of attached optimizers. A user's word is on why
    models differ, and not on gradients."""
    for learner in learners:
        for seen in learner.doubts:
            if not learner.word or seen.at not in ("written", "unattached"):
                yield _DOUBTS[seen.at].format(learner.name, seen.steps)


# Words --------------------------------------------------------------------------------------------------


def _name(history: DatasetHistory, place: int) -> str:
    name = history.trainers[place]
    same = history.trainers.count(name) > 1
    return f"{name} (session {history.sessions[place][:8]})" if same else name


def _share(group: _Group) -> Share:
    learnt = [learner for learner in group if learner.records]
    names = dict.fromkeys(learner.name for learner in learnt)
    return Share(trainers=tuple(names), records=sum(learner.records.count for learner in learnt))


def _parted(part: Part, groups: Sequence[_Group]) -> str:
    places = [{learner.place for learner in group} for group in groups]
    lineage = f"lineage {part.lineage.key[1]}"
    if len(set().union(*places)) < sum(map(len, places)):
        return (
            f"a trainer of {lineage} trained one model, and then another: keep one model, and its optimizers "
            f"attached, or begin the data anew with it: loader.load_state_dict(None)"
        )
    return (
        f"nothing shows that the trainers of {lineage} had one model: their parameters differed, or one "
        f"ended before they were compared. For one model: {_DDP}. Where models are averaged: {_WORD}"
    )


def _not_loaded(part: Part, group: _Group) -> str:
    return (
        f"lineage {part.lineage.key[1]} began from a token, and the model of {group[0].name} was "
        f"not the one that was saved with it: model.load_state_dict(…) before the first step, or, where a "
        f"part of it was loaded: {_WORD}"
    )


def _not_anew(history: DatasetHistory, learner: _Learner) -> str:
    places = len(learner.began.places)
    few = f" (all {places} of its values are equal; of so few that may be chance)"
    return (
        f"{learner.name} began at the beginning of the data with a model that had learnt from them before, "
        f"or from others called {history.spec.name!r}{few if places < _TELLING else ''}: "
        f"loader.load_state_dict(…) with each model.load_state_dict(…), or another audit_dir for another job"
    )


def _unsaved(part: Part) -> str:
    return (
        f"lineage {part.lineage.key[1]} began from a token that was taken where no model was known: call "
        f"loader.state_dict() where loader.attach(optimizer) was called"
    )


def _shown(learners: Sequence[_Learner], compared: int, restores: int) -> Iterator[str]:
    words = dict.fromkeys(learner.word for learner in learners if learner.word)
    if words:
        yield f"that trainers had one model is their user's word: {'; '.join(map(repr, words))}"
    if compared and not words:
        yield "trainers' parameters were sampled, and the same after the last of their records"
    if restores and not words:
        yield f"{restores} time(s) the parameters that training went on from were those saved with the token"
    if any(seen.sharded for learner in learners for seen in learner.seen):
        yield "parameters were sharded: ranks with the same shard were compared, the others compute together"
