"""Dispatcher: the ledgers of all datasets and all sessions, behind one method per call.

Pure and synchronous: `now` is an argument, the consequences of a call are returned, and `changes` names what
a journal has to write. Locks, long polls, streams and the journal are the business of `master/`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar

from edl_torch.core.calls import (
    ConfirmAnswer,
    ConfirmCall,
    DatasetStatus,
    Fence,
    FencedCall,
    LeaseAnswer,
    LeaseCall,
    MasterStatus,
    PassState,
    ProgressCall,
    QuarantinedRecord,
    RegisterAnswer,
    RegisterCall,
    Registration,
    ReportAnswer,
    ReportCall,
    Request,
    RestoreCall,
    SnapshotCall,
    StatusCall,
)
from edl_torch.core.changes import Changes, Version, unrecorded
from edl_torch.core.events import EventKind
from edl_torch.core.history import End, History, Watching
from edl_torch.core.leases import check_report
from edl_torch.core.ledger import ShardLedger
from edl_torch.core.limits import Limits
from edl_torch.core.measures import Measures
from edl_torch.core.members import Member, Members
from edl_torch.core.quarantine import token_bytes
from edl_torch.core.registration import check_batch_size, new_spec, option_differences, reconcile
from edl_torch.core.rollback import Rollback
from edl_torch.core.token import Token
from edl_torch.errors import InvalidArgument, StaleLease, UnknownDataset
from edl_torch.shard import DatasetSpec, Slice

A = TypeVar("A")

SHOWN = 20  # records in quarantine of a status that trainers ask for
WAITER_S = 3.0  # a trainer that waits asks again well within this time


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """Slices that a session lost: it was given up, or it `stalled` and stays."""

    session: str
    worker_id: str
    dataset: str
    slices: tuple[Slice, ...]
    stalled: bool = False


class _Ledgers(dict[str, ShardLedger]):
    """Ledgers by the names of their datasets. Raises UnknownDataset for another name."""

    def __missing__(self, dataset: str) -> NoReturn:
        raise UnknownDataset(f"the master has no dataset {dataset!r}: register it with a reader or a size")


class Dispatcher:
    """Applies calls to ledgers. `ledger_id` tells its leases from those of all other masters.

    It is durable when it is given `changes`: then a journal writes down every part that changes.
    """

    def __init__(
        self,
        *,
        ledger_id: str,
        lease_timeout_s: float = 30.0,
        grace_s: float = 1.0,
        progress_timeout_s: float = 0.0,
        changes: Changes | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.ledger_id = self.first_ledger_id = ledger_id
        self.durable = changes is not None
        self.members = Members(
            lease_timeout_s=lease_timeout_s, grace_s=grace_s, progress_timeout_s=progress_timeout_s
        )
        self.limits = limits or Limits()
        self._changes = changes
        self._mark = unrecorded if changes is None else changes.mark
        self._version = Version()
        self._ledgers = _Ledgers()
        self._waiters: dict[str, dict[str, float]] = {}  # dataset -> sessions sent away empty, and when
        self.suspended: dict[str, str] = {}  # dataset -> why nothing of it is lent before it is restored
        self.rollback = Rollback(self, self._mark)
        self.history = History()

    @property
    def version(self) -> int:
        """Number that grows when calls that wait may find something: then they look again."""
        return self._version.count

    def call(self, request: Request[A], now: float) -> A:
        """Answer a call: `_ANSWERS` at the end of this file names the method for each kind of it."""
        answer: A = _ANSWERS[type(request)](self, request, now)
        return answer

    # Taking part ----------------------------------------------------------------------------------------

    def define(self, registration: Registration, *, batch_size: int = 1) -> list[str]:
        """Make a dataset before any trainer asks for it, as the command line does.

        One that exists must have the same identity. Its options stand: a trainer may have changed them.
        Returns a line for each option that is another one here.
        """
        ledger = self._ledgers.get(registration.name)
        if ledger is None:
            self._make(registration, batch_size)
            return []
        reconcile(ledger.spec, registration, alone=True)
        return option_differences(ledger.spec, registration)

    def _make(self, registration: Registration, batch_size: int) -> ShardLedger:
        return self.add(new_spec(registration, batch_size))

    def add(self, spec: DatasetSpec) -> ShardLedger:
        """Add a new dataset, none of whose records is lent yet. Returns its ledger."""
        mark = unrecorded if self._changes is None else self._changes.of(spec.name)
        ledger = self._ledgers[spec.name] = ShardLedger(spec, mark, self._version)
        mark("dataset")
        mark("head")
        return ledger

    def register(self, call: RegisterCall, now: float) -> RegisterAnswer:
        """Join a dataset; the first description of it makes it."""
        check_batch_size(call.batch_size)
        name = call.registration.name
        self.limits.check_register(
            call,
            datasets=len(self._ledgers) + (name not in self._ledgers),
            sessions=len(self.members) + (self.members.get(call.session) is None),
        )
        ledger = self._ledgers.get(name)
        if ledger is None:
            ledger = self._make(call.registration, call.batch_size)
        self._reconcile(ledger, call)
        member = self.members.enter(call.session, call.worker_id, now)
        self.history.watch(ledger, now)
        if name not in member.datasets:
            self.history.add(EventKind.JOINED, now, dataset=name, worker_id=call.worker_id)
        self._mark("session", call.session)
        self._mark("next", "member")
        member.datasets.add(name)
        ledger.join(call.session, call.batch_size)
        return RegisterAnswer(
            spec=ledger.spec,
            fence=Fence(ledger=self.ledger_id, lineage=ledger.lineage, member=member.number),
            epoch=ledger.epoch,
        )

    def _reconcile(self, ledger: ShardLedger, call: RegisterCall) -> None:
        member = self.members.get(call.session)
        others = ledger.trainers - (member is not None and ledger.spec.name in member.datasets)
        spec = reconcile(ledger.spec, call.registration, alone=others == 0)
        if spec != ledger.spec:
            ledger.respecify(spec)

    def heartbeat(
        self,
        session: str,
        member: int,
        now: float,
        progress: int | None = None,
        measures: Measures | None = None,
    ) -> None:
        """Note that a session lives, as that `member`; `progress` counts how often its loop moved on.

        Raises InvalidArgument, with nothing noted, for measures that cannot be.
        """
        if measures is not None:
            measures.check()
        if progress is None:
            self.members.heard(session, member, now)
        else:
            self.members.beat(session, member, progress, now)
        if measures is not None:
            self.measured(session, measures)

    def measured(self, session: str, measures: Measures) -> None:
        """Keep what a session has measured; nothing where it is no member."""
        member = self.members.get(session)
        if member is not None:
            member.measures = measures

    def resume(self, now: float) -> None:
        """Begin after a start of the master: every lease stays live for one full timeout."""
        self.members.resume(now)

    def stream_opened(self, session: str, now: float) -> None:
        """Note that the session's stream stands, for the first time or again."""
        self.members.stream_opened(session, now)

    def stream_broke(self, session: str, now: float) -> None:
        """Note that the session's stream ended: `expire` gives it up unless it is back within the grace."""
        self.members.stream_broke(session, now)

    def leave(self, session: str, member: int, now: float | None = None) -> tuple[Released, ...]:
        """End the session of that `member` at its own request; what it did not train on waits again.

        `now` is for the history alone; without it that has the time of a call before.
        """
        known = self.members.get(session)
        if known is None or known.number != member:
            return ()
        return self.give_up(known, self.history.now if now is None else now)

    def give_up(self, member: Member, now: float) -> tuple[Released, ...]:
        """End a session; all that it held waits again."""
        trained = sum(self._ledgers[name].trained_by(member.session) for name in member.datasets)
        self.members.leave(member.session)
        self._mark("unheard", member.number)
        released = tuple(self._release(member))
        self.history.gone(member, (item.slices for item in released), trained, now)
        return released

    def void_members(self) -> None:
        """End all sessions, and forget those that ended before: their calls are of another ledger."""
        for member in self.members:
            self.give_up(member, self.history.now)
        for number in self.members.unheard:
            self._mark("unheard", number)
        self.members.unheard.clear()
        self._version.grow()

    def expire(self, now: float) -> tuple[Released, ...]:
        """Give up every session whose time is up, and take the leases of those that are stalled."""
        dead: list[Released] = []
        for member in self.members.dead(now):
            member.dead_because = self.members.cause_of_death(member)
            dead += self.give_up(member, now)
        stalled = [m for m in self.members if self.members.progress_deadline(m) <= now and self._holds(m)]
        return (*dead, *(released for member in stalled for released in self._take_back(member, now)))

    def next_deadline(self, now: float) -> float | None:
        """Return when to call `expire` again if no session is heard of before."""
        dead = self.members.next_deadline()
        if dead is None:
            return None
        idle = now + (self.members.progress_timeout_s or math.inf)  # of those who may get a lease meanwhile
        stalled = (self.members.progress_deadline(m) if self._holds(m) else idle for m in self.members)
        return min(dead, *stalled)

    def _holds(self, member: Member) -> bool:
        for name in member.datasets:  # noqa: SIM110  with every lease call: a generator costs twice as much
            if self._ledgers[name].holds(member.session):
                return True
        return False

    def _release(self, member: Member) -> list[Released]:
        self._mark("session", member.session)
        lost = []
        for dataset in sorted(member.datasets):
            self._mark("answer", dataset, member.session)
            self._mark("report", dataset, member.session)
            self._waiters.get(dataset, {}).pop(member.session, None)
            slices = self._ledgers[dataset].release(member.session)
            lost.append(
                Released(session=member.session, worker_id=member.worker_id, dataset=dataset, slices=slices)
            )
        return lost

    def _take_back(self, member: Member, now: float) -> list[Released]:
        """Take all leases of a stalled member, and nothing else."""
        member.progressed = member.stalled_at = now
        lost = []
        for dataset in sorted(member.datasets):
            slices = self._ledgers[dataset].take_back(member.session)
            answer = member.answers.get(dataset)
            if answer is not None:  # a repeat must not lend it again
                member.answers[dataset] = replace(answer, grants=())
                self._mark("answer", dataset, member.session)
            lost.append(
                Released(
                    session=member.session,
                    worker_id=member.worker_id,
                    dataset=dataset,
                    slices=slices,
                    stalled=True,
                )
            )
        taken = [item for released in lost for item in released.slices]
        self.history.add(
            EventKind.STALLED,
            now,
            worker_id=member.worker_id,
            slices=len(taken),
            records=sum(item.limit for item in taken),
            text=f"its loop did not move on for {self.members.progress_timeout_s:g} s",
        )
        return lost

    # Lending and outcomes -----------------------------------------------------------------------------------

    def lease(self, call: LeaseCall, now: float) -> LeaseAnswer:
        """Lend slices. A repeated request number gets the answer that it got before."""
        return self._answer(call, self.heard(call, now), now)

    def poll(self, call: LeaseCall, now: float) -> LeaseAnswer | None:
        """Try to answer a call that waits: None, and nothing is remembered, while it must wait on.

        The shell looks again when `version` has changed. Looks do not count as hearing from the session.
        """
        member = self._known(call)
        earlier = self._answered(call, member)
        if earlier is not None:
            return earlier
        answer = self._lease(call, member, now)
        return None if answer.nothing_yet else self._remember(call, member, answer)

    def answer(self, call: LeaseCall, now: float) -> LeaseAnswer:
        """Return the answer to a call that has waited long enough, maybe without grants."""
        return self._answer(call, self._known(call), now)

    def _answer(self, call: LeaseCall, member: Member, now: float) -> LeaseAnswer:
        return self._answered(call, member) or self._remember(call, member, self._lease(call, member, now))

    def _answered(self, call: LeaseCall, member: Member) -> LeaseAnswer | None:
        """Return the earlier answer to this call. Raises StaleLease when a later call was answered since."""
        earlier = member.answers.get(call.dataset)
        if earlier is None or call.request > earlier.request:
            return None
        if call.request < earlier.request:
            raise StaleLease(
                f"request {call.request} of session {call.session!r} was followed by {earlier.request}"
            )
        return earlier

    def _remember(self, call: LeaseCall, member: Member, answer: LeaseAnswer) -> LeaseAnswer:
        member.answers[call.dataset] = answer
        self._mark("answer", call.dataset, call.session)
        return answer

    def _lease(self, call: LeaseCall, member: Member, now: float) -> LeaseAnswer:
        ledger = self._fenced(call)
        if call.count < 1:
            raise InvalidArgument(f"a lease call asks for 1 slice or more, not {call.count}")
        self.limits.check_lease(call)
        if now >= self.history.next_tick:
            self.history.tick(self._ledgers.values(), now)
        if call.drained or not self._holds(member):
            member.progressed = now  # its loop waits for the master
        epoch, state, grants = ledger.lease(
            call.session, epoch=call.epoch, count=call.count, drained=call.drained, ahead=call.ahead
        )
        waiters = self._waiters.setdefault(call.dataset, {})
        waiters.pop(call.session, None)
        if not grants and state is PassState.OPEN and not ledger.waiting_in(epoch):
            waiters[call.session] = now
        return LeaseAnswer(request=call.request, epoch=epoch, state=state, grants=grants)

    def wanted(self, dataset: str, session: str, now: float) -> bool:
        """Return whether another trainer was sent away empty a moment ago, and so waits for records."""
        waiters = self._waiters.get(dataset)
        if not waiters:
            return False
        for other, since in reversed(waiters.items()):  # the last to ask comes first
            if now - since > WAITER_S:
                return False
            if other != session:
                return True
        return False

    def asked_back(self, dataset: str, now: float) -> tuple[str, ...]:
        """Return the sessions that hold leases while another trainer waits: they may give some back."""
        ledger = self._ledgers[dataset]
        holders = (member.session for member in self.members if ledger.holds(member.session))
        return tuple(session for session in holders if self.wanted(dataset, session, now))

    def report(self, call: ReportCall, now: float) -> ReportAnswer:
        """Apply outcomes and give-backs; leases that are not the session's any more are listed as stale.

        All of it is applied, or, where one argument is bad (InvalidArgument), nothing. The last report again
        is answered as it was: leases that it named may have been taken back since.
        """
        member = self.heard(call, now)
        ledger = self._fenced(call)
        reported = member.reports.get(call.dataset, 0)
        if 0 < call.request == reported:
            stale = member.refused.get(call.dataset, ())
            wanted = self.wanted(call.dataset, call.session, now)
            return ReportAnswer(request=call.request, stale=stale, wanted=wanted)
        if now >= self.history.next_tick:
            self.history.tick(self._ledgers.values(), now)
        new: list[QuarantinedRecord] = []
        if call.failures:
            call = self.limits.with_short_reasons(call)
            new = ledger.unreadable(call.session, call.failures)
            if new:  # a repeated call adds none
                there = ledger.quarantine
                self.limits.check_quarantine(
                    call.dataset, records=len(there) + len(new), size=there.bytes + token_bytes(new)
                )
        if len(call.failures) + len(call.acknowledgements) + len(call.give_backs) > 1:
            check_report(ledger.leases, call)  # a single part is checked as it is applied
        takes_part = call.dataset in member.datasets  # else nobody would ever forget the number
        is_newest = takes_part and call.request > reported
        if is_newest:
            ledger.leases.forget_ended(call.session)
        stale = tuple(self._apply(ledger, call))
        if is_newest:
            member.reports[call.dataset], member.refused[call.dataset] = call.request, stale
            self._mark("report", call.dataset, call.session)
        if call.acknowledgements or call.failures:
            member.progressed = now
        if new:
            kind, bad = EventKind.QUARANTINED, new[-1]
            who = member.worker_id
            self.history.add(kind, now, dataset=call.dataset, worker_id=who, count=len(new), text=str(bad))
        return ReportAnswer(
            request=call.request, stale=stale, wanted=self.wanted(call.dataset, call.session, now)
        )

    def _apply(self, ledger: ShardLedger, call: ReportCall) -> list[int]:
        stale: list[int] = []
        session = call.session
        for failure in call.failures:
            try:
                ledger.fail(session, failure.task, failure.attempt, failure.position, failure.reason)
            except StaleLease:
                stale.append(failure.task)
        for done in call.acknowledgements:
            try:
                ledger.acknowledge(session, done.task, done.attempt, done.upto, start=done.start)
            except StaleLease:
                stale.append(done.task)
        for back in call.give_backs:
            try:
                there = back.task, back.attempt, back.start, back.upto
                ledger.give_back(session, *there, remainder=back.remainder)
            except StaleLease:
                stale.append(back.task)
        return stale

    def confirm(self, call: ConfirmCall, now: float) -> ConfirmAnswer:
        """Tell a session that comes back which of its leases are void. No lease is changed."""
        # Its loop asks before it takes a batch.
        self.heard(call, now).progressed = now
        return ConfirmAnswer(void=self._fenced(call).void_of(call.session, call.leases))

    def heard(self, call: FencedCall[Any], now: float) -> Member:
        """Note that a session called. Raises JournalWentBack, and SessionLost like `Members.find`."""
        if self.durable:
            self.rollback.check(call)
        return self.members.heard(call.session, call.fence.member, now)

    def _known(self, call: FencedCall[Any]) -> Member:
        """Return the member that calls, as `heard` does; a call that waits is not heard again."""
        if self.durable:
            self.rollback.check(call)
        return self.members.find(call.session, call.fence.member)

    def _fenced(self, call: FencedCall[Any]) -> ShardLedger:
        """Return the ledger of a call of a living member. Raises StaleLease for another history."""
        ledger = self._ledgers[call.dataset]
        if call.fence.ledger != self.ledger_id:
            raise StaleLease(
                f"the master keeps ledger {self.ledger_id}; the call is of ledger {call.fence.ledger}"
            )
        if call.fence.lineage != ledger.lineage:
            raise StaleLease(
                f"dataset {call.dataset!r} is in lineage {ledger.lineage}; the call is of lineage "
                f"{call.fence.lineage}: another trainer has taken it back to a checkpoint since. Start this "
                f"one again from the newest checkpoint"
            )
        return ledger

    # Tokens and status ----------------------------------------------------------------------------------

    def snapshot(self, call: SnapshotCall, now: float) -> str:
        """Return the dataset's position as a token, for a trainer that is still part of its history."""
        member = self.heard(call, now)
        ledger = self._fenced(call)
        token = self._token_of(ledger)
        self.history.watch(ledger, now).checkpoints += 1
        self.history.add(EventKind.CHECKPOINT, now, dataset=call.dataset, worker_id=member.worker_id)
        return token

    def token(self, dataset: str) -> str:
        """Return the dataset's position as a token, for observers: it is no trainer's checkpoint."""
        return self._token_of(self._ledgers[dataset])

    def _token_of(self, ledger: ShardLedger) -> str:
        token = ledger.snapshot().encode()
        self.limits.check_token(token)
        return token

    def restore(self, call: RestoreCall, now: float) -> int:
        """Take the dataset back to a token in place of the lineage that the call names: compare and swap.

        Returns the new lineage. A restore that was carried out and is repeated gets the same answer.
        """
        self.heard(call, now)
        ledger = self._ledgers[call.dataset]
        opening = (call.fence.member, call.request)
        if call.fence.ledger == self.ledger_id and opening == ledger.opened_by:
            return ledger.lineage
        self._fenced(call)
        return self.go_back(call.dataset, call.token, opened_by=opening, now=now)

    def go_back(
        self,
        dataset: str,
        token: str | None,
        opened_by: tuple[int, int] = (0, 0),
        now: float | None = None,
    ) -> int:
        """Take the dataset back to a token (None: to the beginning), whoever asks. Returns the new lineage.

        `opened_by` is the member that asked and the number of its request; (0, 0) for the master itself.
        `now` is for the history alone, as that of `leave`.
        """
        ledger = self._ledgers[dataset]
        position = None if token is None else self._position(dataset, token)
        self.open_lineage(ledger, position, opened_by)
        at = self.history.now if now is None else now
        self.history.watch(ledger, at).restores += 1
        to = "the beginning" if token is None else f"a checkpoint of {ledger.acknowledged:,} records"
        self.history.add(EventKind.RESTORED, at, dataset=dataset, text=to)
        return ledger.lineage

    def open_lineage(
        self, ledger: ShardLedger, position: Token | None, opened_by: tuple[int, int] = (0, 0)
    ) -> None:
        """Take a ledger to a position (None: the beginning) in a new lineage; forget calls of the old one."""
        ledger.restore(position, opened_by, step=self.rollback.lineage_step)
        dataset = ledger.spec.name
        self._waiters.pop(dataset, None)
        for number, datasets in self.members.unheard.items():
            if datasets.pop(dataset, None) is not None:
                self._mark("unheard", number)
        for member in self.members:  # the numbers of what was answered are those of a lineage
            if member.answers.pop(dataset, None) is not None:
                self._mark("answer", dataset, member.session)
            member.refused.pop(dataset, None)
            if member.reports.pop(dataset, None) is not None:
                self._mark("report", dataset, member.session)
        if self.suspended.pop(dataset, None) is not None:
            self._mark("suspended", dataset)

    def _position(self, dataset: str, token: str) -> Token:
        self.limits.check_token(token)
        position = Token.decode(token)
        bad = position.quarantine
        self.limits.check_quarantine(dataset, records=len(bad), size=token_bytes(bad))
        self.limits.check_slices(len(position.open) + len(position.remainders))
        return position

    @property
    def ledgers(self) -> Iterable[ShardLedger]:
        """Ledgers of all datasets, in the order in which they were made."""
        return self._ledgers.values()

    def find_ledger(self, dataset: str) -> ShardLedger | None:
        """Return the ledger of a dataset; None when there is none."""
        return self._ledgers.get(dataset)

    def progress(self, call: ProgressCall, now: float) -> DatasetStatus:
        """Return the dataset's progress, for a trainer that is still part of its history."""
        self.heard(call, now)
        return self._status_of(self._fenced(call), now)

    def dataset_status(self, dataset: str, now: float | None = None) -> DatasetStatus:
        """Return the dataset's progress, for observers. Without `now` its rate is that of a call before."""
        return self._status_of(self._ledgers[dataset], self.history.now if now is None else now)

    def _status_of(self, ledger: ShardLedger, now: float) -> DatasetStatus:
        """Return the status with the first few records of the quarantine only: trainers ask often."""
        status = ledger.status(self.ledger_id, ledger.quarantine.first(SHOWN))
        return self.history.watch(ledger, now).filled(status, now)

    def look(self, now: float) -> tuple[End, ...]:
        """Note in the history what has come about; to be called when `version` has changed.

        Returns the ends of epochs and datasets.
        """
        return self.history.look(self._ledgers.values(), self.suspended, now)

    def observe(self, call: StatusCall, now: float) -> MasterStatus:
        """Return the state of the master, or of one dataset of it alone."""
        if call.dataset is None:
            return self.status(now)
        found = self.dataset_status(call.dataset, now)
        return MasterStatus(ledger=self.ledger_id, durable=self.durable, datasets=(found,), trainers=())

    def status(self, now: float) -> MasterStatus:
        """Return the state of the master; of all quarantines together as much as one may have."""
        history = self.history
        history.tick(self._ledgers.values(), now)
        self.look(now)
        datasets, left = [], self.limits.quarantine_bytes
        for ledger in self._ledgers.values():
            shown = ledger.quarantine.within(left)
            left -= token_bytes(shown)
            status = ledger.status(self.ledger_id, shown)
            datasets.append(history.watch(ledger, now).filled(status, now, picture=True))
        return MasterStatus(
            ledger=self.ledger_id,
            durable=self.durable,
            datasets=tuple(datasets),
            trainers=tuple(Watching(iter(self.members), self._ledgers, history, now).trainers()),
            suspended=dict(self.suspended),
            time=history.wall(now),
            started_at=history.started_at or 0.0,
            events=tuple(history.events),
            departed=tuple(history.departed),
            event_counts={kind.value: count for kind, count in history.counts.items()},
        )

    def __repr__(self) -> str:
        return f"<Dispatcher {self.ledger_id} datasets={len(self._ledgers)} sessions={len(self.members)}>"


_ANSWERS: dict[type[Request[Any]], Callable[[Dispatcher, Any, float], Any]] = {
    RegisterCall: Dispatcher.register,
    LeaseCall: Dispatcher.lease,
    ReportCall: Dispatcher.report,
    ConfirmCall: Dispatcher.confirm,
    SnapshotCall: Dispatcher.snapshot,
    RestoreCall: Dispatcher.restore,
    ProgressCall: Dispatcher.progress,
    StatusCall: Dispatcher.observe,
}
