"""Lineages of a dataset, put together from the chapters of all logs: where each began, what it reported.

A lineage is one history of the model; `audit.verdict` decides which of its acknowledgements count.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

import numpy as np

from edl_torch.audit.intervals import Coordinates
from edl_torch.audit.log import token_digest
from edl_torch.audit.reading import Chapter, Kind, Log, Note, Reports, Seen, Snapshot
from edl_torch.core.mixture import Segments, heard_of, widened
from edl_torch.core.registration import but_looks, differences, identity
from edl_torch.core.token import Token
from edl_torch.errors import AuditError, TokenError
from edl_torch.fingerprint import known_by, weakest
from edl_torch.shard import DatasetSpec, MixtureSegment

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
    looks: list[tuple[str, str]]  # names, '' for all, and fingerprints of its trainers' data, as they came

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
    alike: Set[str] = frozenset()  # ledgers of which all that has outcomes is in these lineages
    runs: Runs  # all under that name

    def of(self, token: Token) -> DatasetHistory:
        """Return the history of other data, which a token is of. Raises AuditError where no log has any."""
        ledgers = {
            chapter.ledger
            for _, _, chapter in self.runs.chapters
            if chapter.dataset.task_type is self.spec.task_type
            and not differences(identity(chapter.dataset), token.identity)
        }
        if not ledgers:
            raise AuditError(
                f"dataset {self.spec.name!r} had other data before, and no log is of those: give the audit "
                f"directories of all earlier runs of the job too"
            )
        return replace(self.runs.history(ledgers & self.runs.used or ledgers), unordered=())


@dataclass(frozen=True, slots=True)
class Runs:
    """All that lies in the logs under one name, of unlike data, settings and tasks too.

    A ledger that went on from a token has the data of the ledger in which that was taken, as the master saw
    to, whatever the sessions of either say of them; but for a token that was made for other data.
    """

    chapters: list[_Placed]
    sessions: list[str]  # of all logs, by place
    earlier: Mapping[str, Set[str]]  # the ledgers that came before each
    origins: Mapping[str, Set[str]]  # those that each went on from, by tokens, and those before them
    tied: Mapping[str, Set[str]]  # of those the ones of the same data

    @property
    def used(self) -> set[str]:
        """Ledgers that went on from a token, or in which something was learnt."""
        return {chapter.ledger for _, _, chapter in self.chapters if _is_used(chapter)}

    def learnt(self, ledger: str) -> int:
        """Return how many records its trainers reported."""
        chapters = [chapter for _, _, chapter in self.chapters if chapter.ledger == ledger]
        return sum(c.runs.at(c.runs.kinds <= Kind.QUARANTINED).records for c in chapters)

    def history(self, ledgers: Set[str], last: str | None = None) -> DatasetHistory:
        """Return the history of the last of `ledgers`, or of `last`, which somebody knows to be it."""
        known = last if last in self.earlier else None
        perhaps_last = [known] if known is not None else self._last(ledgers)
        # Where several may be the last, that is named; one that a clock says is the last is as good as any.
        began = {one: min(c.began for _, _, c in self.chapters if c.ledger == one) for one in perhaps_last}
        found = _history(self, max(perhaps_last, key=began.__getitem__))
        unordered = [] if known is not None else self._last(ledgers & found.alike)
        return replace(found, unordered=tuple(unordered if len(unordered) > 1 else ()))

    def _last(self, ledgers: Set[str]) -> list[str]:
        """Those that none of the others is later than; where there is none, the last of all that began."""
        earlier = self.earlier
        followed = {one for name in ledgers for one in earlier[name] if name not in earlier[one]}
        return sorted(ledgers - followed) or _by_age(earlier)[-1:]


def runs_of(logs: Sequence[Log], came: Sequence[Sequence[str]] = ()) -> dict[str, Runs]:
    """Return what lies in the logs by dataset; `came` are runs of ledgers' ids as they came."""
    datasets: defaultdict[str, list[_Placed]] = defaultdict(list)
    for place, log in enumerate(logs):
        for chapter in log.chapters:
            datasets[chapter.dataset.name].append((place, log, chapter))
    if not datasets:
        raise AuditError(
            "the audit logs are of trainers that never joined a dataset: there is nothing to audit"
        )
    sessions = [log.session for log in logs]
    return {name: _runs(every, sessions, came) for name, every in sorted(datasets.items())}


def _runs(chapters: list[_Placed], sessions: list[str], came: Sequence[Sequence[str]]) -> Runs:
    taken: defaultdict[str, set[str]] = defaultdict(set)
    for _, _, chapter in chapters:
        for snapshot in chapter.snapshots:
            taken[snapshot.token].add(snapshot.ledger)
    origins: dict[str, set[str]] = {chapter.ledger: set() for _, _, chapter in chapters}
    tied: dict[str, set[str]] = {name: set() for name in origins}
    for _, _, chapter in chapters:
        if chapter.token is not None:
            text = saved_with(chapter.token)
            of_it = taken[token_digest(text)] & origins.keys()
            origins[chapter.ledger] |= of_it
            if text == chapter.token:
                tied[chapter.ledger] |= of_it
    earlier = _earlier(chapters, came, origins)
    return Runs(chapters, sessions, earlier, _all_before(origins), _all_before(tied))


