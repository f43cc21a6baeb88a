"""Lineages of a dataset, put together from the chapters of all logs: where each began, what it reported.

A lineage is one history of the model; `audit.verdict` decides which of its acknowledgements count.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from edl_torch.audit.intervals import Coordinates
from edl_torch.audit.log import token_digest
from edl_torch.audit.reading import Chapter, Kind, Log, Note, Reports, Seen, Snapshot
from edl_torch.core.mixture import Segments, heard_of, widened
from edl_torch.core.registration import differences, identity
from edl_torch.core.token import Token
from edl_torch.errors import AuditError, TokenError
from edl_torch.fingerprint import known_by, weakest
from edl_torch.shard import Component, DatasetSpec, MixtureSegment

Key = tuple[str, int]  # ledger id, number of the lineage
_Placed = tuple[int, Log, Chapter]  # the place of the log


@dataclass(slots=True, kw_only=True)
class Lineage:
    """All that was told of one lineage, by whatever trainer."""

    key: Key
    told: Mapping[Kind, Reports]
    notes: list[tuple[int, Note]]  # with the place of the log
    batch_size: int  # the largest of its trainers
    restored: bool = False
    token: str | None = None
    before: int = 0
    age: int = 0  # of its ledger among all, 0 for the oldest, as far as tokens and sessions tell
    seen: dict[int, list[Seen]] = field(default_factory=dict)  # samples of each session's model, by its place
    segments: tuple[MixtureSegment, ...] = ()  # of a mixture: all that its trainers have heard of

    @property
    def acknowledged(self) -> Reports:
        """Acknowledgements, without what the same lease put into quarantine."""
        return self.told[Kind.ACKNOWLEDGED]

    @property
    def quarantined(self) -> Reports:
        """Reports of bad records."""
        return self.told[Kind.QUARANTINED]

    @property
    def outcomes(self) -> Reports:
        """Both."""
        return Reports.join([self.acknowledged, self.quarantined])

    def __repr__(self) -> str:
        return f"<Lineage {self.key} acknowledged={self.acknowledged.records}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """Token that a session took: the place of its log, and what that says of it."""

    place: int
    snapshot: Snapshot

    @property
    def key(self) -> Key:
        """Lineage in which it was taken."""
        return self.snapshot.ledger, self.snapshot.lineage


@dataclass(slots=True, kw_only=True)
class DatasetHistory:
    """All lineages of a dataset, and the last of them."""

    spec: DatasetSpec
    coordinates: Coordinates
    lineages: dict[Key, Lineage]
    final: Key
    taken: Mapping[str, Sequence[Taken]]  # by a token's digest
    trainers: list[str]  # worker ids by place of the log; '' for logs of other datasets
    sessions: list[str]  # of all logs, by place
    known_by: str = "none"  # strength of the fingerprints of its sessions' data
    components_known_by: Mapping[str, str] = field(default_factory=dict)  # the same of a mixture's, by name
    unordered: tuple[str, ...] = ()  # ledgers that may be the last one, where nothing tells which is
    untouched: tuple[str, ...] = ()  # ledgers that began with nothing, and in which nothing was learnt
    beside: tuple[str, ...] = ()  # ledgers of other data or settings under its name, judged for themselves
    chapters: list[_Placed] = field(default_factory=list)  # of that name, of other data or settings too

    def of(self, token: Token) -> DatasetHistory:
        """Return the history of other data, which a token is of. Raises AuditError where no log has any."""
        same = [c for c in self.chapters if not differences(identity(c[2].dataset), token.identity)]
        if not same:
            raise AuditError(
                f"dataset {self.spec.name!r} had other data before, and no log is of those: give the audit "
                f"directories of all earlier runs of the job too"
            )
        return replace(_history(same, self.sessions, None, ()), unordered=(), chapters=self.chapters)


def histories(
    logs: Sequence[Log], last: Mapping[str, str | None], came: Sequence[Sequence[str]] = ()
) -> list[DatasetHistory]:
    """Return the histories of each dataset, by name; `last` has the id of its last ledger, where one knows.

    A name has more than one where unlike data were learnt under it. `came` are runs of ledgers' ids in the
    order of their coming. Raises AuditError when logs contradict each other.
    """
    datasets: defaultdict[str, list[_Placed]] = defaultdict(list)
    for place, log in enumerate(logs):
        for chapter in log.chapters:
            datasets[chapter.dataset.name].append((place, log, chapter))
    if not datasets:
        raise AuditError(
            "the audit logs are of trainers that never joined a dataset: there is nothing to audit"
        )
    sessions = [log.session for log in logs]
    found: list[DatasetHistory] = []
    for name in sorted(datasets):
        every = datasets[name]
        jobs, idle = _apart(every)
        for job in jobs:
            chapters = [placed for placed in every if placed[2].ledger in job | idle]
            history = _history(chapters, sessions, last.get(name), came)
            others = sorted(set().union(*jobs) - job)
            found.append(replace(history, beside=tuple(others), chapters=every))
    return found


def _apart(chapters: list[_Placed]) -> tuple[list[set[str]], set[str]]:
    """Return the ledgers of each job under one name, and those of no job.

    Ledgers are of one job if their data, settings and task are alike, or one left the other's data on
    purpose. Those in which nothing was learnt are of none, while there are others.
    """
    identities: defaultdict[str, list[Mapping[str, object]]] = defaultdict(list)
    for _, _, chapter in chapters:
        found: list[Mapping[str, object]] = []
        found.append(identity(replace(chapter.dataset, components=_data_of(chapter.dataset, chapters))))
        with suppress(TokenError):  # which the chain says
            found.append(Token.decode(saved_with(chapter.token or "")).identity)
        known, kind = identities[chapter.ledger], {"task_type": chapter.dataset.task_type}
        known += [one for each in found if (one := {**each, **kind}) not in known]
    tied: list[tuple[set[str], list[Mapping[str, object]]]] = []
    for ledger, mine in identities.items():
        job, others = ({ledger}, mine), tied
        tied = []
        for ledgers, known in others:
            if any(_alike(one, other) for one in known for other in mine):
                job[0].update(ledgers)
                mine += [one for one in known if one not in mine]
            else:
                tied.append((ledgers, known))
        tied.append(job)
    jobs = [ledgers for ledgers, _ in tied]
    used = {chapter.ledger for _, _, chapter in chapters if _is_used(chapter)}
    learnt = [job for job in jobs if job & used]
    return (learnt, identities.keys() - set().union(*learnt)) if learnt else ([set(identities)], set())


def _alike(one: Mapping[str, object], other: Mapping[str, object]) -> bool:
    """Whether two identities are of the same data and settings; of mixtures either may be the older."""
    return not all(
        differences(*pair, asked_is_older=True, may_change=True) for pair in ((one, other), (other, one))
    )


def _is_used(chapter: Chapter) -> bool:
    return chapter.token is not None or bool((chapter.runs.kinds <= Kind.QUARANTINED).any())


def _history(
    chapters: list[_Placed], sessions: list[str], last: str | None, came: Sequence[Sequence[str]]
) -> DatasetHistory:
    ledgers, perhaps_last, untouched = _ordered(chapters, came)
    if last in ledgers:
        perhaps_last = [last]
    # Where several may be the last, that is named, and one that a clock says is the last is as good as any.
    ledger = max(perhaps_last, key=lambda name: min(c.began for _, _, c in chapters if c.ledger == name))
    newest = max((c for _, _, c in chapters if c.ledger == ledger), key=lambda c: (c.lineage, c.member))
    spec, data = newest.dataset, _data_of(newest.dataset, chapters)
    # A ledger of other data under the same name shares no record with the final one.
    same = [placed for placed in chapters if _agrees(placed, replace(spec, components=data), ledger)]
    if spec.components:
        final = [
            placed for placed in same if (placed[2].ledger, placed[2].lineage) == (ledger, newest.lineage)
        ]
        spec = heard_of(spec, _segments(final, spec))
    coordinates = Coordinates(replace(spec, components=data))
    lineages: defaultdict[Key, list[_Placed]] = defaultdict(list)
    for placed in same:
        lineages[placed[2].ledger, placed[2].lineage].append(placed)
    taken: defaultdict[str, list[Taken]] = defaultdict(list)
    for place, _, chapter in same:
        for snapshot in chapter.snapshots:
            taken[snapshot.token].append(Taken(place=place, snapshot=snapshot))
    longest = spec
    if spec.stops:  # one that was left may have had other weights, and ended later
        longest = max(
            (heard_of(spec, _segments(parts, spec)) for parts in lineages.values()), key=lambda one: one.size
        )
    longest = replace(longest, components=data)
    lines = {name: Coordinates(replace(longest, num_epochs=_most_epochs(same, name))) for name, _ in lineages}
    trainers = [""] * len(sessions)
    for place, log, _ in same:
        trainers[place] = log.worker_id or log.session
    own, prints = {c.known_by for _, _, c in same}, {c.dataset.fingerprint for _, _, c in same}
    parts = [one for _, _, c in same for one in c.dataset.components if not one.left]
    of_each = {
        one.name: known_by({part.fingerprint for part in parts if part.name == one.name})
        for one in spec.components
    }
    return DatasetHistory(
        spec=spec,
        coordinates=coordinates,
        lineages={
            key: _lineage(key, parts, lines[key[0]], ledgers.index(key[0])) for key, parts in lineages.items()
        },
        final=(ledger, newest.lineage),
        taken=taken,
        trainers=trainers,
        sessions=sessions,
        known_by=weakest([*of_each.values(), *own]) if of_each else known_by(prints, own),
        components_known_by=of_each,
        unordered=tuple(perhaps_last if len(perhaps_last) > 1 else ()),
        untouched=tuple(name for name in untouched if name != ledger),
        chapters=chapters,
    )


def _data_of(spec: DatasetSpec, chapters: list[_Placed]) -> tuple[Component, ...]:
    """The components of a mixture, of which those that have left are what they were before."""
    whole = {
        one.name: one for _, _, chapter in chapters for one in chapter.dataset.components if not one.left
    }
    return tuple(whole.get(one.name, one) if one.left else one for one in spec.components)


def _ordered(
    chapters: list[_Placed], came: Sequence[Sequence[str]]
) -> tuple[list[str], list[str], list[str]]:
    """Return the ledgers, the oldest first, those that may be the last, and those that nothing came of.

    One is later than another where a session came to it from that, where its trainers came later to a folder
    of logs, or, if nothing of this says otherwise, where it began from a token of that. No clock is asked:
    those of several machines differ. A ledger that began from no token, and in which nothing was learnt, is
    not the last while there are others: a start that found the wrong model, say, made no model.
    """
    before: dict[str, set[str]] = {chapter.ledger: set() for _, _, chapter in chapters}
    came_from: dict[int, str] = {}
    taken: defaultdict[str, set[str]] = defaultdict(set)
    for place, _, chapter in chapters:
        before[chapter.ledger].add(came_from.get(place, chapter.ledger))
        came_from[place] = chapter.ledger
        for snapshot in chapter.snapshots:
            taken[snapshot.token].add(snapshot.ledger)
    for run in came:
        for one, later in itertools.pairwise(name for name in run if name in before):
            before[later].add(one)
    earlier = _all_before(before)
    for _, _, chapter in chapters:
        if chapter.token is not None:  # which others may have taken since, at the same position
            of_it = taken[token_digest(saved_with(chapter.token))] & before.keys()
            before[chapter.ledger] |= {one for one in of_it if chapter.ledger not in earlier[one]}
    earlier = _all_before(before)
    used = {chapter.ledger for _, _, chapter in chapters if _is_used(chapter)}
    order = sorted(earlier, key=lambda name: (len(earlier[name]), name))
    followed = {one for name in used for one in earlier[name] if name not in earlier[one]}
    last = [name for name in order if name in used and name not in followed]
    return order, last or order[-1:], [name for name in order if name not in used]


def saved_with(text: str) -> str:
    """Return the token that was saved with the model that a lineage began with, maybe of other data."""
    try:
        return Token.decode(text).before or text
    except TokenError:  # which the chain says
        return text


def _all_before(before: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Return what came before each, and not only just before it."""
    found: dict[str, set[str]] = {}
    for name in before:
        reached: set[str] = set()
        ahead = [name]
        while ahead:
            new = before[ahead.pop()] - reached
            reached |= new
            ahead += new
        found[name] = reached - {name}
    return found


