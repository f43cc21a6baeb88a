"""Lineages of a dataset, put together from the chapters of all logs: where each began, what it reported.

A lineage is one history of the model; `audit.verdict` decides which of its acknowledgements count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from edl_torch.audit.intervals import Coordinates, Intervals, covered
from edl_torch.audit.log import ATTEMPT, EPOCH, SHARD, START, TASK, UPTO, token_digest
from edl_torch.audit.reading import Chapter, Log, Seen, Snapshot, ToldRun
from edl_torch.core.mixture import Segments, heard_of
from edl_torch.core.registration import differences, identity
from edl_torch.core.token import Token
from edl_torch.errors import AuditError, TokenError
from edl_torch.fingerprint import known_by
from edl_torch.shard import DatasetSpec, IndexArray, MixtureSegment

Key = tuple[str, int]  # ledger id, number of the lineage
_Placed = tuple[int, Log, Chapter]  # the place of the log


@dataclass(slots=True)
class Reports:
    """Runs of records that were reported, as arrays of one length.

    `who` is the place of the log, `settled` the line there that has the answer, and `ways` how it came about.
    """

    starts: IndexArray
    ends: IndexArray
    tasks: IndexArray
    attempts: IndexArray
    answers: IndexArray
    who: IndexArray
    settled: IndexArray
    ways: IndexArray

    @classmethod
    def join(cls, parts: Sequence[Reports]) -> Reports:
        """Return all of them, in order."""
        if not parts:
            return cls(*(np.empty(0, dtype=np.int64) for _ in cls.__slots__))
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in cls.__slots__))

    def __len__(self) -> int:
        return len(self.starts)

    def at(self, places: IndexArray | npt.NDArray[np.bool_]) -> Reports:
        """Return those at `places`, numbers or flags."""
        return Reports(*(getattr(self, name)[places] for name in self.__slots__))

    def answered(self, *answers: int) -> Reports:
        """Return those with one of these answers."""
        return self.at(np.isin(self.answers, answers))

    def until(self, limits: Mapping[int, int]) -> Reports:
        """Return those settled before the line that `limits` has for their log; all of other logs."""
        if not limits:
            return self
        kept = np.ones(len(self), dtype=np.bool_)
        for place, line in limits.items():
            kept &= (self.who != place) | (self.settled < line)
        return self.at(kept)

    @property
    def records(self) -> int:
        """Records reported, each as often as it was."""
        return int((self.ends - self.starts).sum())


@dataclass(slots=True, kw_only=True)
class Lineage:
    """Reports of one lineage. `acknowledged` leaves out what the same lease put into quarantine."""

    key: Key
    acknowledged: Reports
    quarantined: Reports
    repeated: Reports  # that the loop had, without an outcome from that; `answers` says why, as a `Kind`
    uncounted: list[tuple[int, int, int]]  # place of the log, line, records that were reported in vain
    padding: list[tuple[int, int, int]]  # place of the log, line, padding batches that a step used
    changed: list[tuple[int, int, str]]  # place of the log, line, what of the data
    remainders: Intervals
    batch_size: int  # the largest of its trainers
    restored: bool = False
    token: str | None = None
    before: int = 0
    age: int = 0  # of its ledger among all, 0 for the oldest, as far as tokens and sessions tell
    seen: dict[int, list[Seen]] = field(default_factory=dict)  # samples of each session's model, by its place
    segments: tuple[MixtureSegment, ...] = ()  # of a mixture: all that its trainers have heard of

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
    unordered: tuple[str, ...] = ()  # ledgers that may be the last one, where nothing tells which is
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
    """Return one history for each dataset, by name; `last` has the id of its last ledger, where one knows.

    `came` are runs of ledgers' ids in the order of their coming.
    Raises AuditError when logs contradict each other.
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
    return [_history(datasets[name], sessions, last.get(name), came) for name in sorted(datasets)]