def _is_used(chapter: Chapter) -> bool:
    return chapter.token is not None or bool((chapter.runs.kinds <= Kind.QUARANTINED).any())


def _history(runs: Runs, ledger: str) -> DatasetHistory:
    sessions, order, used = runs.sessions, _by_age(runs.earlier), runs.used
    # What is nearest to the ledger says of components that have left what they were.
    near = {name: (name in runs.earlier[ledger]) + 2 * (name == ledger) for name in order}
    chapters = sorted(runs.chapters, key=lambda placed: near[placed[2].ledger])
    newest = max((c for _, _, c in chapters if c.ledger == ledger), key=lambda c: (c.lineage, c.member))
    spec = newest.dataset
    # Of a mixture: components that have left are what they were before.
    whole = {one.name: one for _, _, c in chapters for one in c.dataset.components if not one.left}
    data = tuple(whole.get(one.name, one) if one.left else one for one in spec.components)
    # A ledger of other data under the same name shares no record with the final one.
    final_identity = identity(replace(spec, components=data))
    same, others = [], set()
    for placed in runs.chapters:
        if _agrees(placed, final_identity, newest, runs.tied[ledger] | {ledger}):
            same.append(placed)
        elif _is_used(placed[2]):
            others.add(placed[2].ledger)
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
    lines: dict[str, Coordinates] = {}
    for name, _ in lineages:  # a later trainer of a job may have given other epochs; 0 is endless
        said = {chapter.dataset.num_epochs for _, _, chapter in same if chapter.ledger == name}
        lines[name] = Coordinates(replace(longest, num_epochs=0 if 0 in said else max(said)))
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
            key: _lineage(key, parts, lines[key[0]], order.index(key[0])) for key, parts in lineages.items()
        },
        final=(ledger, newest.lineage),
        taken=taken,
        trainers=trainers,
        sessions=sessions,
        known_by=weakest([*of_each.values(), *own]) if of_each else known_by(prints, own),
        components_known_by=of_each,
        untouched=tuple(name for name in order if name not in used | {ledger}),
        alike={placed[2].ledger for placed in same} - others,
        runs=runs,
    )


def _earlier(
    chapters: list[_Placed], came: Sequence[Sequence[str]], origins: Mapping[str, Set[str]]
) -> dict[str, set[str]]:
    """Return the ledgers that came before each.

    One is later than another where a session came to it from that, where its trainers came later to a folder
    of logs, or, if nothing of this says otherwise, where it began from a token of that, which others may have
    taken since, at the same position. No clock is asked: those of several machines differ.
    """
    before: dict[str, set[str]] = {name: set() for name in origins}
    came_from: dict[int, str] = {}
    for place, _, chapter in chapters:
        before[chapter.ledger].add(came_from.get(place, chapter.ledger))
        came_from[place] = chapter.ledger
    for run in came:
        for one, later in itertools.pairwise(name for name in run if name in before):
            before[later].add(one)
    earlier = _all_before(before)
    for name, found in origins.items():
        before[name] |= {one for one in found if name not in earlier[one]}
    return _all_before(before)


def _by_age(earlier: Mapping[str, Set[str]]) -> list[str]:
    """The ledgers, the oldest first."""
    return sorted(earlier, key=lambda name: (len(earlier[name]), name))


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


def _agrees(placed: _Placed, final: Mapping[str, object], newest: Chapter, tied: Set[str]) -> bool:
    """Whether a chapter is of the task, data and settings of the final ledger, whose `newest` is given; those
    of ledgers that are `tied` are, or damaged."""
    _, log, chapter = placed
    there = [component for component in chapter.dataset.components if not component.left]
    own = identity(replace(chapter.dataset, components=tuple(there)) if there else chapter.dataset)
    if chapter.ledger != newest.ledger and chapter.dataset.task_type is not newest.dataset.task_type:
        return False
    is_tied = chapter.ledger in tied
    compared = (but_looks(final), but_looks(own)) if is_tied else (final, own)
    differing = differences(*compared, asked_is_older=True, may_change=True)
    if differing and is_tied:
        raise AuditError(
            f"{str(log.path)!r} describes dataset {chapter.dataset.name!r} of ledger {chapter.ledger} "
            f"otherwise than the other logs: {'; '.join(differing)}"
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
        looks=_looks(placed),
    )


def _looks(placed: Iterable[_Placed]) -> list[tuple[str, str]]:
    """Names of components, '' for the whole, and fingerprints, in the order in which sessions came."""
    chapters = sorted((chapter for _, _, chapter in placed), key=lambda chapter: chapter.member)
    specs = [chapter.dataset for chapter in chapters]
    each = [
        [("", spec.fingerprint), *((one.name, one.fingerprint) for one in spec.components)] for spec in specs
    ]
    return list(dict.fromkeys(look for looks in each for look in looks if look[1]))


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