def _most_epochs(chapters: list[_Placed], ledger: str) -> int:
    """Return the epochs of a ledger's job, 0 for endless; a later trainer may have given another."""
    said = {chapter.dataset.num_epochs for _, _, chapter in chapters if chapter.ledger == ledger}
    return 0 if 0 in said else max(said)


def _agrees(placed: _Placed, spec: DatasetSpec, ledger: str) -> bool:
    _, log, chapter = placed
    there = [component for component in chapter.dataset.components if not component.left]
    own = identity(replace(chapter.dataset, components=tuple(there)) if there else chapter.dataset)
    differing = differences(identity(spec), own, asked_is_older=True, may_change=True)
    if differing and chapter.ledger == ledger:
        raise AuditError(
            f"{str(log.path)!r} describes dataset {spec.name!r} of ledger {ledger} otherwise than "
            f"the other logs: {'; '.join(differing)}"
        )
    return not differing


def _lineage(key: Key, placed: list[_Placed], coordinates: Coordinates, age: int) -> Lineage:
    opener = next((chapter for _, _, chapter in placed if chapter.opened), None)
    told = Reports.join([_numbered(one, coordinates) for one in placed])
    return Lineage(
        key=key,
        told={kind: told.of(kind) for kind in Kind},
        notes=[(place, note) for place, _, chapter in placed for note in chapter.notes],
        batch_size=max(chapter.batch_size for _, _, chapter in placed),
        restored=opener is not None,
        token=None if opener is None else opener.token,
        before=0 if opener is None else opener.before,
        age=age,
        seen=_seen(placed),
        segments=_segments(placed, coordinates.plan.spec),
    )