def _history(
    chapters: list[_Placed], sessions: list[str], last: str | None, came: Sequence[Sequence[str]]
) -> DatasetHistory:
    ledgers, perhaps_last = _ordered(chapters, came)
    if last in ledgers:
        perhaps_last = [last]
    # Where several may be the last, that is named, and one that a clock says is the last is as good as any.
    ledger = max(perhaps_last, key=lambda name: min(c.began for _, _, c in chapters if c.ledger == name))
    newest = max((c for _, _, c in chapters if c.ledger == ledger), key=lambda c: (c.lineage, c.member))
    spec = newest.dataset
    # A ledger of other data under the same name shares no record with the final one.
    same = [placed for placed in chapters if _agrees(placed, spec, ledger)]
    if spec.components:
        final = [
            placed for placed in same if (placed[2].ledger, placed[2].lineage) == (ledger, newest.lineage)
        ]
        spec = heard_of(spec, _segments(final))
    coordinates = Coordinates(spec)
    lineages: defaultdict[Key, list[_Placed]] = defaultdict(list)
    for placed in same:
        lineages[placed[2].ledger, placed[2].lineage].append(placed)
    taken: defaultdict[str, list[Taken]] = defaultdict(list)
    for place, _, chapter in same:
        for snapshot in chapter.snapshots:
            taken[snapshot.digest].append(Taken(place=place, snapshot=snapshot))
    longest = spec
    if spec.stops:  # one that was left may have had other weights, and ended later
        of_each = [heard_of(spec, _segments(parts)) for parts in lineages.values()]
        longest = max(of_each, key=lambda one: one.size)
    lines = {name: Coordinates(replace(longest, num_epochs=_most_epochs(same, name))) for name, _ in lineages}
    trainers = [""] * len(sessions)
    for place, log, _ in same:
        trainers[place] = log.worker_id or log.session
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
        known_by=known_by({c.dataset.fingerprint for _, _, c in same}, {c.known_by for _, _, c in same}),
        unordered=tuple(perhaps_last if len(perhaps_last) > 1 else ()),
        chapters=chapters,
    )


def _ordered(chapters: list[_Placed], came: Sequence[Sequence[str]]) -> tuple[list[str], list[str]]:
    """Return the ledgers, the oldest first, and those of them that may be the last.

    One is later than another where a session came to it from that, where its trainers came later to a folder
    of logs, or, if nothing of this says otherwise, where it began from a token of that. No clock is asked:
    those of several machines differ. A ledger that is nobody's successor, and in which nothing was learnt, is
    not the last.
    """
    before: dict[str, set[str]] = {chapter.ledger: set() for _, _, chapter in chapters}
    came_from: dict[int, str] = {}
    taken: defaultdict[str, set[str]] = defaultdict(set)
    for place, _, chapter in chapters:
        before[chapter.ledger].add(came_from.get(place, chapter.ledger))
        came_from[place] = chapter.ledger
        for snapshot in chapter.snapshots:
            taken[snapshot.digest].add(snapshot.ledger)
    for run in came:
        for one, later in pairwise(name for name in run if name in before):
            before[later].add(one)
    earlier = _all_before(before)
    for _, _, chapter in chapters:
        if chapter.token is not None:  # which others may have taken since, at the same position
            of_it = taken[token_digest(saved_with(chapter.token))] & before.keys()
            before[chapter.ledger] |= {one for one in of_it if chapter.ledger not in earlier[one]}
    earlier = _all_before(before)
    followed = {one for name, found in earlier.items() for one in found if name not in earlier[one]}
    learnt = {chapter.ledger for _, _, chapter in chapters if len(chapter.rows) or chapter.quarantined}
    order = sorted(earlier, key=lambda name: (len(earlier[name]), name))
    last = [name for name in order if name not in followed and (name in learnt or earlier[name])]
    return order, last or order[-1:]


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
    differing = differences(identity(spec), identity(chapter.dataset))
    if differing and chapter.ledger == ledger:
        raise AuditError(
            f"{str(log.path)!r} describes dataset {spec.name!r} of ledger {ledger} otherwise than "
            f"the other logs: {'; '.join(differing)}"
        )
    return not differing


