"""History of a master for people: events, trainers that are there and that have gone, and how fast they are.

Bounded, and not in the journal: it begins with the master's start. It costs a call one comparison; what it
looks at more closely it looks at once a second.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

from edl_torch.core.ledger import ShardLedger, Stage
from edl_torch.core.limits import shortened
from edl_torch.core.members import Member
from edl_torch.core.status import (
    NAME_CHARS,
    TEXT_CHARS,
    DatasetStatus,
    Departed,
    Event,
    EventKind,
    Picture,
    TrainerState,
    TrainerStatus,
    draw,
)
from edl_torch.shard import Slice

EVENTS = 300
DEPARTED = 100
TICK_S = 1.0
WINDOW_S = 10.0  # rates are those of the last 10 to 20 s
MARKS = 600  # of tasks, one a second at most: how old a lease can be told to be
TOGETHER_S = 60.0  # events that repeat within it are one
SLICES_AT_ONCE, SLICES_A_SECOND = 1_000, 2_000  # of a picture that is drawn again and again
PICTURE_S = 10.0  # the longest time between two pictures

_REPEATED = {EventKind.QUARANTINED, EventKind.CHECKPOINT}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counts:
    """Records trained on until `at`: of all, and by session."""

    at: float
    acknowledged: int
    shown: dict[str, int]


class RateMeter:
    """Pace of one dataset and of its trainers, the age of its leases, and its picture."""

    def __init__(self, ledger: ShardLedger, now: float) -> None:
        self._ledger = ledger
        self.checkpoints = self.restores = 0
        self.restart(now)

    def restart(self, now: float) -> None:
        """Forget rates and ages: another lineage begins."""
        self.lineage = self._ledger.lineage
        self._older = self._newer = self._counts(now)
        self._marks: deque[tuple[int, float]] = deque([(self._ledger.leases.next_task, now)], MARKS)
        self._picture: Picture | None = None
        self._drawn = self._costs_s = 0.0

    def tick(self, now: float) -> None:
        """Note how far all are; about once a second."""
        task = self._ledger.leases.next_task
        if task == self._marks[-1][0]:
            self._marks.pop()
        self._marks.append((task, now))
        if now - self._newer.at >= WINDOW_S:
            self._older, self._newer = self._newer, self._counts(now)

    def _counts(self, now: float) -> _Counts:
        return _Counts(
            at=now,
            acknowledged=self._ledger.acknowledged,
            shown=self._ledger.participants.throughput.all_shown(),
        )

    def filled(self, status: DatasetStatus, now: float, *, picture: bool = False) -> DatasetStatus:
        """Return a status of the dataset with what is known here."""
        return replace(
            status,
            rate=self.rate(now),
            checkpoints=self.checkpoints,
            restores=self.restores,
            picture=self.picture(now) if picture else None,
        )

    def rate(self, now: float) -> float:
        """Return the records trained on a second."""
        return _rate(self._ledger.acknowledged - self._older.acknowledged, now - self._older.at)

    def pace(self, session: str, since: float, now: float) -> float:
        """Return the records that a session trains on a second; it takes part `since` then."""
        before = self._older.shown.get(session)
        begun = self._older.at if before is not None else max(since, self._older.at)
        return _rate(self._ledger.participants.throughput.shown(session) - (before or 0), now - begun)

    def age(self, task: int, now: float) -> float:
        """Return how long ago a task was lent, to about a second; a very old one is older than it says."""
        place = bisect_right(self._marks, (task, math.inf))
        return max(0.0, now - self._marks[max(0, place - 1)][1])

    def picture(self, now: float) -> Picture:
        """Return the picture of the epoch; that of a moment ago where much is in progress."""
        epoch = self._ledger.shown_epoch
        drawn = self._picture
        if drawn is None or drawn.epoch != epoch or not 0 <= now - self._drawn < self._costs_s:
            slices = self._ledger.slices_by_state(epoch)
            passed = self._ledger.backlog.passed_of(epoch)
            drawn = draw(self._ledger.plan, epoch, passed, **slices)
            self._picture, self._drawn = drawn, now
            much = sum(map(len, slices.values())) - SLICES_AT_ONCE
            self._costs_s = min(PICTURE_S, max(0.0, much / SLICES_A_SECOND))
        return drawn


class End(NamedTuple):
    """End of an epoch of a dataset, or of its last one; then `epoch` is None."""

    ledger: ShardLedger
    epoch: int | None
    seconds: float  # since the epoch began, or the dataset, or the master


class History:
    """Events, departures and watches of a master, all bounded."""

    def __init__(self) -> None:
        self.events: deque[Event] = deque(maxlen=EVENTS)
        self.departed: deque[Departed] = deque(maxlen=DEPARTED)
        self.counts: Counter[EventKind] = Counter()  # of all events ever, by kind
        self.now = 0.0  # the latest time that it was told
        self.next_tick = -math.inf
        self.started_at: float | None = None
        self._wall = 0.0  # seconds since 1970 less `now`
        self._number = 0
        self._watches: dict[str, RateMeter] = {}
        self._stages: dict[str, tuple[Stage, float]] = {}  # where each dataset is, and since when
        self._suspended: set[str] = set()

    # Time -----------------------------------------------------------------------------------------------

    @property
    def latest(self) -> int:
        """Number of the last event, which also changes when one is counted with it."""
        return self._number

    def set_wall(self, now: float, wall: float) -> None:
        """Note that `now` is `wall` seconds since 1970. The first time is the master's start."""
        self._wall = wall - now
        if self.started_at is None:
            self.started_at = round(wall, 2)
            self.add(EventKind.STARTED, now)

    def wall(self, now: float) -> float:
        """Return `now` in seconds since 1970, to a hundredth."""
        return round(now + self._wall, 2)

    def tick(self, ledgers: Iterable[ShardLedger], now: float) -> None:
        """Note how far all are; to be called when `next_tick` has come."""
        self.now, self.next_tick = now, now + TICK_S
        for ledger in ledgers:
            self.watch(ledger, now).tick(now)

    def watch(self, ledger: ShardLedger, now: float) -> RateMeter:
        """Return the watch of a dataset, which begins when it is first asked for."""
        watch = self._watches.get(ledger.spec.name)
        if watch is None:
            watch = self._watches[ledger.spec.name] = RateMeter(ledger, now)
        if watch.lineage != ledger.lineage:
            watch.restart(now)
        return watch

    # Events ---------------------------------------------------------------------------------------------

    def add(
        self,
        kind: EventKind,
        now: float,
        *,
        dataset: str = "",
        worker_id: str = "",
        count: int = 1,
        lost: tuple[Slice, ...] = (),
        records: int = 0,
        text: str = "",
    ) -> Event:
        """Add an event. One that repeats the last one is counted with it."""
        self.now = max(self.now, now)
        self.counts[kind] += count
        self._number += 1
        event = Event(
            number=self._number,
            at=self.wall(now),
            kind=kind,
            dataset=shortened(dataset, NAME_CHARS),
            worker_id=shortened(worker_id, NAME_CHARS),
            count=count,
            slices=len(lost),
            records=records + sum(item.limit for item in lost),
            text=shortened(text, TEXT_CHARS),
        )
        last = self.events[-1] if self.events else None
        if last is not None and kind in _REPEATED and _repeats(event, last):
            self.events[-1] = replace(event, count=last.count + count)
        else:
            self.events.append(event)
        return event

    def gone(self, member: Member, lost: tuple[Slice, ...], trained: int, now: float) -> None:
        """Note that a trainer has left, or died, and what it gave back."""
        died, why = bool(member.dead_because), member.dead_because
        kind = EventKind.DIED if died else EventKind.LEFT
        event = self.add(kind, now, worker_id=member.worker_id, text=why, lost=lost)
        self.departed.append(
            Departed(
                session=shortened(member.session, NAME_CHARS),
                worker_id=event.worker_id,
                at=event.at,
                died=died,
                why=why,
                trained=trained,
                slices=event.slices,
                records=event.records,
            )
        )

    def note_ends(self, ledgers: Iterable[ShardLedger], suspended: dict[str, str], now: float) -> list[End]:
        """Add what has come about since the last call: ends of epochs, which are returned, and suspensions.

        A restore is no end, though it may leave less to do.
        """
        ends: list[End] = []
        for ledger in ledgers:
            name = ledger.spec.name
            seen = self._stages.get(name)
            if seen is not None and ledger.goes_on(seen[0]):  # almost always
                continue
            after = ledger.stage
            if seen is not None and seen[0] == after:
                continue
            self._stages[name] = after, now
            if seen is not None and seen[0].lineage == after.lineage:
                ends += self._ends(ledger, *seen, after, now)
        if suspended or self._suspended:
            for name in suspended.keys() - self._suspended:
                self.add(EventKind.SUSPENDED, now, dataset=name, text=suspended[name])
            self._suspended = set(suspended)
        return ends

    def _ends(
        self, ledger: ShardLedger, before: Stage, since: float, after: Stage, now: float
    ) -> Iterator[End]:
        spec = ledger.spec
        if spec.epoch_barrier:  # without, a later epoch is read while an earlier one is not over
            of = f" of {spec.num_epochs}" if spec.num_epochs else ""
            for epoch in range(before.epoch, after.epoch)[-EVENTS:]:
                text = f"epoch {epoch}{of}"
                self.add(EventKind.EPOCH_OVER, now, dataset=spec.name, text=text, records=ledger.plan.size)
                yield End(ledger, epoch, now - since)
        if after.finished and not before.finished:
            text = (
                f"{ledger.acknowledged:,} records trained on, {len(ledger.quarantine):,} quarantined, "
                f"{ledger.dropped:,} dropped"
            )
            self.add(EventKind.FINISHED, now, dataset=spec.name, text=text, records=ledger.acknowledged)
            yield End(ledger, None, now - since)

    def __repr__(self) -> str:
        return f"<History events={self._number} departed={len(self.departed)}>"