def _segments(placed: Iterable[_Placed], spec: DatasetSpec) -> tuple[MixtureSegment, ...]:
    """The segments of a mixture that trainers have heard of, as they came one after the other."""
    wider = [component.name for component in spec.components]
    told: dict[int, MixtureSegment] = {}
    for _, _, chapter in placed:
        names = [component.name for component in chapter.dataset.components]
        known = (*chapter.dataset.segments, *chapter.segments)
        told |= {one.number: one for one in widened(known, names, wider)}
    return Segments(told[number] for number in sorted(told)).all


def _seen(placed: list[_Placed]) -> dict[int, list[Seen]]:
    found: defaultdict[int, list[Seen]] = defaultdict(list)
    for place, _, chapter in placed:
        found[place] += chapter.seen
    return {place: seen for place, seen in found.items() if seen}


def _numbered(placed: _Placed, line: Coordinates) -> Reports:
    """Return the runs of a chapter as numbers on the line. Raises AuditError for one that is not there."""
    place, log, chapter = placed
    epochs, windows, runs = chapter.epochs, chapter.windows, chapter.runs
    known = epochs < line.epochs
    base, lengths = line.windows(np.where(known, epochs, 0), windows)
    wrong = np.flatnonzero(~known | (runs.starts >= runs.ends) | (runs.ends > lengths))
    if len(wrong):
        at, num_epochs = wrong[0], line.plan.spec.num_epochs
        of_epochs = f", which has {num_epochs} epoch(s)" if epochs[at] >= num_epochs > 0 else ""
        raise AuditError(
            f"{str(log.path)!r}, line {chapter.lines[at] + 1}, is damaged: positions {runs.starts[at]} to "
            f"{runs.ends[at]} of shard {windows[at]}, epoch {epochs[at]}, are not in dataset "
            f"{line.plan.spec.name!r}{of_epochs}"
        )
    who = np.full_like(base, place)
    return replace(runs, starts=base + runs.starts, ends=base + runs.ends, who=who)
