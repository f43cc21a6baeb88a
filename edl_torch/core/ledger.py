"""Ledger of one dataset: which records wait, which are lent, which have an outcome.

Pure state: no clock, no I/O, no transport. Records with an outcome are all that are neither waiting nor lent,
so the state is as small as what is in flight. The ledger decides; `backlog`, `leases` and `participants` only
keep, but for the size and order of the next leases, which `Lending` decides. The ledger does not know which
sessions are alive; the dispatcher tells it which join and which are released.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from edl_torch.core.backlog import Backlog, Waiting
from edl_torch.core.calls import NEW_PASS, Failure, Grant, LeaseId, PassState
from edl_torch.core.changes import Mark, Version, unrecorded
from edl_torch.core.leases import Lease, LeaseRequest, Leases, Lending, new_failures
from edl_torch.core.members import Participants
from edl_torch.core.mixture import check_left, goes_on, is_due_of_left, needed, restored, reweighed, widened
from edl_torch.core.plan import Plan
from edl_torch.core.quarantine import Quarantine, QuarantinedRecord, moved
from edl_torch.core.registration import identity
from edl_torch.core.status import ComponentStatus, DatasetStatus
from edl_torch.core.token import Token
from edl_torch.errors import DatasetConflict, InvalidArgument, StaleLease, TokenError, TooManyBadRecords
from edl_torch.shard import DatasetSpec, MixtureSegment, Slice


class Head(NamedTuple):
    """Row that the journal keeps of a ledger: its cursor, counts of outcomes, and the ids that come next."""

    lineage: int
    first_epoch: int
    epoch: int  # of the cursor, with the two below
    position: int  # of the next window in the epoch's order
    offset: int  # of the next record in that window
    acknowledged: int
    dropped: int
    next_task: int
    next_bundle: int
    opened_by_member: int  # by a restore, with the number of its request
    opened_by_request: int


class Stage(NamedTuple):
    """Where a dataset is: its lineage, the epoch of the cursor, and whether it is finished."""

    lineage: int
    epoch: int
    finished: bool


class ShardLedger:
    """Records of one dataset: those that wait, those that are lent, and counts of the rest.

    Others may read `backlog`, `leases` and `participants`. `mark` is called with the key of each part that
    changes, for the journal. `version` grows when a trainer that waits may find something: records that came
    back, or a pass that may be over.
    """

    def __init__(self, spec: DatasetSpec, mark: Mark = unrecorded, version: Version | None = None) -> None:
        self.plan = Plan(spec)
        self._version = version or Version()
        self._mark = mark
        self.lineage = 1
        self.opened_by = (0, 0)  # the member that opened the lineage by a restore, and its request's number
        self.quarantine = Quarantine(mark)
        self.acknowledged = 0
        self.dropped = 0
        # Since the start of the master, not in the journal: slices that were taken from trainers that died,
        # left or stalled, their records, and the records that trainers gave back themselves.
        self.returned_slices = self.returned_records = self.given_back = 0
        self.backlog = Backlog(self.plan, mark)
        self.participants = Participants(mark)
        self.leases = Leases(mark, self._version)
        self._lending = Lending(self.backlog, self.leases, self.participants)

    # What it is -----------------------------------------------------------------------------------------

    @property
    def spec(self) -> DatasetSpec:
        """Dataset as registered."""
        return self.plan.spec

    def respecify(self, spec: DatasetSpec) -> None:
        """Take other job options, or an in-shard shuffle that was left open; the plan stays what it is.

        Raises DatasetConflict for fewer epochs than have begun: records that wait would be dropped.
        """
        epoch, ahead = self.backlog.cursor_epoch, self.backlog.ahead
        if 0 < spec.num_epochs <= epoch and 0 < ahead < self.plan.size:
            raise DatasetConflict(
                f"dataset {spec.name!r} is in the middle of epoch {epoch}: num_epochs={spec.num_epochs} "
                f"would drop {ahead} waiting records. Give num_epochs={epoch + 1} or more, or first go "
                f"back to a checkpoint, or to the beginning with load_state_dict(None)"
            )
        if spec.components:
            spec = self._with_components(spec)
        before = self.plan
        self._replan(spec)
        if before.mixed is not None and self.plan.mixed is not None:
            self.quarantine.replace(moved(self.quarantine, before.mixed.folders, self.plan.mixed.folders))

    def _with_components(self, spec: DatasetSpec) -> DatasetSpec:
        """A mixture as its program is now: components may have joined and left, and weights be others."""
        before, now = ([one.name for one in each.components] for each in (self.spec, spec))
        spec = replace(spec, segments=widened(self.spec.segments, before, now))
        try:
            check_left(spec, self._open_indices())
        except InvalidArgument as exc:
            raise DatasetConflict(str(exc)) from exc
        index = self.backlog.passed
        if index >= self.plan.size:  # all is lent, maybe up to the middle of a turn
            return spec
        if goes_on(self.spec.weights, self.spec.mean_lengths, spec) and not is_due_of_left(spec, index):
            return spec
        return reweighed(spec, index, oldest=self._oldest_index())

    def set_weights(self, parts: tuple[int, ...], key: str) -> MixtureSegment:
        """Begin a segment with other weights at the cursor, behind which the mixture has records. Returns it.

        Raises InvalidArgument for weights with which the mixture would not end.
        """
        index = self.backlog.passed
        self._replan(reweighed(self.spec, index, parts, oldest=self._oldest_index(), key=key))
        return next(segment for segment in self.spec.segments if segment.start == index)

    def _replan(self, spec: DatasetSpec) -> None:
        self.plan = Plan(spec)
        self._version.grow()
        self._mark("dataset")
        self.backlog.replan(self.plan)
        self._close_epochs()

    def _oldest_index(self) -> int:
        """The first index of a mixture that has no outcome."""
        return min((first for first, _ in self._open_indices()), default=self.backlog.passed)

    def _open_indices(self) -> Iterator[tuple[int, int]]:
        """Yield the runs of a mixture's indices before the cursor that have no outcome."""
        return map(self.plan.indices_of, self._open_slices())

    def _open_slices(self) -> Iterator[Slice]:
        """Yield the slices before the cursor that have no outcome: lent ones, and those that came back."""
        lent = (item for lease in self.leases for item in lease.slices())
        return chain(lent, self.backlog.came_back())

    @property
    def epoch(self) -> int:
        """Epoch that the next pass reads: the oldest with waiting records, else that of the cursor."""
        return self.backlog.oldest

    @property
    def finished(self) -> bool:
        """Whether every record of every epoch has an outcome."""
        return not self.leases and self.backlog.empty

    def goes_on(self, stage: Stage) -> bool:
        """Return whether the dataset is where it was, in the middle of an epoch; cheap."""
        backlog = self.backlog
        return backlog.cursor_epoch == stage.epoch and self.lineage == stage.lineage and not backlog.past_end

    @property
    def stage(self) -> Stage:
        """Where the dataset is."""
        return Stage(self.lineage, self.backlog.cursor_epoch, self.finished)

    @property
    def failure(self) -> str:
        """Reason why the job has failed; '' while it has not."""
        return self.quarantine.failure(self.spec)

    @property
    def leased_records(self) -> int:
        """Lent records that have no outcome yet: those before the cursor that are nowhere else."""
        outcomes = self.acknowledged + self.dropped + len(self.quarantine)
        return self.backlog.passed - self.backlog.behind - outcomes

    @property
    def shards_left(self) -> int:
        """Shards of the epochs begun that are in windows with records that wait or are lent."""
        begun = {(lease.epoch, lease.shard) for lease in self.leases}
        begun |= {(item.epoch, item.shard) for item in self.backlog.came_back()}
        begun -= {self.backlog.cut}  # which is among those ahead
        if self.plan.window == 1:
            return self.backlog.shards_ahead + len(begun)
        return self.backlog.shards_ahead + sum(self.plan.num_shards_in(*window) for window in begun)

    def __repr__(self) -> str:
        return (
            f"<ShardLedger {self.spec.name!r} epoch={self.epoch} todo={self.backlog.records} "
            f"leased={self.leased_records} done={self.acknowledged}>"
        )

    # Who takes part -------------------------------------------------------------------------------------

    def join(self, session: str, batch_size: int) -> None:
        """Add a session; joining again may change its batch size."""
        self.participants.enter(session, batch_size)
        self._version.grow()

    def release(self, session: str) -> tuple[Slice, ...]:
        """Remove a session; the rest of all that it held waits again. Returns those slices."""
        self.participants.leave(session)
        self.leases.forget_ended(session)
        return self.take_back(session)

    def take_back(self, session: str) -> tuple[Slice, ...]:
        """Let the rest of all that a session holds wait again; the session stays. Returns those slices."""
        self.participants.served(session)
        self._version.grow()
        lost: list[Slice] = []
        for lease in self.leases.take_back(session):
            for item in lease.slices():
                self.backlog.put_back(item, lease.attempt + 1)
                lost.append(item)
        self.returned_slices += len(lost)
        self.returned_records += sum(item.limit for item in lost)
        self._close_epochs()
        return tuple(lost)

    def void_of(self, session: str, leases: Iterable[LeaseId]) -> tuple[int, ...]:
        """Return the tasks of `leases` that are not the session's any more; the others are, as a whole."""
        live, has_ended = self.leases.live, self.leases.has_ended
        return tuple(id[0] for id in leases if live(session, *id) is None and not has_ended(session, *id))

    # Lending --------------------------------------------------------------------------------------------

    def lease(
        self, session: str, *, epoch: int, count: int, drained: bool = False, ahead: bool = False
    ) -> tuple[int, PassState, tuple[Grant, ...]]:
        """Lend up to `count` slices of a pass over `epoch` (NEW_PASS: of the pass that begins now).

        Returns the pass's epoch, its state, and the grants. Raises StaleLease for an unknown session,
        InvalidArgument for an epoch that has not begun, TooManyBadRecords when the job has failed.
        """
        batch_size = self.participants.batch_size(session)
        if batch_size is None:
            raise StaleLease(
                f"session {session!r} does not take part in dataset {self.spec.name!r}: "
                f"it was released; register again"
            )
        if failure := self.failure:
            raise TooManyBadRecords(failure)
        if not NEW_PASS <= epoch <= self.backlog.cursor_epoch:
            raise InvalidArgument(
                f"epoch {epoch} of dataset {self.spec.name!r} has not begun: it is in {self.epoch}"
            )
        self.participants.ask(session)
        if drained:  # it has handed all that it holds to its loop: no more batches come of it
            self.leases.hand_over(session)
        self._close_epochs()
        if epoch == NEW_PASS:
            epoch = self._lending.open_pass(batch_size)
        if epoch == NEW_PASS:
            return epoch, PassState.FINISHED if self.finished else PassState.OPEN, ()
        request = LeaseRequest(session, epoch, count, batch_size, ahead and not drained)
        grants = tuple(self._lending.grants(request, lambda: self.leased_records))
        if grants:
            self.leases.lent(session, grants[0].task)
            self._mark("head")
        state = PassState.OPEN if grants else self._pass_state(epoch)
        if grants or state is not PassState.OPEN:
            self.participants.served(session)
        return epoch, state, grants

    def _pass_state(self, epoch: int) -> PassState:
        if self.finished:
            return PassState.FINISHED
        return PassState.EPOCH_OVER if self._is_over(epoch) else PassState.OPEN

    # Outcomes -------------------------------------------------------------------------------------------

    def acknowledge(self, session: str, task: int, attempt: int, upto: int, *, start: int = 0) -> None:
        """Count the lease's records from position `start` up to `upto` as trained on. May be repeated.

        Raises StaleLease for a lease that is not this session's any more, and for records that it has given
        back; InvalidArgument for a position outside of it. Each leaves the state as it was.
        """
        lease = self._find(session, task, attempt)
        gained = 0 if lease is None else lease.acknowledge(start, upto)
        if lease is None or not gained:
            return
        self.participants.throughput.trained(session, gained)
        self.acknowledged += gained
        self._mark("head")
        self._changed(lease)

    def fail(self, session: str, task: int, attempt: int, position: int, reason: str) -> None:
        """Put the record at `position` into quarantine; the lease lives on around it. May be repeated."""
        lease = self._find(session, task, attempt)
        if lease is None:
            return
        lease.check_end(position + 1)
        if not lease.close(position, position + 1):
            return  # said before, or given back since: whoever reads it next will say so
        self.quarantine.add(self._bad(lease, position, reason))
        if self.failure:
            self._version.grow()
        self._changed(lease)

    def unreadable(self, session: str, failures: Iterable[Failure]) -> list[QuarantinedRecord]:
        """Return the records that these would put into quarantine; nothing is changed."""
        return [self._bad(*new) for new in new_failures(self.leases, session, failures)]

    def _bad(self, lease: Lease, position: int, reason: str) -> QuarantinedRecord:
        cut = Slice(epoch=lease.epoch, shard=lease.shard, skip=position, limit=1)
        found = self.plan.indices(cut)
        (name, index), turns = found[0], found.passes
        return QuarantinedRecord(
            epoch=lease.epoch,
            shard=lease.shard,
            position=position,
            name=name,
            index=index,
            reason=reason,
            passes=() if turns is None else (int(turns[0]), int(turns[0]) + 1),
        )

    def give_back(
        self,
        session: str,
        task: int,
        attempt: int,
        start: int,
        upto: int | None = None,
        *,
        remainder: bool = False,
    ) -> None:
        """Let the lease's open records from position `start` up to `upto` (None: all that follow) wait again.

        May be repeated. Raises as `acknowledge` does.
        """
        lease = self._find(session, task, attempt)
        back = [] if lease is None else lease.give_back(start, upto)
        if lease is None or not back:
            return
        put = self.backlog.put_remainder if remainder else self.backlog.put_back
        for item in back:
            put(item, lease.attempt)
            self.given_back += item.limit
        # Remainders too few for all that wait do not wake them: each trainer has some at an epoch's end.
        if not remainder or self.participants.can_use(self.backlog.remainder_records(lease.epoch)):
            self._version.grow()
        self._changed(lease)

    def _find(self, session: str, task: int, attempt: int) -> Lease | None:
        """Return the live lease, or None when this session has ended it already."""
        lease = self.leases.live(session, task, attempt)
        if lease is None and not self.leases.has_ended(session, task, attempt):
            raise StaleLease(
                f"task {task}, attempt {attempt} of dataset {self.spec.name!r} is not a lease of this session"
            )
        return lease

    def _changed(self, lease: Lease) -> None:
        """End a lease that has changed when it is done; else mark it."""
        if lease.is_done:
            self.leases.end(lease)
            self._close_epochs()
        else:
            self.leases.changed(lease)

    # Epochs ---------------------------------------------------------------------------------------------

    def _close_epochs(self) -> None:
        """Move the cursor into the next epoch when this one's pass is over, and drop what fills no batch."""
        backlog = self.backlog
        if backlog.ahead and not backlog.has_remainders:
            return  # the usual case
        if self.spec.epoch_barrier:
            while not backlog.past_end and self._is_over(backlog.cursor_epoch):
                backlog.next_epoch()
                self._version.grow()
        for epoch in backlog.remainder_epochs:
            if self._is_over(epoch) and not self._is_lent(epoch):
                self.dropped += backlog.drop_remainders(epoch)
                self._version.grow()
                self._mark("head")

    def _is_over(self, epoch: int) -> bool:
        """Return whether a pass over the epoch waits for nothing but the death of a drained trainer."""
        if self.backlog.waiting(epoch):
            return False
        if self.leases.unhanded(epoch if self.spec.epoch_barrier else None):
            return False
        return not self.participants.can_use(self.backlog.remainder_records(epoch))

    def _is_lent(self, epoch: int) -> bool:
        return any(lease.epoch == epoch or not self.spec.epoch_barrier for lease in self.leases)

    # Tokens ---------------------------------------------------------------------------------------------

    def snapshot(self) -> Token:
        """Return the whole position: cursor, slices without outcome, remainders, quarantine, counts."""
        epoch, position, offset = self.backlog.cursor
        lent, mixed = [item for lease in self.leases for item in lease.slices()], self.plan.mixed
        return Token(
            identity=identity(self.spec),
            first_epoch=self.backlog.first_epoch,
            epoch=epoch,
            position=position,
            offset=offset,
            open=(*lent, *self.backlog.returned()),
            remainders=tuple(self.backlog.remainders()),
            quarantine=moved(self.quarantine, mixed.folders, {}) if mixed else tuple(self.quarantine),
            acknowledged=self.acknowledged,
            dropped=self.dropped,
            weights=self.spec.weights,
            mean_lengths=self.spec.mean_lengths,
            segments=needed(mixed.segments, self._oldest_index()) if mixed else (),
        )

    def restore(self, token: Token | None, opened_by: tuple[int, int] = (0, 0), step: int = 1) -> None:
        """Go back to a token's position, or to the beginning, and open a new lineage, whose number is larger
        by `step`: all leases are void.

        Raises TokenError for a token of another dataset, or one that fits no position of this one, as in the
        middle of an epoch that the job does not have.
        """
        token = token or Token(identity=identity(self.spec))
        token.check(self.spec)
        plan = self._plan_of(token)
        token.check_within(plan)
        token.check_epochs(plan)
        plan = self._with_new_weights(plan, token)
        token.check_passes(plan)
        if token.fingerprint and not plan.spec.fingerprint:  # the first known one binds the dataset
            plan = Plan(replace(plan.spec, fingerprint=token.fingerprint))
        if plan is not self.plan:
            self.plan = plan
            self._mark("dataset")
        self.leases.clear()
        self.participants.nobody_waits()
        self.backlog.replan(self.plan)
        self.backlog.restore(token)
        self.quarantine.replace(self._named_here(token.quarantine))
        self.acknowledged, self.dropped = token.acknowledged, token.dropped
        self.lineage += step
        self.opened_by = opened_by
        self._version.grow()
        self._close_epochs()

    def _plan_of(self, token: Token) -> Plan:
        """The plan with the segments that a mixture had when the token was taken."""
        if self.plan.mixed is None:
            return self.plan
        try:
            wider = [component.name for component in self.spec.components]  # others may have joined since
            segments = widened(token.segments, token.components, wider)
            return Plan(restored(self.spec, segments, token.mean_lengths))
        except InvalidArgument as exc:
            raise TokenError(f"damaged token of dataset {self.spec.name!r}: {exc}") from exc

    def _with_new_weights(self, plan: Plan, token: Token) -> Plan:
        """The plan with a segment from the cursor on, where the program gives other weights or mean lengths
        than then, or a component that had some has left."""
        if not token.segments:
            return plan
        waiting = list(map(plan.indices_of, (*token.open, *token.remainders)))
        index = plan.records_before(0, token.position) + token.offset
        try:
            check_left(plan.spec, waiting)
        except InvalidArgument as exc:
            raise TokenError(f"the checkpoint's {exc}") from exc
        if token.epoch or index >= plan.size:
            return plan
        if goes_on(token.weights, token.mean_lengths, plan.spec) and not is_due_of_left(plan.spec, index):
            return plan
        oldest = min((first for first, _ in waiting), default=index)
        return Plan(reweighed(plan.spec, index, oldest=oldest))

    def _named_here(self, records: Iterable[QuarantinedRecord]) -> Iterable[QuarantinedRecord]:
        """Return bad records of a token by their names here: the same data may have lain elsewhere."""
        if self.plan.mixed is not None:
            return moved(records, {}, self.plan.mixed.folders)
        found = ((bad, *self.plan.locate(bad.epoch, bad.shard, bad.position)) for bad in records)
        return [replace(bad, name=name, index=index) for bad, name, index in found]

    @property
    def shown_epoch(self) -> int:
        """Epoch whose picture says most: the oldest one with waiting records, or the last."""
        return min(self.epoch, self.spec.num_epochs - 1) if self.spec.num_epochs else self.epoch

    def slices_by_state(self, epoch: int) -> dict[str, list[Slice]]:
        """Return the slices of an epoch that are lent, came back or are in quarantine, by these names.

        Of a mixture's bad records each is there where it was met first.
        """
        lent = (item for lease in self.leases if lease.epoch == epoch for item in lease.slices())
        back = (item for item in self.backlog.came_back() if item.epoch == epoch)
        bad = (
            Slice(epoch=epoch, shard=bad.shard, skip=bad.position, limit=1)
            for bad in self.quarantine
            if bad.epoch == epoch
        )
        return {"lent": list(lent), "returned": list(back), "quarantined": list(bad)}

    def status(self, ledger_id: str, quarantine: tuple[QuarantinedRecord, ...]) -> DatasetStatus:
        """Return the state for people, with what is to be shown of the quarantine."""
        return DatasetStatus(
            dataset=self.spec.name,
            ledger=ledger_id,
            lineage=self.lineage,
            task_type=self.spec.task_type,
            epoch=self.epoch,
            num_epochs=self.spec.num_epochs,
            size=self.plan.size,
            shards=self.plan.num_shards,
            shards_left=self.shards_left,
            todo=self.backlog.records,
            leased=self.leased_records,
            leases=len(self.leases),
            acknowledged=self.acknowledged,
            quarantined=len(self.quarantine),
            dropped=self.dropped,
            finished=self.finished,
            trainers=len(self.participants),
            failure=self.failure,
            quarantine=quarantine,
            returned_slices=self.returned_slices,
            returned_records=self.returned_records,
            given_back=self.given_back,
            components=self._components(),
            segment=max((segment.number for segment in self.spec.segments), default=0),
        )

    def _components(self) -> tuple[ComponentStatus, ...]:
        mixed = self.plan.mixed
        if mixed is None:
            return ()
        segments, index = mixed.segments, self.backlog.passed
        counts, lags, turns = segments.counts(index), segments.lags(index), segments.turns_at(index)
        parts = turns.segment.parts
        unfinished = np.zeros_like(counts)
        for first, after in self._open_indices():
            components, _ = segments.at(first, after)
            unfinished += np.bincount(components, minlength=len(parts))
        return tuple(
            ComponentStatus(
                name=component.name,
                size=component.size,
                share=parts[c] / sum(parts),
                wanted=float(int(counts[c]) + lags[c]),
                given=int(counts[c]),
                open=int(unfinished[c]),
                mean_length=component.mean_length,
            )
            for c, component in enumerate(self.spec.components)
        )

    # As rows of a journal -------------------------------------------------------------------------------

    @property
    def head(self) -> Head:
        """Numbers of the ledger."""
        epoch, position, offset = self.backlog.cursor
        return Head(
            lineage=self.lineage,
            first_epoch=self.backlog.first_epoch,
            epoch=epoch,
            position=position,
            offset=offset,
            acknowledged=self.acknowledged,
            dropped=self.dropped,
            next_task=self.leases.next_task,
            next_bundle=self._lending.next_bundle,
            opened_by_member=self.opened_by[0],
            opened_by_request=self.opened_by[1],
        )

    def resume(
        self,
        head: Head,
        *,
        leases: Iterable[Lease],
        waiting: dict[int, tuple[bool, Waiting]],
        quarantine: Iterable[QuarantinedRecord],
        batch_sizes: Mapping[str, int],
        closed: Mapping[str, dict[int, int]],
    ) -> None:
        """Take over what another ledger and its parts said; for a new one.

        Sessions that wait are not among it: they will ask again.
        """
        self.lineage, self.acknowledged, self.dropped = head.lineage, head.acknowledged, head.dropped
        self.opened_by = head.opened_by_member, head.opened_by_request
        self._lending.next_bundle = head.next_bundle
        self.backlog.resume(head.first_epoch, (head.epoch, head.position, head.offset), waiting)
        self.quarantine.replace(quarantine)
        for session, batch_size in batch_sizes.items():
            self.participants.enter(session, batch_size)
        self.leases.resume(head.next_task, leases, closed)
