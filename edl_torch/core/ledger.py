"""The ledger of one dataset: which records wait, which are lent, which have an outcome.

Pure state: no clock, no I/O, no transport. What has an outcome is what remains, so the state is as small
as what is in flight. It must not know sessions' liveness; it is told who joins and who is released.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from edl_torch.core.calls import NEW_PASS, Grant, PassState, QuarantinedRecord
from edl_torch.core.identity import identity
from edl_torch.core.plan import Plan
from edl_torch.core.token import Token
from edl_torch.errors import InvalidArgument, SessionLost, StaleLease, TooManyBadRecords
from edl_torch.shard import DatasetSpec, Slice


@dataclass(slots=True)
class Lease:
    """A slice on loan. Records below `done` have an outcome; `holes` above it are in quarantine."""

    task: int
    attempt: int
    session: str
    epoch: int
    shard: int
    done: int
    stop: int
    handed: bool = False
    holes: set[int] = field(default_factory=set)

    @property
    def open_records(self) -> int:
        """Records that have no outcome yet."""
        return self.stop - self.done - len(self.holes)


@dataclass(slots=True)
class Returned:
    """A slice that waits to be lent again, for the `attempt`-th time."""

    slice: Slice
    attempt: int


class ShardLedger:
    """One dataset's slices: `todo` is a cursor over positions and a small queue, `leased` a dict by task."""

    def __init__(self, spec: DatasetSpec) -> None:
        self.plan = Plan(spec)
        self.lineage = 1
        self.failure = ""
        self.quarantine: list[QuarantinedRecord] = []
        self.acknowledged = 0
        self.dropped = 0
        self._trainers: dict[str, int] = {}  # session -> batch size
        self._held: dict[str, set[int]] = {}  # session -> tasks
        self._closed: dict[str, dict[int, int]] = {}  # session -> task -> attempt, since its last report
        self._leased: dict[int, Lease] = {}
        self._returned: dict[int, deque[Returned]] = {}  # epoch -> slices
        self._crumbs: deque[Returned] = deque()
        self._unhanded: dict[int, int] = {}  # epoch -> leases that may still produce batches
        self._next_task = 1
        self._next_bundle = 1
        self._epoch = 0
        self._position = 0  # of the next shard in the epoch's order
        self._offset = 0  # of the next record in that shard
        self._ahead = self.plan.size  # records of the epoch that the cursor has not passed

    # What it is -----------------------------------------------------------------------------------------

    @property
    def spec(self) -> DatasetSpec:
        """The dataset as registered."""
        return self.plan.spec

    def respecify(self, spec: DatasetSpec) -> None:
        """Take other job options, or an in-shard shuffle that was left open; the plan stays what it is."""
        self.plan = Plan(spec)
        self._settle()

    @property
    def epoch(self) -> int:
        """The epoch that the next pass reads: the oldest with waiting records, else the cursor's."""
        return min(self._returned, default=self._epoch)

    @property
    def finished(self) -> bool:
        """Whether every record of every epoch has an outcome."""
        return self._past_end and not (self._leased or self._returned or self._crumbs)

    @property
    def todo(self) -> int:
        """Records of the epochs begun that wait to be lent, crumbs included."""
        waiting = sum(r.slice.limit for queue in self._returned.values() for r in queue)
        return self._cursor_records + waiting + self._crumb_records

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
        """Shards of the epoch with records that wait or are on loan."""
        if self._past_end:
            ahead = 0
        else:
            ahead = self.plan.num_shards - self._position
        begun = {(lease.epoch, lease.shard) for lease in self._leased.values()}
        begun.update((r.slice.epoch, r.slice.shard) for r in self._waiting())
        if self._offset:
            begun.discard((self._epoch, self.plan.shard_at(self._epoch, self._position)))
        return ahead + len(begun)

    @property
    def trainers(self) -> int:
        """Sessions that have joined and were not released."""
        return len(self._trainers)

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

    def release(self, session: str) -> tuple[Slice, ...]:
        """A session is gone: the rest of all it held waits again. Returns those slices."""
        self._trainers.pop(session, None)
        self._closed.pop(session, None)
        lost: list[Slice] = []
        for task in sorted(self._held.pop(session, ())):
            lease = self._leased[task]
            lost += self._return(lease, lease.done)
            self._drop_lease(lease)
        self._settle()
        return tuple(lost)

    def confirm(self, session: str) -> None:
        """A newer report arrived: the answers to the ones before it are known to the session."""
        self._closed.pop(session, None)

    # Lending --------------------------------------------------------------------------------------------

    def lease(
        self, session: str, *, epoch: int, count: int, drained: bool = False
    ) -> tuple[int, PassState, tuple[Grant, ...]]:
        """Lend up to `count` slices of a pass over `epoch` (NEW_PASS: of the pass that begins now).

        Returns the pass's epoch, its state, and the grants. Raises StaleLease for an unknown session and
        TooManyBadRecords when the job has failed.
        """
        batch_size = self._batch_size(session)
        if self.failure:
            raise TooManyBadRecords(self.failure)
        if drained:
            self._hand_over(session, epoch)
        self._settle()
        if epoch == NEW_PASS:
            epoch = self._open_pass()
        if epoch == NEW_PASS:
            return epoch, PassState.FINISHED if self.finished else PassState.OPEN, ()
        grants = tuple(self._grants(session, epoch, count, batch_size))
        if grants:
            return epoch, PassState.OPEN, grants
        return epoch, self._pass_state(epoch), ()

    def _open_pass(self) -> int:
        if self._returned or not self._past_end:
            return self.epoch
        return NEW_PASS if not self._crumbs else self._crumbs[0].slice.epoch

    def _pass_state(self, epoch: int) -> PassState:
        if self.finished:
            return PassState.FINISHED
        return PassState.EPOCH_OVER if self._is_over(epoch) else PassState.OPEN

    def _is_over(self, epoch: int) -> bool:
        if not self.spec.epoch_barrier or epoch == self._epoch:
            return False  # a barrier epoch is over when `_settle` has moved the cursor past it
        return epoch not in self._returned and not self._unhanded.get(epoch)

    def _batch_size(self, session: str) -> int:
        try:
            return self._trainers[session]
        except KeyError:
            raise SessionLost(
                f"session {session!r} does not take part in dataset {self.spec.name!r}: it was released; register again"
            ) from None

    def _grants(self, session: str, epoch: int, count: int, batch_size: int) -> Iterator[Grant]:
        for _ in range(count):
            taken = self._take(epoch, self._lease_limit(batch_size))
            if taken is None:
                yield from self._crumb_bundle(session, batch_size)
                return
            yield self._lend(session, taken)

    def _lease_limit(self, batch_size: int) -> int:
        """Guided tail: the waiting records over twice the trainers, in whole batches, at least one."""
        if not self._tail_applies:
            return max(batch_size, self.spec.records_per_shard)
        waiting = self._cursor_records + sum(r.slice.limit for q in self._returned.values() for r in q)
        share = waiting // (2 * len(self._trainers))
        return max(batch_size, share - share % batch_size)

    @property
    def _tail_applies(self) -> bool:
        return self.spec.epoch_barrier or self._epoch + 1 == self.spec.num_epochs or self._past_end

    def _take(self, epoch: int, limit: int) -> Returned | None:
        if not self.spec.epoch_barrier:
            epoch = self.epoch
        if epoch in self._returned:
            return self._take_returned(epoch, limit)
        if epoch == self._epoch and self._cursor_records:
            return self._take_ahead(limit)
        return None

    def _take_returned(self, epoch: int, limit: int) -> Returned:
        queue = self._returned[epoch]
        item = queue[0]
        if item.slice.limit <= limit:
            queue.popleft()
            if not queue:
                del self._returned[epoch]
            return item
        head, tail = split(item.slice, limit)
        queue[0] = Returned(tail, item.attempt)
        return Returned(head, item.attempt)

    def _take_ahead(self, limit: int) -> Returned:
        shard = self.plan.shard_at(self._epoch, self._position)
        length = self.plan.length(shard)
        taken = Slice(epoch=self._epoch, shard=shard, skip=self._offset, limit=min(limit, length - self._offset))
        self._ahead -= taken.limit
        self._offset = taken.stop
        if taken.stop == length:
            self._position, self._offset = self._position + 1, 0
        if not self.spec.epoch_barrier and not self._ahead:
            self._next_epoch()
        return Returned(taken, 1)

    def _lend(self, session: str, item: Returned, bundle: int = 0) -> Grant:
        cut = item.slice
        task = self._next_task
        self._next_task += 1
        self._leased[task] = Lease(task, item.attempt, session, cut.epoch, cut.shard, cut.skip, cut.stop)
        self._held.setdefault(session, set()).add(task)
        self._unhanded[cut.epoch] = self._unhanded.get(cut.epoch, 0) + 1
        return Grant(task=task, attempt=item.attempt, slice=cut, bundle=bundle)

    # Crumbs: less than a batch, kept until they fill one -----------------------------------------------------

    @property
    def _crumb_records(self) -> int:
        return sum(r.slice.limit for r in self._crumbs)

    def _crumb_bundle(self, session: str, batch_size: int) -> Iterator[Grant]:
        wanted = self._crumb_records // batch_size * batch_size
        bundle = self._next_bundle
        self._next_bundle += 1
        while wanted:
            item = self._crumbs.popleft()
            if item.slice.limit > wanted:
                head, tail = split(item.slice, wanted)
                self._crumbs.appendleft(Returned(tail, item.attempt))
                item = Returned(head, item.attempt)
            wanted -= item.slice.limit
            yield self._lend(session, item, bundle)

    @property
    def _crumbs_are_done_for(self) -> bool:
        if not self._crumbs:
            return True
        return bool(self._trainers) and self._crumb_records < min(self._trainers.values())

    # Outcomes -------------------------------------------------------------------------------------------

    def acknowledge(self, session: str, task: int, attempt: int, upto: int) -> None:
        """Records of the lease below position `upto` were trained on. Monotone; may be repeated.

        Raises StaleLease for a lease that is not this session's any more, InvalidArgument for a position
        outside of it; both leave the state as it was.
        """
        lease = self._find(session, task, attempt)
        if lease is None or upto <= lease.done:
            return
        if upto > lease.stop:
            raise InvalidArgument(f"task {task} ends at position {lease.stop}; {upto} cannot be acknowledged")
        passed = {hole for hole in lease.holes if hole < upto}
        self.acknowledged += upto - lease.done - len(passed)
        lease.holes -= passed
        lease.done = upto
        self._close_if_done(lease)

    def fail(self, session: str, task: int, attempt: int, position: int, reason: str) -> None:
        """Put the record at `position` into quarantine; the lease lives on around it. May be repeated."""
        lease = self._find(session, task, attempt)
        if lease is None or position < lease.done or position in lease.holes:
            return
        if position >= lease.stop:
            raise InvalidArgument(f"task {task} ends at position {lease.stop}; {position} cannot fail")
        name, index = self.plan.locate(lease.epoch, lease.shard, position)
        self.quarantine.append(
            QuarantinedRecord(
                epoch=lease.epoch, shard=lease.shard, position=position, name=name, index=index, reason=reason
            )
        )
        self._check_quarantine()
        lease.holes.add(position)
        self._close_if_done(lease)

    def give_back(self, session: str, task: int, attempt: int, start: int, *, crumb: bool = False) -> None:
        """Cut the lease's records from position `start` on and let them wait again. May be repeated."""
        lease = self._find(session, task, attempt)
        if lease is None or start >= lease.stop:
            return
        if start < lease.done:
            raise InvalidArgument(f"task {task} is acknowledged up to {lease.done}; {start} cannot be given back")
        if crumb:
            self._crumbs.extend(Returned(s, lease.attempt) for s in pieces(lease, start))
        else:
            self._return(lease, start, attempt=lease.attempt)
        lease.stop = start
        lease.holes = {hole for hole in lease.holes if hole < start}
        self._close_if_done(lease)

    def _check_quarantine(self) -> None:
        allowed = self.spec.max_bad_records
        if len(self.quarantine) <= allowed:
            return
        last = self.quarantine[-1]
        self.failure = (
            f"dataset {self.spec.name!r} has {len(self.quarantine)} bad record(s), max_bad_records is {allowed}; "
            f"the last is record {last.index} of {last.name!r}: {last.reason}"
        )

    def _find(self, session: str, task: int, attempt: int) -> Lease | None:
        """The live lease, or None when this session has closed it already."""
        lease = self._leased.get(task)
        if lease is not None and lease.session == session and lease.attempt == attempt:
            return lease
        if self._closed.get(session, {}).get(task) == attempt:
            return None
        raise StaleLease(f"task {task}, attempt {attempt} of dataset {self.spec.name!r} is not a lease of this session")

    def _close_if_done(self, lease: Lease) -> None:
        while lease.done in lease.holes:
            lease.holes.discard(lease.done)
            lease.done += 1
        if lease.done == lease.stop:
            self._closed.setdefault(lease.session, {})[lease.task] = lease.attempt
            self._held[lease.session].discard(lease.task)
            self._drop_lease(lease)
            self._settle()

    def _drop_lease(self, lease: Lease) -> None:
        del self._leased[lease.task]
        if not lease.handed:
            self._count_unhanded(lease.epoch, -1)

    def _count_unhanded(self, epoch: int, change: int) -> None:
        count = self._unhanded.get(epoch, 0) + change
        if count:
            self._unhanded[epoch] = count
        else:
            self._unhanded.pop(epoch, None)

    def _return(self, lease: Lease, start: int, attempt: int | None = None) -> list[Slice]:
        attempt = lease.attempt + 1 if attempt is None else attempt
        slices = list(pieces(lease, start))
        if slices:
            queue = self._returned.setdefault(lease.epoch, deque())
            queue.extend(Returned(s, attempt) for s in slices)
        return slices

    # Epochs ---------------------------------------------------------------------------------------------

    @property
    def _past_end(self) -> bool:
        return 0 < self.spec.num_epochs <= self._epoch

    @property
    def _cursor_records(self) -> int:
        return 0 if self._past_end else self._ahead

    def _hand_over(self, session: str, epoch: int) -> None:
        """The session is drained: what it still holds of the epoch are batches that its loop has."""
        for task in self._held.get(session, ()):
            lease = self._leased[task]
            if lease.epoch == epoch and not lease.handed:
                lease.handed = True
                self._count_unhanded(epoch, -1)

    def _settle(self) -> None:
        """Move the cursor into the next epoch when this one has nothing left to hand out."""
        while not self._past_end and not self._ahead and self.spec.epoch_barrier:
            if self._epoch in self._returned or self._unhanded.get(self._epoch) or not self._crumbs_are_done_for:
                return
            self._drop_crumbs()
            self._next_epoch()
        if self._past_end and not (self._leased or self._returned) and self._crumbs_are_done_for:
            self._drop_crumbs()

    def _drop_crumbs(self) -> None:
        self.dropped += self._crumb_records
        self._crumbs.clear()

    def _next_epoch(self) -> None:
        self._epoch += 1
        self._position = self._offset = 0
        self._ahead = self.plan.size

    # Tokens ---------------------------------------------------------------------------------------------

    def _waiting(self) -> Iterator[Returned]:
        for epoch in sorted(self._returned):
            yield from self._returned[epoch]

    def snapshot(self) -> Token:
        """The whole position: cursor, every slice without outcome, crumbs, quarantine, counts."""
        lent = [s for _, lease in sorted(self._leased.items()) for s in pieces(lease, lease.done)]
        return Token(
            identity=identity(self.spec),
            epoch=self._epoch,
            position=self._position,
            offset=self._offset,
            open=tuple(lent + [r.slice for r in self._waiting()]),
            crumbs=tuple(r.slice for r in self._crumbs),
            quarantine=tuple(self.quarantine),
            acknowledged=self.acknowledged,
            dropped=self.dropped,
        )

    def restore(self, token: Token | None) -> None:
        """Go back to a token's position, or to the beginning, and open a new lineage: all leases are void."""
        token = token or Token(identity=identity(self.spec))
        token.check(self.spec)
        self._void_leases()
        self._epoch, self._position, self._offset = token.epoch, token.position, token.offset
        self._ahead = self.plan.size - self.plan.records_before(token.epoch, token.position) - token.offset
        self._returned = queue_up(token.open)
        self._crumbs = deque(Returned(s, 1) for s in token.crumbs)
        self.quarantine = list(token.quarantine)
        self.acknowledged, self.dropped, self.failure = token.acknowledged, token.dropped, ""
        self.lineage += 1
        self._settle()

    def _void_leases(self) -> None:
        self._leased.clear()
        self._unhanded.clear()
        self._held.clear()
        self._closed.clear()


def split(whole: Slice, limit: int) -> tuple[Slice, Slice]:
    """Cut a slice after its first `limit` records."""
    head = replace(whole, limit=limit)
    return head, replace(whole, skip=whole.skip + limit, limit=whole.limit - limit)


def pieces(lease: Lease, start: int) -> Iterator[Slice]:
    """The records of a lease from position `start` that have no outcome: one slice between each two holes."""
    edges = sorted(hole for hole in lease.holes if hole >= start)
    for stop in [*edges, lease.stop]:
        if stop > start:
            yield Slice(epoch=lease.epoch, shard=lease.shard, skip=start, limit=stop - start)
        start = stop + 1


def queue_up(slices: Iterable[Slice]) -> dict[int, deque[Returned]]:
    """Slices by epoch, in the order given."""
    queues: dict[int, deque[Returned]] = {}
    for item in slices:
        queues.setdefault(item.epoch, deque()).append(Returned(item, 1))
    return queues