def _lineage(key: Key, placed: list[_Placed], coordinates: Coordinates, age: int) -> Lineage:
    opener = next((chapter for _, _, chapter in placed if chapter.opened), None)
    quarantined = Reports.join(
        [
            _reports(one, coordinates, one[2].quarantined, one[2].bad_answers, one[2].bad_settled)
            for one in placed
        ]
    )
    remainders = Reports.join([_reports(one, coordinates, one[2].remainders) for one in placed])
    acknowledged = Reports.join([_acknowledged(item, coordinates) for item in placed])
    return Lineage(
        key=key,
        acknowledged=acknowledged,
        quarantined=quarantined,
        repeated=Reports.join([_reports(one, coordinates, one[2].repeated) for one in placed]),
        uncounted=[(place, line, n) for place, _, chapter in placed for n, line in chapter.uncounted],
        padding=[(place, line, n) for place, _, chapter in placed for n, line in chapter.padding],
        changed=[(place, line, said) for place, _, chapter in placed for said, line in chapter.changed],
        remainders=covered(remainders.starts, remainders.ends),
        batch_size=max(chapter.batch_size for _, _, chapter in placed),
        restored=opener is not None,
        token=None if opener is None else opener.token,
        before=0 if opener is None else opener.before,
        age=age,
        seen=_seen(placed),
        segments=_segments(placed),
    )


def _segments(placed: Iterable[_Placed]) -> tuple[MixtureSegment, ...]:
    """The segments of a mixture that trainers have heard of, as they came one after the other."""
    told = {one.number: one for _, _, c in placed for one in (*c.dataset.segments, *c.segments)}
    return Segments(told[number] for number in sorted(told)).all


def _seen(placed: list[_Placed]) -> dict[int, list[Seen]]:
    found: defaultdict[int, list[Seen]] = defaultdict(list)
    for place, _, chapter in placed:
        found[place] += chapter.seen
    return {place: seen for place, seen in found.items() if seen}


def _acknowledged(placed: _Placed, line: Coordinates) -> Reports:
    chapter = placed[2]
    rows = chapter.rows
    numbers = rows[:, EPOCH], rows[:, SHARD], rows[:, START], rows[:, UPTO], chapter.lines
    starts, ends, who = _numbered(placed, line, *numbers)
    answers, settled, ways = chapter.answers, chapter.settled, chapter.ways
    return Reports(starts, ends, rows[:, TASK], rows[:, ATTEMPT], answers, who, settled, ways)


def _reports(
    placed: _Placed,
    line: Coordinates,
    told: Sequence[ToldRun],
    answers: IndexArray | None = None,
    settled: IndexArray | None = None,
) -> Reports:
    """Return what events told; without an answer each has its kind, on its own line."""
    runs = np.array(told, dtype=np.int64).reshape(-1, len(ToldRun._fields))
    epochs, shards, firsts, stops, tasks, attempts, kinds, lines = runs.T
    starts, ends, who = _numbered(placed, line, epochs, shards, firsts, stops, lines)
    answers = kinds if answers is None else answers
    settled = lines if settled is None else settled
    return Reports(starts, ends, tasks, attempts, answers, who, settled, np.zeros_like(who))


def _numbered(
    placed: _Placed,
    line: Coordinates,
    epochs: IndexArray,
    shards: IndexArray,
    starts: IndexArray,
    stops: IndexArray,
    lines: IndexArray,
) -> tuple[IndexArray, IndexArray, IndexArray]:
    """Return the numbers of runs on the line, from and to, and the place of their log. Raises AuditError."""
    place, log, _ = placed
    wrong = line.unsound(epochs, shards, starts, stops)
    if len(wrong):
        at, num_epochs = wrong[0], line.plan.spec.num_epochs
        of_epochs = f", which has {num_epochs} epoch(s)" if epochs[at] >= num_epochs > 0 else ""
        raise AuditError(
            f"{str(log.path)!r}, line {lines[at] + 1}, is damaged: positions {starts[at]} to {stops[at]} of "
            f"shard {shards[at]}, epoch {epochs[at]}, are not in dataset {line.plan.spec.name!r}{of_epochs}"
        )
    base, _ = line.windows(epochs, shards)
    return base + starts, base + stops, np.full(len(lines), place, dtype=np.int64)
