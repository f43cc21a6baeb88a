"""What a session is lent next: slices that came back, then the cursor's, ever smaller ones towards the end.

It decides about sizes and order alone. Whether a session may be lent anything is the ledger's business.
"""

from __future__ import annotations

from collections.abc import Iterator

from edl_torch.core.calls import NEW_PASS, Grant
from edl_torch.core.loans import Loans
from edl_torch.core.participants import Participants
from edl_torch.core.todo import Todo, Waiting


class Lending:
    """Moves slices from `todo` to `loans`. Crumbs go together, in bundles that make whole batches."""

    def __init__(self, todo: Todo, loans: Loans, participants: Participants) -> None:
        self.next_bundle = 1
        self._todo = todo
        self._loans = loans
        self._participants = participants

    def open_pass(self, batch_size: int) -> int:
        """The oldest epoch that has something for a trainer with this batch size; NEW_PASS for none."""
        todo = self._todo
        epochs = [] if todo.past_end and not todo.returned_records else [todo.oldest]
        epochs += [epoch for epoch in todo.crumb_epochs if todo.crumb_records(epoch) >= batch_size]
        return min(epochs, default=NEW_PASS)

    def grants(self, session: str, epoch: int, count: int, batch_size: int) -> Iterator[Grant]:
        """Lend up to `count` slices of a pass over `epoch`, and a bundle of crumbs where they run out."""
        barrier = self._todo.plan.spec.epoch_barrier
        if not barrier:  # endless epochs would pile them up
            yield from self._crumb_bundle(session, epoch, batch_size)
        for _ in range(count):
            taken = self._todo.take(epoch, self._limit(epoch, batch_size))
            if taken is None:
                if barrier:
                    yield from self._crumb_bundle(session, epoch, batch_size)
                return
            yield self._lend(session, taken, 0)

    def _limit(self, epoch: int, batch_size: int) -> int:
        """Guided tail: the waiting records over twice the trainers, in whole batches, at least one."""
        todo, spec = self._todo, self._todo.plan.spec
        if spec.epoch_barrier or todo.past_end or todo.cursor_epoch + 1 == spec.num_epochs:
            return self._share(todo.waiting(epoch), batch_size)
        return max(batch_size, spec.records_per_shard)

    def _share(self, records: int, batch_size: int) -> int:
        share = records // (2 * len(self._participants))
        return max(batch_size, share - share % batch_size)

    def _lend(self, session: str, item: Waiting, bundle: int) -> Grant:
        task = self._loans.lend(session, item)
        return Grant(task=task, attempt=item.attempt, slice=item.slice, bundle=bundle)

    def _crumb_bundle(self, session: str, epoch: int, batch_size: int) -> Iterator[Grant]:
        records = self._todo.crumb_records(epoch)
        if records < batch_size:
            return
        bundle = self.next_bundle
        self.next_bundle += 1
        # Not all to who asks first: crumbs of ten thousand trainers are thousands of batches.
        for item in self._todo.take_crumbs(epoch, self._share(records, batch_size)):
            yield self._lend(session, item, bundle)

    def __repr__(self) -> str:
        return f"<Lending {self._todo!r} {self._loans!r}>"
