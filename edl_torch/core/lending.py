"""Choice of the next leases: slices that came back, then those at the cursor, smaller ones towards the end.

Towards the end throughput decides: all trainers would wait for the batches that a slow one has read ahead.
Only sizes and order are decided here; the ledger decides whether a session may be lent anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from edl_torch.core.backlog import Backlog, Waiting
from edl_torch.core.calls import NEW_PASS, Grant
from edl_torch.core.leases import Leases
from edl_torch.core.members import Participants

FAR = 64  # of the largest leases: a session with a larger share to come is lent such ones


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """Request of a session for up to `count` slices of a pass over `epoch`; `ahead` of its need, or not."""

    session: str
    epoch: int
    count: int
    batch_size: int
    ahead: bool


@dataclass(slots=True)
class Quota:
    """Limit on the records of a session when the end is near, so that all sessions finish together.

    `share` is the part of all records without outcome that the session would train on at its throughput if
    all trainers took part; `share_now`, if only those did that hold records: others may not come for long.
    `held` are the records that it holds, `shown` those that it has trained on so far.
    """

    share: float
    share_now: float
    held: int
    shown: int
    request: LeaseRequest
    sessions: int

    def limit(self, waiting: int) -> int:
        """Return the size of the next lease, in whole batches; 0 where it reads ahead and has its share."""
        size = self.request.batch_size
        if self.request.ahead and self.held and self.held + size / 2 > self.share_now:
            return 0
        # Half of what is left of its share, because throughput changes; and no more than twice what it has
        # shown, because at first nobody knows which trainer is slow.
        most = min((self.share - self.held) / 2, 2 * self.shown - self.held, waiting / (2 * self.sessions))
        return max(1, int(most / size)) * size


class Lending:
    """Moves slices from `backlog` to `leases`; remainders in bundles that make whole batches."""

    def __init__(self, backlog: Backlog, leases: Leases, participants: Participants) -> None:
        self.next_bundle = 1
        self._backlog = backlog
        self._leases = leases
        self._participants = participants

    def open_pass(self, batch_size: int) -> int:
        """Return the oldest epoch with something for a trainer of this batch size; NEW_PASS for none."""
        backlog = self._backlog
        epochs = [] if backlog.past_end and not backlog.returned_records else [backlog.oldest]
        epochs += [
            epoch for epoch in backlog.remainder_epochs if backlog.remainder_records(epoch) >= batch_size
        ]
        return min(epochs, default=NEW_PASS)

    def grants(self, request: LeaseRequest, leased: Callable[[], int]) -> Iterator[Grant]:
        """Lend what is asked for; where slices run out, a bundle of remainders. `leased` counts lent ones."""
        session, epoch, batch_size = request.session, request.epoch, request.batch_size
        barrier = self._backlog.plan.spec.epoch_barrier
        if not barrier:  # endless epochs would pile them up
            yield from self._remainder_bundle(session, epoch, batch_size)
        quota = self._quota(request, leased)
        largest = self._largest(request)
        for _ in range(request.count):
            limit = quota.limit(self._backlog.waiting(epoch)) if quota else self._limit(epoch, batch_size)
            if not limit:
                return
            taken = self._backlog.take(epoch, min(limit, largest))
            if taken is None:
                if barrier:
                    yield from self._remainder_bundle(session, epoch, batch_size)
                return
            if quota is not None:
                quota.held += taken.slice.limit
            yield self._lend(session, taken, 0)

    def _quota(self, request: LeaseRequest, leased: Callable[[], int]) -> Quota | None:
        """Return None while the end is far off, and for the only trainer."""
        if not self._tail_applies or len(self._participants) == 1:
            return None
        throughput, waiting = self._participants.throughput, self._backlog.waiting(request.epoch)
        far = FAR * self._backlog.plan.spec.largest_lease
        if throughput.share(request.session, waiting) > far:
            return None  # mostly: what is lent need not be counted
        share = throughput.share(request.session, waiting + leased())
        if share > far:
            return None
        return Quota(
            share=share,
            share_now=share * len(self._participants) / max(1, self._leases.holders),
            held=self._held_by(request.session),
            shown=throughput.shown(request.session),
            request=request,
            sessions=len(self._participants),
        )

    def _limit(self, epoch: int, batch_size: int) -> int:
        """Guided self-scheduling: the waiting records over twice the trainers, in whole batches."""
        if not self._tail_applies:
            return max(batch_size, self._backlog.plan.spec.largest_lease)
        return self._share(self._backlog.waiting(epoch), batch_size)

    def _largest(self, request: LeaseRequest) -> int:
        """Return the most records of a lease: those of a shard or of a window, whichever ends first.

        A trainer that has shown little is lent a shard, not a window, because others may come.
        """
        spec, batch_size = self._backlog.plan.spec, request.batch_size
        if spec.largest_lease == spec.records_per_shard:
            return max(batch_size, spec.records_per_shard)
        shown = 2 * self._participants.throughput.shown(request.session) - self._held_by(request.session)
        most = max(spec.records_per_shard, min(shown, spec.largest_lease))
        return max(batch_size, most - most % batch_size)

    def _held_by(self, session: str) -> int:
        return sum(lease.open_records for lease in self._leases.of(session))

    @property
    def _tail_applies(self) -> bool:
        backlog, spec = self._backlog, self._backlog.plan.spec
        return spec.epoch_barrier or backlog.past_end or backlog.cursor_epoch + 1 == spec.num_epochs

    def _share(self, records: int, batch_size: int) -> int:
        share = records // (2 * len(self._participants))
        return max(batch_size, share - share % batch_size)

    def _lend(self, session: str, item: Waiting, bundle: int) -> Grant:
        task = self._leases.lend(session, item)
        return Grant(task=task, attempt=item.attempt, slice=item.slice, bundle=bundle)

    def _remainder_bundle(self, session: str, epoch: int, batch_size: int) -> Iterator[Grant]:
        records = self._backlog.remainder_records(epoch)
        if records < batch_size:
            return
        bundle = self.next_bundle
        self.next_bundle += 1
        # Not all to the first that asks: remainders of ten thousand trainers are thousands of batches.
        for item in self._backlog.take_remainders(epoch, self._share(records, batch_size)):
            yield self._lend(session, item, bundle)

    def __repr__(self) -> str:
        return f"<Lending {self._backlog!r} {self._leases!r}>"
