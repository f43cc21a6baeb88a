"""What a session is lent next: slices that came back, then the cursor's, ever smaller ones towards the end.

Towards the end it looks at paces: for batches that a slow trainer has read ahead all others would wait. It
decides about sizes and order alone. Whether a session may be lent anything is the ledger's business.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from edl_torch.core.calls import NEW_PASS, Grant
from edl_torch.core.loans import Loans
from edl_torch.core.participants import Participants
from edl_torch.core.todo import Todo, Waiting

FAR = 64  # shards: who has more than so many to come is lent whole ones


@dataclass(frozen=True, slots=True)
class Wish:
    """A session asks for up to `count` slices of a pass over `epoch`; `ahead` of its need, or not."""

    session: str
    epoch: int
    count: int
    batch_size: int
    ahead: bool


@dataclass(slots=True)
class Room:
    """What else a session may have when the end is near, so that all come to it together.

    `share` is what it would train on of all that has no outcome, at the pace that it has shown, were all
    trainers at it; `share_now`, were those alone at it that hold records: others may not come for long.
    """

    share: float
    share_now: float
    held: int
    shown: int
    wish: Wish
    sessions: int

    def limit(self, waiting: int) -> int:
        """Records of its next lease, in whole batches; 0 for who asks ahead of its need and has its share."""
        size = self.wish.batch_size
        if self.wish.ahead and self.held and self.held + size / 2 > self.share_now:
            return 0
        # Half of what is left of its share, for paces change; and no more than twice what it has shown, for
        # at first nobody knows who is slow.
        most = min((self.share - self.held) / 2, 2 * self.shown - self.held, waiting / (2 * self.sessions))
        return max(1, int(most / size)) * size


class Lending:
    """Moves slices from `todo` to `loans`. Remainders go together, in bundles that make whole batches."""

    def __init__(self, todo: Todo, loans: Loans, participants: Participants) -> None:
        self.next_bundle = 1
        self._todo = todo
        self._loans = loans
        self._participants = participants

    def open_pass(self, batch_size: int) -> int:
        """The oldest epoch that has something for a trainer with this batch size; NEW_PASS for none."""
        todo = self._todo
        epochs = [] if todo.past_end and not todo.returned_records else [todo.oldest]
        epochs += [epoch for epoch in todo.remainder_epochs if todo.remainder_records(epoch) >= batch_size]
        return min(epochs, default=NEW_PASS)

    def grants(self, wish: Wish, leased: int) -> Iterator[Grant]:
        """Lend what is asked for; where slices run out, a bundle of remainders. `leased` records are lent."""
        session, epoch, batch_size = wish.session, wish.epoch, wish.batch_size
        barrier = self._todo.plan.spec.epoch_barrier
        if not barrier:  # endless epochs would pile them up
            yield from self._remainder_bundle(session, epoch, batch_size)
        room = self._room(wish, leased)
        for _ in range(wish.count):
            limit = self._limit(epoch, batch_size) if room is None else room.limit(self._todo.waiting(epoch))
            if not limit:
                return
            taken = self._todo.take(epoch, limit)
            if taken is None:
                if barrier:
                    yield from self._remainder_bundle(session, epoch, batch_size)
                return
            if room is not None:
                room.held += taken.slice.limit
            yield self._lend(session, taken, 0)

    def _room(self, wish: Wish, leased: int) -> Room | None:
        """None while the end is far off, or for who is alone."""
        if not self._tail_applies or len(self._participants) == 1:
            return None
        paces = self._participants.paces
        share = paces.share(wish.session, self._todo.waiting(wish.epoch) + leased)
        if share > FAR * self._todo.plan.spec.records_per_shard:
            return None
        return Room(
            share=share,
            share_now=share * len(self._participants) / max(1, self._loans.holders),
            held=sum(lease.open_records for lease in self._loans.of(wish.session)),
            shown=paces.shown(wish.session),
            wish=wish,
            sessions=len(self._participants),
        )

    def _limit(self, epoch: int, batch_size: int) -> int:
        """Guided tail: the waiting records over twice the trainers, in whole batches, at least one."""
        if not self._tail_applies:
            return max(batch_size, self._todo.plan.spec.records_per_shard)
        return self._share(self._todo.waiting(epoch), batch_size)

    @property
    def _tail_applies(self) -> bool:
        todo, spec = self._todo, self._todo.plan.spec
        return spec.epoch_barrier or todo.past_end or todo.cursor_epoch + 1 == spec.num_epochs

    def _share(self, records: int, batch_size: int) -> int:
        share = records // (2 * len(self._participants))
        return max(batch_size, share - share % batch_size)

    def _lend(self, session: str, item: Waiting, bundle: int) -> Grant:
        task = self._loans.lend(session, item)
        return Grant(task=task, attempt=item.attempt, slice=item.slice, bundle=bundle)

    def _remainder_bundle(self, session: str, epoch: int, batch_size: int) -> Iterator[Grant]:
        records = self._todo.remainder_records(epoch)
        if records < batch_size:
            return
        bundle = self.next_bundle
        self.next_bundle += 1
        # Not all to who asks first: remainders of ten thousand trainers are thousands of batches.
        for item in self._todo.take_remainders(epoch, self._share(records, batch_size)):
            yield self._lend(session, item, bundle)

    def __repr__(self) -> str:
        return f"<Lending {self._todo!r} {self._loans!r}>"
