"""The ledger of one dataset: which records wait, which are lent, which have an outcome.

Pure state: no clock, no I/O, no transport. What has an outcome is what remains, so the state is as small
as what is in flight. It must not know sessions' liveness; it is told who joins and who is released.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from edl_torch.core.calls import (
    NEW_PASS,
    Acknowledgement,
    Failure,
    GiveBack,
    Grant,
    HeldLease,
    PassState,
    QuarantinedRecord,
)
from edl_torch.core.changes import Mark, unrecorded
from edl_torch.core.identity import identity
from edl_torch.core.lease import Lease, pass_over
from edl_torch.core.plan import Plan
from edl_torch.core.todo import Todo, Waiting
from edl_torch.core.token import Token
from edl_torch.errors import DatasetConflict, InvalidArgument, StaleLease, TooManyBadRecords
from edl_torch.shard import DatasetSpec, Slice

LOOKS = 8  # a trainer that let the others ask so often each has stopped waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The numbers of a ledger: where its cursor is, what has come of the records, which ids come next."""

    lineage: int
    cursor: tuple[int, int, int]
    acknowledged: int
    dropped: int
    next_task: int
    next_bundle: int


class ShardLedger:
    """One dataset's records: `todo` waits, `leased` is a dict by task, what has an outcome is the rest.

    `mark` is told the key of each part that changes, for who writes the state down. `news` grows when a
    trainer that waits may find something: records that came back, a lease or an epoch that ended.
    """

    def __init__(self, spec: DatasetSpec, mark: Mark = unrecorded) -> None:
        self.plan = Plan(spec)
        self.news = 0
        self._mark = mark
        self.lineage = 1
        self.quarantine: list[QuarantinedRecord] = []
        self.acknowledged = 0
        self.dropped = 0
        self._todo = Todo(self.plan, mark)
        self._trainers: dict[str, int] = {}  # session -> batch size
        self._waiting: dict[str, int] = {}  # session -> its last look, while it is sent away empty
        self._looks = 0
        self._held: dict[str, set[int]] = {}  # session -> tasks
        self._closed: dict[str, dict[int, int]] = {}  # session -> task -> attempt, since its last report
        self._leased: dict[int, Lease] = {}
        self._unhanded: dict[int, int] = {}  # epoch -> leases that may still produce batches
        self._next_task = 1
        self._next_bundle = 1

    # What it is -----------------------------------------------------------------------------------------

    @property
    def spec(self) -> DatasetSpec:
        """The dataset as registered."""
        return self.plan.spec

    def respecify(self, spec: DatasetSpec) -> None:
        """Take other job options, or an in-shard shuffle that was left open; the plan stays what it is.

        Raises DatasetConflict for fewer epochs than have begun: records that wait would be dropped.
        """
        epoch, ahead = self._todo.cursor_epoch, self._todo.ahead
        if 0 < spec.num_epochs <= epoch and 0 < ahead < self.plan.size:
            raise DatasetConflict(
                f"dataset {spec.name!r} is in the middle of epoch {epoch}: num_epochs={spec.num_epochs} "
                f"would drop {ahead} waiting records. Give num_epochs={epoch + 1} or more, or first go "
                f"back to a checkpoint, or to the beginning with load_state_dict(None)"
            )
        self.plan = Plan(spec)
        self.news += 1
        self._mark("dataset")
        self._todo.follow(self.plan)
        self._settle()

    @property
    def epoch(self) -> int:
        """The epoch that the next pass reads: the oldest with waiting records, else the cursor's."""
        return self._todo.oldest

    @property
    def finished(self) -> bool:
        """Whether every record of every epoch has an outcome."""
        return not self._leased and self._todo.empty

    @property
    def failure(self) -> str:
        """Why the job has failed; '' while it has not."""
        allowed = self.spec.max_bad_records
        if len(self.quarantine) <= allowed:
            return ""
        last = self.quarantine[-1]
        return (
            f"dataset {self.spec.name!r} has {len(self.quarantine)} bad record(s), "
            f"max_bad_records is {allowed}; the last is record {last.index} of {last.name!r}: {last.reason}. "
            f"Repair the data, or allow more with max_bad_records"
        )

    @property
    def todo(self) -> int:
        """Records of the epochs begun that wait to be lent, crumbs included."""
        return self._todo.records

    @property
    def leased_records(self) -> int:
        """Records on loan that have no outcome yet."""
        return sum(lease.open_records for lease in self._leased.values())

    @property
    def leases(self) -> int:
        """Live leases."""
        return len(self._leased)

    @property
    def shards_left(self) -> int:
        """Shards of the epochs begun with records that wait or are on loan."""
        epoch, position, offset = self._todo.cursor
        begun = {(lease.epoch, lease.shard) for lease in self._leased.values()}
        begun.update((item.epoch, item.shard) for item in (*self._todo.returned(), *self._todo.crumbs()))
        if self._todo.past_end:
            return len(begun)
        if offset:
            begun.discard((epoch, self.plan.shard_at(epoch, position)))
        return self.plan.num_shards - position + len(begun)

    @property
    def trainers(self) -> int:
        """Sessions that have joined and were not released."""
        return len(self._trainers)

    def holds(self, session: str) -> bool:
        """Whether `session` has a live lease."""
        return bool(self._held.get(session))

    def held_by(self, session: str) -> int:
        """Records without outcome on loan to `session`."""
        return sum(self._leased[task].open_records for task in self._held.get(session, ()))

    def __repr__(self) -> str:
        return (
            f"<ShardLedger {self.spec.name!r} epoch={self.epoch} todo={self.todo} "
            f"leased={self.leased_records} done={self.acknowledged}>"
        )

    # Who takes part -------------------------------------------------------------------------------------

    def join(self, session: str, batch_size: int) -> None:
        """A session begins to use the dataset; joining again may change its batch size."""
        self._trainers[session] = batch_size
        self.news += 1
        self._mark("member", session)

    def release(self, session: str) -> tuple[Slice, ...]:
        """A session is gone: the rest of all it held waits again. Returns those slices."""
        self._trainers.pop(session, None)
        self.confirm(session)
        self._mark("member", session)
        return self.take_back(session)

    def take_back(self, session: str) -> tuple[Slice, ...]:
        """The rest of all that a session holds waits again; the session stays. Returns those slices."""
        self._waiting.pop(session, None)
        self.news += 1
        lost: list[Slice] = []
        for task in sorted(self._held.pop(session, ())):
            lease = self._leased[task]
            for item in lease.pieces():
                self._todo.put_back(item, lease.attempt + 1)
                lost.append(item)
            self._drop_lease(lease)
        self._settle()
        return tuple(lost)

    def void_of(self, session: str, leases: Iterable[HeldLease]) -> tuple[int, ...]:
        """Those tasks of `leases` that are not the session's any more; the others are, as a whole."""
        return tuple(held.task for held in leases if self._is_void(session, held))

    def _is_void(self, session: str, held: HeldLease) -> bool:
        try:
            self._find(session, held.task, held.attempt)
        except StaleLease:
            return True
        return False

    def confirm(self, session: str) -> None:
        """A newer report arrived: the answers to the ones before it are known to the session."""
        if self._closed.pop(session, None) is not None:
            self._mark("report", session)

    # Lending --------------------------------------------------------------------------------------------

    def lease(
        self, session: str, *, epoch: int, count: int, drained: bool = False
    ) -> tuple[int, PassState, tuple[Grant, ...]]:
        """Lend up to `count` slices of a pass over `epoch` (NEW_PASS: of the pass that begins now).

        Returns the pass's epoch, its state, and the grants. Raises StaleLease for an unknown session,
        InvalidArgument for an epoch that has not begun, TooManyBadRecords when the job has failed.
        """
        batch_size = self._batch_size(session)
        if self.failure:
            raise TooManyBadRecords(self.failure)
        if not NEW_PASS <= epoch <= self._todo.cursor_epoch:
            raise InvalidArgument(
                f"epoch {epoch} of dataset {self.spec.name!r} has not begun: it is in {self.epoch}"
            )
        self._looks += 1
        self._waiting[session] = self._looks
        if drained:
            self._hand_over(session)
        self._settle()
        if epoch == NEW_PASS:
            epoch = self._open_pass(batch_size)
        if epoch == NEW_PASS:
            return epoch, PassState.FINISHED if self.finished else PassState.OPEN, ()
        grants = tuple(self._grants(session, epoch, count, batch_size))
        state = PassState.OPEN if grants else self._pass_state(epoch)
        if grants or state is not PassState.OPEN:
            del self._waiting[session]
        return epoch, state, grants

    def _batch_size(self, session: str) -> int:
        try:
            return self._trainers[session]
        except KeyError:
            raise StaleLease(
                f"session {session!r} does not take part in dataset {self.spec.name!r}: "
                f"it was released; register again"
            ) from None

    def _hand_over(self, session: str) -> None:
        """A drained session has handed all that it holds to its loop: no more batches come of it."""
        for task in self._held.get(session, ()):
            lease = self._leased[task]
            if not lease.handed:
                lease.handed = True
                self.news += 1
                self._mark("lease", task)
                self._count_unhanded(lease.epoch, -1)

    def _open_pass(self, batch_size: int) -> int:
        """The oldest epoch that has something for a trainer with this batch size."""
        todo = self._todo
        if not todo.past_end or todo.returned_records:
            epochs = [todo.oldest]
        else:
            epochs = []
        epochs += [epoch for epoch in todo.crumb_epochs if todo.crumb_records(epoch) >= batch_size]
        return min(epochs, default=NEW_PASS)

    def _pass_state(self, epoch: int) -> PassState:
        if self.finished:
            return PassState.FINISHED
        return PassState.EPOCH_OVER if self._is_over(epoch) else PassState.OPEN

    def _grants(self, session: str, epoch: int, count: int, batch_size: int) -> Iterator[Grant]:
        if not self.spec.epoch_barrier:  # endless epochs would pile them up
            yield from self._crumb_bundle(session, epoch, batch_size)
        for _ in range(count):
            taken = self._todo.take(epoch, self._lease_limit(epoch, batch_size))
            if taken is None:
                yield from self._crumb_bundle(session, epoch, batch_size)
                return
            yield self._lend(session, taken)

    def _lease_limit(self, epoch: int, batch_size: int) -> int:
        """Guided tail: the waiting records over twice the trainers, in whole batches, at least one."""
        if not self._tail_applies:
            return max(batch_size, self.spec.records_per_shard)
        share = self._todo.waiting(epoch) // (2 * len(self._trainers))
        return max(batch_size, share - share % batch_size)

    @property
    def _tail_applies(self) -> bool:
        spec = self.spec
        return spec.epoch_barrier or self._todo.past_end or self._todo.cursor_epoch + 1 == spec.num_epochs

    def _lend(self, session: str, item: Waiting, bundle: int = 0) -> Grant:
        cut, attempt = item
        task = self._next_task
        self._next_task += 1
        self._leased[task] = Lease(task, attempt, session, cut.epoch, cut.shard, cut.skip, cut.stop, cut.stop)
        self._held.setdefault(session, set()).add(task)
        self._count_unhanded(cut.epoch, 1)
        self._mark("lease", task)
        self._mark("head")
        return Grant(task=task, attempt=attempt, slice=cut, bundle=bundle)

    def _crumb_bundle(self, session: str, epoch: int, batch_size: int) -> Iterator[Grant]:
        records = self._todo.crumb_records(epoch)
        if records < batch_size:
            return
        bundle = self._next_bundle
        self._next_bundle += 1
        for item in self._todo.take_crumbs(epoch, records - records % batch_size):
            yield self._lend(session, item, bundle)

    # Outcomes -------------------------------------------------------------------------------------------

    def check(
        self,
        session: str,
        failures: Iterable[Failure],
        acknowledgements: Iterable[Acknowledgement],
        give_backs: Iterable[GiveBack],
    ) -> None:
        """Raise InvalidArgument if one of these, applied in this order, would; nothing is changed."""
        ahead: dict[int, int] = {}  # task -> where the acknowledged prefix will end
        bad: dict[int, set[int]] = {}
        for failure in failures:
            lease = self._live(session, failure.task, failure.attempt)
            if lease is not None:
                lease.check_failure(failure.position)
                bad.setdefault(failure.task, set()).add(failure.position)
        for done in acknowledgements:
            lease = self._live(session, done.task, done.attempt)
            if lease is not None:
                lease.check_acknowledgement(done.upto)
                ahead[done.task] = max(done.upto, ahead.get(done.task, lease.done))
        for back in give_backs:
            lease = self._live(session, back.task, back.attempt)
            if lease is not None:
                holes = lease.holes | bad.get(back.task, set())
                reached = pass_over(ahead.get(back.task, lease.done), holes)
                if reached < lease.stop:  # else it has ended by then, and there is nothing to give back
                    lease.check_give_back(back.start, reached)

    def count_new(self, session: str, failures: Iterable[Failure]) -> int:
        """How many records these would put into quarantine that are not there yet."""
        new: set[tuple[int, int]] = set()
        for failure in failures:
            lease = self._live(session, failure.task, failure.attempt)
            if lease is not None and lease.is_open(failure.position):
                new.add((failure.task, failure.position))
        return len(new)

    def acknowledge(self, session: str, task: int, attempt: int, upto: int) -> None:
        """Records of the lease below position `upto` were trained on. Monotone; may be repeated.

        Raises StaleLease for a lease that is not this session's any more, InvalidArgument for a position
        outside of it; both leave the state as it was.
        """
        lease = self._find(session, task, attempt)
        if lease is None or upto <= lease.done:
            return
        lease.check_acknowledgement(upto)
        self.acknowledged += upto - lease.done
        if lease.holes:
            self.acknowledged -= lease.pass_holes(upto)
        lease.done = upto
        self._mark("lease", task)
        self._mark("head")
        self._close_if_done(lease)

    def fail(self, session: str, task: int, attempt: int, position: int, reason: str) -> None:
        """Put the record at `position` into quarantine; the lease lives on around it. May be repeated."""
        lease = self._find(session, task, attempt)
        if lease is None or position < lease.done or position in lease.holes:
            return
        lease.check_failure(position)
        if position >= lease.stop:
            return  # given back since: whoever reads it next will say so
        name, index = self.plan.locate(lease.epoch, lease.shard, position)
        self._mark("bad", len(self.quarantine))
        self.quarantine.append(
            QuarantinedRecord(
                epoch=lease.epoch, shard=lease.shard, position=position, name=name, index=index, reason=reason
            )
        )
        lease.holes.add(position)
        self.news += bool(self.failure)
        self._mark("lease", task)
        self._close_if_done(lease)

    def give_back(self, session: str, task: int, attempt: int, start: int, *, crumb: bool = False) -> None:
        """Cut the lease's records from position `start` on and let them wait again. May be repeated."""
        lease = self._find(session, task, attempt)
        if lease is None or start >= lease.stop:
            return
        lease.check_give_back(start, lease.done)
        put = self._todo.put_crumb if crumb else self._todo.put_back
        for item in lease.pieces(start):
            put(item, lease.attempt)
        lease.stop = start
        lease.holes = {hole for hole in lease.holes if hole < start}
        self.news += 1
        self._mark("lease", task)
        self._close_if_done(lease)

    def _find(self, session: str, task: int, attempt: int) -> Lease | None:
        """The live lease, or None when this session has closed it already."""
        lease = self._live(session, task, attempt)
        if lease is not None:
            return lease
        if self._closed.get(session, {}).get(task) == attempt:
            return None
        raise StaleLease(
            f"task {task}, attempt {attempt} of dataset {self.spec.name!r} is not a lease of this session"
        )

    def _live(self, session: str, task: int, attempt: int) -> Lease | None:
        lease = self._leased.get(task)
        mine = lease is not None and lease.session == session and lease.attempt == attempt
        return lease if mine else None

    def _close_if_done(self, lease: Lease) -> None:
        if lease.holes:
            lease.done = pass_over(lease.done, lease.holes)
            lease.pass_holes(lease.done)
        if lease.done == lease.stop:
            self._closed.setdefault(lease.session, {})[lease.task] = lease.attempt
            self._mark("report", lease.session)
            self._held[lease.session].discard(lease.task)
            self._drop_lease(lease)
            self._settle()

    def _drop_lease(self, lease: Lease) -> None:
        del self._leased[lease.task]
        self.news += 1
        self._mark("lease", lease.task)
        if not lease.handed:
            self._count_unhanded(lease.epoch, -1)

    def _count_unhanded(self, epoch: int, change: int) -> None:
        count = self._unhanded.get(epoch, 0) + change
        if count:
            self._unhanded[epoch] = count
        else:
            self._unhanded.pop(epoch, None)

    # Epochs ---------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Move the cursor into the next epoch when this one's pass is over, and drop what fills no batch."""
        todo = self._todo
        if todo.ahead and not todo.crumb_epochs:
            return  # the usual case
        if self.spec.epoch_barrier:
            while not todo.past_end and self._is_over(todo.cursor_epoch):
                todo.next_epoch()
                self.news += 1
        for epoch in todo.crumb_epochs:
            if self._is_over(epoch) and not self._is_lent(epoch):
                self.dropped += todo.drop_crumbs(epoch)
                self.news += 1
                self._mark("head")

    def _is_over(self, epoch: int) -> bool:
        """Whether a pass over the epoch has nothing to wait for but the death of a drained trainer."""
        if self._todo.waiting(epoch):
            return False
        if self._unhanded.get(epoch) if self.spec.epoch_barrier else self._unhanded:
            return False
        return not self._fill_a_batch(self._todo.crumb_records(epoch))

    def _is_lent(self, epoch: int) -> bool:
        if not self.spec.epoch_barrier:
            return bool(self._leased)
        return any(lease.epoch == epoch for lease in self._leased.values())

    def _fill_a_batch(self, crumbs: int) -> bool:
        """Whether crumbs are enough for a trainer that waits and still asks; while none does, for any."""
        if not crumbs:
            return False
        since = self._looks - LOOKS * len(self._trainers)
        sizes = [self._trainers[session] for session, look in self._waiting.items() if look > since]
        return crumbs >= min(sizes or self._trainers.values(), default=1)

    # Tokens ---------------------------------------------------------------------------------------------

    def snapshot(self) -> Token:
        """The whole position: cursor, every slice without outcome, crumbs, quarantine, counts."""
        epoch, position, offset = self._todo.cursor
        lent = [item for _, lease in sorted(self._leased.items()) for item in lease.pieces()]
        return Token(
            identity=identity(self.spec),
            epoch=epoch,
            position=position,
            offset=offset,
            open=(*lent, *self._todo.returned()),
            crumbs=tuple(self._todo.crumbs()),
            quarantine=tuple(self.quarantine),
            acknowledged=self.acknowledged,
            dropped=self.dropped,
        )

    def restore(self, token: Token | None) -> None:
        """Go back to a token's position, or to the beginning, and open a new lineage: all leases are void.

        Raises TokenError for a token of another dataset, or one that fits no position of this one.
        """
        token = token or Token(identity=identity(self.spec))
        token.check(self.spec)
        token.check_within(self.plan)
        self._void_leases()
        self._todo.restore(token)
        for number in range(max(len(self.quarantine), len(token.quarantine))):
            self._mark("bad", number)
        self.quarantine = list(token.quarantine)
        self.acknowledged, self.dropped = token.acknowledged, token.dropped
        self.lineage += 1
        self.news += 1
        self._settle()

    def _void_leases(self) -> None:
        for task in self._leased:
            self._mark("lease", task)
        for session in self._closed:
            self._mark("report", session)
        self._leased.clear()
        self._unhanded.clear()
        self._held.clear()
        self._closed.clear()
        self._waiting.clear()

    # As rows of a journal -------------------------------------------------------------------------------

    @property
    def head(self) -> Head:
        """The ledger's numbers."""
        return Head(
            lineage=self.lineage,
            cursor=self._todo.cursor,
            acknowledged=self.acknowledged,
            dropped=self.dropped,
            next_task=self._next_task,
            next_bundle=self._next_bundle,
        )

    @property
    def tasks(self) -> tuple[int, ...]:
        """The tasks on loan."""
        return tuple(self._leased)

    @property
    def sessions(self) -> tuple[str, ...]:
        """Who has joined and was not released."""
        return tuple(self._trainers)

    @property
    def waiting(self) -> tuple[int, ...]:
        """The numbers of the slices that wait, crumbs included."""
        return tuple(self._todo.numbers())

    def lease_of(self, task: int) -> Lease | None:
        """The live lease of this task."""
        return self._leased.get(task)

    def waiting_slice(self, number: int) -> tuple[bool, Waiting] | None:
        """Whether the slice of this number is a crumb, and the slice; None when it does not wait."""
        return self._todo.find(number)

    def batch_size_of(self, session: str) -> int | None:
        """The session's batch size; None when it does not take part."""
        return self._trainers.get(session)

    def closed_by(self, session: str) -> Mapping[int, int]:
        """Tasks, and their attempts, that the session has ended since its last report."""
        return self._closed.get(session, {})

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
        """Become what the properties and methods above said of another ledger; for a new one.

        Which sessions wait is not remembered: those that still do will ask again.
        """
        self.lineage, self.acknowledged, self.dropped = head.lineage, head.acknowledged, head.dropped
        self._next_task, self._next_bundle = head.next_task, head.next_bundle
        self._todo.resume(head.cursor, waiting)
        self.quarantine = list(quarantine)
        self._trainers.update(batch_sizes)
        self._closed.update(closed)
        for lease in sorted(leases, key=lambda lease: lease.task):
            self._leased[lease.task] = lease
            self._held.setdefault(lease.session, set()).add(lease.task)
            if not lease.handed:
                self._count_unhanded(lease.epoch, 1)