def _repeats(event: Event, last: Event) -> bool:
    alike = (event.kind, event.dataset) == (last.kind, last.dataset)
    return alike and event.at - last.at < TOGETHER_S


def _rate(records: int, seconds: float) -> float:
    return max(0, records) / seconds if seconds > 0 else 0.0


SLOW = 0.5  # of the median pace


def trainer_statuses(
    members: Iterable[Member], ledgers: Mapping[str, ShardLedger], history: History, now: float
) -> Iterator[TrainerStatus]:
    """Return the state of each member. One is slow that has had time, holds records, and lags behind."""
    shown = {name: (ledger, history.watch(ledger, now)) for name, ledger in ledgers.items()}
    seen: list[tuple[Member, float, bool]] = []
    for member in members:
        parts = [shown[name] for name in member.datasets]
        pace = sum([watch.pace(member.session, member.since, now) for _, watch in parts])
        holds = any(ledger.leases.holds(member.session) for ledger, _ in parts)
        seen.append((member, pace, holds and now - member.since >= WINDOW_S))
    known = [pace for _, pace, is_judged in seen if is_judged]
    least = SLOW * median(known) if known else 0.0
    for member, pace, is_judged in seen:
        leased = trained = leases = 0
        oldest_lease_s = 0.0
        for name in member.datasets:
            ledger, watch = shown[name]
            trained += ledger.participants.throughput.shown(member.session)
            held = tuple(ledger.leases.of(member.session))
            if held:
                leases += len(held)
                leased += sum([lease.open_records for lease in held])
                oldest_lease_s = max(oldest_lease_s, watch.age(min([lease.task for lease in held]), now))
        yield TrainerStatus(
            session=member.session,
            worker_id=member.worker_id,
            datasets=tuple(sorted(member.datasets)),
            leased=leased,
            idle_s=max(0.0, now - member.seen),
            since_progress_s=max(0.0, now - member.progressed),
            state=_state(member),
            pace=pace,
            slow=is_judged and pace < least,
            trained=trained,
            leases=leases,
            oldest_lease_s=oldest_lease_s,
            measures=member.measures,
        )


def _state(member: Member) -> TrainerState:
    if member.gone_since is not None:
        return TrainerState.STREAM_GONE
    return TrainerState.STALLED if member.stalled else TrainerState.LIVE
