"""Dispatcher: answers the calls of trainers on the state of a master, one method for each.

Pure and synchronous: locks, long polls, streams and the journal are the business of `master/`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

from edl_torch.core.calls import (
    ConfirmAnswer,
    ConfirmCall,
    Fence,
    FencedCall,
    LeaseAnswer,
    LeaseCall,
    PassState,
    ProgressCall,
    RegisterAnswer,
    RegisterCall,
    ReportAnswer,
    ReportCall,
    Request,
    RestoreCall,
    SetWeightsCall,
    SnapshotCall,
    StatusCall,
)
from edl_torch.core.leases import check_report
from edl_torch.core.ledger import ShardLedger
from edl_torch.core.members import Member
from edl_torch.core.mixture import Segments, alters, parts_of, weights_by_name
from edl_torch.core.quarantine import QuarantinedRecord
from edl_torch.core.registration import check_batch_size, new_spec, reconcile
from edl_torch.core.state import MasterState, Rollback
from edl_torch.core.status import DatasetStatus, EventKind, MasterStatus, Measures
from edl_torch.errors import InvalidArgument, StaleLease
from edl_torch.shard import MixtureSegment

A = TypeVar("A")


class Dispatcher(MasterState):
    """Applies calls. One of another state, history or member is refused, and changes nothing."""

    @cached_property
    def rollback(self) -> Rollback:
        """Proof that the journal went back in time, and what follows from it."""
        return Rollback(self, self._mark)

    def call(self, request: Request[A], now: float) -> A:
        """Answer a call: `_ANSWERS` at the end of this file names the method for each kind of it."""
        answer: A = _ANSWERS[type(request)](self, request, now)
        return answer

    # Taking part --------------------------------------------------------------------------------------

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
            ledger = self.add(new_spec(call.registration, call.batch_size))
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
        others = len(ledger.participants) - (member is not None and ledger.spec.name in member.datasets)
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
        known = self.members.heard(session, member, now)
        if progress is not None and progress != known.progress:
            known.progress, known.progressed = progress, now
        if measures is not None:
            known.measures = measures

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

    # Lending and outcomes -----------------------------------------------------------------------------

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
        if not grants and state is PassState.OPEN and not ledger.backlog.waiting(epoch):
            waiters[call.session] = now
        news = ledger.plan.segments_after(call.segment)
        return LeaseAnswer(request=call.request, epoch=epoch, state=state, grants=grants, segments=news)

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
                records, size = ledger.quarantine.with_more(new)
                self.limits.check_quarantine(call.dataset, records=records, size=size)
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

    # Positions ----------------------------------------------------------------------------------------

    def snapshot(self, call: SnapshotCall, now: float) -> str:
        """Return the dataset's position as a token, for a trainer that is still part of its history."""
        member = self.heard(call, now)
        ledger = self._fenced(call)
        token = self._token_of(ledger)
        self.history.watch(ledger, now).checkpoints += 1
        self.history.add(EventKind.CHECKPOINT, now, dataset=call.dataset, worker_id=member.worker_id)
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

    def set_weights(self, call: SetWeightsCall, now: float) -> MixtureSegment:
        """Give a mixture other weights, in place of the segment that the call names: compare and swap.

        Repeated, it gets the same segment. Where all is lent nothing changes, and the segment that answers
        begins at the end. Raises StaleLease for another ledger, lineage or segment,
        InvalidArgument for weights that are none of this mixture's.
        """
        ledger = self._ledgers[call.dataset]
        spec = ledger.spec
        if not spec.components:
            raise InvalidArgument(f"dataset {call.dataset!r} is no mixture: it has no weights to set")
        if (call.ledger, call.lineage) != (self.ledger_id, ledger.lineage):
            raise StaleLease(
                f"mixture {call.dataset!r} is in lineage {ledger.lineage} of ledger {self.ledger_id}; the "
                f"weights are for lineage {call.lineage} of {call.ledger}: it went back to a checkpoint since"
            )
        for segment in spec.segments:
            if call.key and segment.key == call.key:
                return segment
        names, left = ([c.name for c in spec.components if c.left >= least] for least in (False, True))
        lengths = [c.mean_length for c in spec.components]
        weights = weights_by_name(f"mixture {spec.name!r}", names, call.weights, left=left)
        parts = parts_of(weights, names, lengths)
        index = ledger.backlog.passed
        if index >= spec.size:  # all is lent: they would hold from the end on
            return replace(spec.segments[-1], start=spec.size, parts=parts, key=call.key)
        if not alters(spec, index, parts):  # as when each rank of a job sets them
            return Segments(spec.segments).turns_at(index).segment
        newest = spec.segments[-1].number
        if call.replaces != newest:
            raise StaleLease(
                f"mixture {call.dataset!r} was given other weights by somebody else: segment {newest} is "
                f"in the place of {call.replaces}. Look at them, and set yours again"
            )
        segment = ledger.set_weights(parts, call.key)
        shares = ", ".join(f"{name}={weight:g}" for name, weight in call.weights.items())
        text = f"from index {segment.start:,} on: {shares}"
        self.history.add(EventKind.WEIGHTS, now, dataset=call.dataset, text=text)
        return segment

    def progress(self, call: ProgressCall, now: float) -> DatasetStatus:
        """Return the dataset's progress, for a trainer that is still part of its history."""
        self.heard(call, now)
        return self._status_of(self._fenced(call), now)

    def observe(self, call: StatusCall, now: float) -> MasterStatus:
        """Return the state of the master, or of one dataset of it alone."""
        if call.dataset is None:
            return self.status(now)
        found = self.dataset_status(call.dataset, now)
        return MasterStatus(ledger=self.ledger_id, durable=self.durable, datasets=(found,), trainers=())


_ANSWERS: dict[type[Request[Any]], Callable[[Dispatcher, Any, float], Any]] = {
    RegisterCall: Dispatcher.register,
    LeaseCall: Dispatcher.lease,
    ReportCall: Dispatcher.report,
    ConfirmCall: Dispatcher.confirm,
    SnapshotCall: Dispatcher.snapshot,
    RestoreCall: Dispatcher.restore,
    SetWeightsCall: Dispatcher.set_weights,
    ProgressCall: Dispatcher.progress,
    StatusCall: Dispatcher.observe,
}
