"""Records that wait to be lent: those ahead of a cursor, slices that came back, and remainders.

A remainder is less than a batch: it waits until there is enough of them for a whole one.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from edl_torch.core.changes import Mark, unrecorded
from edl_torch.core.mixture import first_turn
from edl_torch.core.permutation import MAX_SIZE
from edl_torch.core.plan import Plan
from edl_torch.core.token import Token
from edl_torch.shard import Slice

WINDOWS_AT_ONCE = 256  # of the order, computed together


class Waiting(NamedTuple):
    """Slice that waits to be lent; it was taken from `attempt - 1` sessions, and may have been given back."""

    slice: Slice
    attempt: int


class SliceQueue:
    """Slices by the number under which they came back, and how many records they have together."""

    __slots__ = ("_items", "_mark", "records")

    def __init__(self, mark: Mark) -> None:
        self.records = 0
        self._mark = mark
        self._items: OrderedDict[int, Waiting] = OrderedDict()

    def put(self, number: int, item: Waiting) -> None:
        """Add a slice at the end."""
        self._items[number] = item
        self.records += item.slice.limit
        self._mark("waiting", number)

    def take(self, limit: int, turn: int = 1) -> Waiting:
        """Return the first slice; when it has more than `limit` records, its first `limit`, and what follows
        in the last one's turn."""
        number = next(iter(self._items))
        item = self._items[number]
        limit = to_turns_end(item.slice.skip, limit, turn)
        if item.slice.limit <= limit:
            del self._items[number]
        else:
            head, tail = split(item.slice, limit)
            item, self._items[number] = Waiting(head, item.attempt), Waiting(tail, item.attempt)
        self.records -= item.slice.limit
        self._mark("waiting", number)
        return item

    def clear(self) -> None:
        """Forget all slices."""
        for number in self._items:
            self._mark("waiting", number)
        self._items.clear()
        self.records = 0

    def find(self, number: int) -> Waiting | None:
        """Return the slice that came back under this number, while it waits."""
        return self._items.get(number)

    def numbers(self) -> Iterator[int]:
        """Return the numbers of all slices, in order."""
        return iter(self._items)

    def __iter__(self) -> Iterator[Slice]:
        return (item.slice for item in self._items.values())

    def __repr__(self) -> str:
        return f"<SliceQueue slices={len(self._items)} records={self.records}>"


class Backlog:
    """Records of the epochs begun that are not lent and have no outcome.

    A pass over an epoch reads that epoch's records only; without `spec.epoch_barrier` it reads whatever is
    oldest. `cursor_epoch` is the epoch that the cursor is in, and `num_epochs` at the end of the last.
    """

    def __init__(self, plan: Plan, mark: Mark = unrecorded) -> None:
        self._mark = mark
        self.cursor_epoch = 0
        self.first_epoch = 0  # of these data; those before were of others
        self._position = 0  # of the next window in the epoch's order
        self._offset = 0  # of the next record in that window
        self._ahead = plan.size  # records of the epoch that the cursor has not passed
        self._next_windows: deque[int] = deque()  # the windows from `_position` on, as far as computed
        self._returned: dict[int, SliceQueue] = {}  # by epoch, none empty
        self._remainders: dict[int, SliceQueue] = {}  # by epoch, none empty
        self._next_number = 1  # of a slice that comes back
        self.plan = plan
        self.replan(plan)

    def replan(self, plan: Plan) -> None:
        """Take a plan with maybe other options; with another order only before anything was lent.

        One with another size is of a mixture, which ends elsewhere, and not before the cursor.
        """
        self._ahead += plan.size - self.plan.size
        self.plan = plan
        self._next_windows.clear()
        self._barrier = plan.spec.epoch_barrier
        # Endless ends at 2**62 records, which no job reaches: a count of records fits everywhere.
        most = MAX_SIZE // plan.size
        self._num_epochs = min(plan.spec.num_epochs or most, most)
        self._run_on()

    def _run_on(self) -> None:
        """Move on from the end of an epoch, where only a barrier holds the cursor."""
        if not (self._barrier or self._ahead or self.past_end):
            self.next_epoch()

    # The cursor -----------------------------------------------------------------------------------------

    @property
    def past_end(self) -> bool:
        """Whether the cursor has passed the last epoch."""
        return self._num_epochs <= self.cursor_epoch

    @property
    def cursor(self) -> tuple[int, int, int]:
        """Epoch, position of the next window in its order, and the next record in that window."""
        return self.cursor_epoch, self._position, self._offset

    @property
    def ahead(self) -> int:
        """Records of the cursor's epoch that it has not passed."""
        return self._ahead if self.cursor_epoch < self._num_epochs else 0

    def passed_of(self, epoch: int) -> int:
        """Return how many records of an epoch lie before the cursor."""
        return self.plan.size - self._ahead if epoch == self.cursor_epoch else self.plan.size

    @property
    def shards_ahead(self) -> int:
        """Shards of the cursor's epoch that have records ahead of it."""
        return 0 if self.past_end else max(0, self.plan.num_shards - self._position * self.plan.window)

    @property
    def cut(self) -> tuple[int, int] | None:
        """Epoch and number of the window that the cursor stands in the middle of."""
        return (self.cursor_epoch, self._next_window()) if self._offset and not self.past_end else None

    @property
    def passed(self) -> int:
        """Records of all epochs of these data that lie before the cursor."""
        return (self.cursor_epoch + 1 - self.first_epoch) * self.plan.size - self._ahead

    def next_epoch(self) -> None:
        """Move the cursor to the beginning of the next epoch."""
        self.cursor_epoch += 1
        self._position = self._offset = 0
        self._ahead = self.plan.size
        self._next_windows.clear()
        self._mark("head")

    def _take_ahead(self, limit: int) -> Waiting:
        window = self._next_window()
        passed = self.plan.size - self._ahead
        left = self.plan.records_before(self.cursor_epoch, self._position + 1) - passed
        limit = min(to_turns_end(self._offset, limit, self.plan.spec.turn), left)
        taken = Slice(epoch=self.cursor_epoch, shard=window, skip=self._offset, limit=limit)
        self._ahead -= taken.limit
        if taken.limit == left:
            self._position, self._offset = self._position + 1, 0
            self._next_windows.popleft()
        else:
            self._offset += taken.limit
        if not self._ahead:
            self._run_on()
        return Waiting(taken, 1)

    def _next_window(self) -> int:
        if not self._next_windows:
            stop = min(self._position + WINDOWS_AT_ONCE, self.plan.num_windows)
            self._next_windows.extend(self.plan.windows_at(self.cursor_epoch, self._position, stop))
        return self._next_windows[0]

    # Lending --------------------------------------------------------------------------------------------

    @property
    def empty(self) -> bool:
        """Whether nothing waits in any epoch, now or later."""
        return self.past_end and not self._returned and not self._remainders

    @property
    def oldest(self) -> int:
        """The oldest epoch with waiting records other than remainders, else the cursor's."""
        return min(self._returned, default=self.cursor_epoch)

    def waiting(self, epoch: int) -> int:
        """Return records that a pass over `epoch` may take, remainders not counted."""
        if not self._barrier:
            return self.ahead + self.returned_records
        queue = self._returned.get(epoch)
        return (queue.records if queue else 0) + (self.ahead if epoch == self.cursor_epoch else 0)

    def take(self, epoch: int, limit: int) -> Waiting | None:
        """Return up to `limit` records for a pass over `epoch`, or None: what came back, then the cursor's.

        Of a mixture whose components take turns they go on to the end of a turn, as a batch that the slice
        cuts off nothing would fill up.
        Whoever takes marks the head, once for all that it takes.
        """
        if not self._barrier:
            epoch = self.oldest
        queue = self._returned.get(epoch)
        if queue is not None:
            item = queue.take(limit, self.plan.spec.turn)
            if not queue.records:
                del self._returned[epoch]
            return item
        return self._take_ahead(limit) if epoch == self.cursor_epoch and self.ahead else None

    def put_back(self, item: Slice, attempt: int) -> None:
        """Let a slice wait again."""
        self._put(self._returned, item, attempt)

    def _put(self, where: dict[int, SliceQueue], item: Slice, attempt: int) -> None:
        if item.epoch not in where:
            where[item.epoch] = SliceQueue(self._mark)
        where[item.epoch].put(self._next_number, Waiting(item, attempt))
        self._next_number += 1

    @property
    def returned_records(self) -> int:
        """Records of the slices that came back."""
        return sum([queue.records for queue in self._returned.values()])

    def returned(self) -> Iterator[Slice]:
        """Return the slices that came back, oldest epoch first."""
        return (item for epoch in sorted(self._returned) for item in self._returned[epoch])

    # Remainders: less than a batch, kept until they fill one --------------------------------------------

    def put_remainder(self, item: Slice, attempt: int) -> None:
        """Let a part of a batch wait until there is enough for a whole one."""
        self._put(self._remainders, item, attempt)

    @property
    def has_remainders(self) -> bool:
        return bool(self._remainders)

    @property
    def remainder_epochs(self) -> list[int]:
        """Epochs with remainders, oldest first."""
        return sorted(self._remainders)

    def remainder_records(self, epoch: int) -> int:
        """Return records of the remainders that a pass over `epoch` may take: none where batches are of one
        component, as together they would be of several."""
        if self.plan.spec.turn > 1:
            return 0
        return sum(self._remainders[e].records for e in self._remainders_of(epoch))

    def take_remainders(self, epoch: int, records: int) -> Iterator[Waiting]:
        """Return exactly `records` records of remainders."""
        for source in self._remainders_of(epoch):
            queue = self._remainders[source]
            while records and queue.records:
                item = queue.take(records)
                records -= item.slice.limit
                yield item
            if not queue.records:
                del self._remainders[source]

    def drop_remainders(self, epoch: int) -> int:
        """Forget an epoch's remainders. Returns how many records they had."""
        queue = self._remainders.pop(epoch)
        records = queue.records
        queue.clear()
        return records

    def remainders(self) -> Iterator[Slice]:
        """Return all remainders, oldest epoch first."""
        return (item for epoch in self.remainder_epochs for item in self._remainders[epoch])

    def came_back(self) -> Iterator[Slice]:
        """Return the slices that came back, remainders too."""
        return chain(self.returned(), self.remainders())

    def _remainders_of(self, epoch: int) -> list[int]:
        if not self._barrier:
            return self.remainder_epochs
        return [epoch] if epoch in self._remainders else []

    # All of it ------------------------------------------------------------------------------------------

    @property
    def records(self) -> int:
        """Records of the epochs begun that wait, remainders included."""
        return self.ahead + self.behind

    @property
    def behind(self) -> int:
        """Those of them that lie before the cursor."""
        return self.returned_records + sum([queue.records for queue in self._remainders.values()])

    def restore(self, token: Token) -> None:
        """Wait for exactly what has no outcome in the token."""
        for queue in (*self._returned.values(), *self._remainders.values()):
            queue.clear()
        self._returned.clear()
        self._remainders.clear()
        self.first_epoch = token.first_epoch
        self.move_to(token.epoch, token.position, token.offset)
        for item in token.open:
            self.put_back(item, 1)
        for item in token.remainders:
            self.put_remainder(item, 1)

    def move_to(self, epoch: int, position: int, offset: int) -> None:
        """Set the cursor."""
        self.cursor_epoch, self._position, self._offset = epoch, position, offset
        self._ahead = self.plan.size - self.plan.records_before(epoch, position) - offset
        self._next_windows.clear()
        self._mark("head")
        self._run_on()

    # As rows of a journal -------------------------------------------------------------------------------

    def numbers(self) -> Iterator[int]:
        """Return the numbers of all slices that wait, remainders included."""
        return chain.from_iterable(
            queue.numbers() for queue in (*self._returned.values(), *self._remainders.values())
        )

    def find(self, number: int) -> tuple[bool, Waiting] | None:
        """Return whether the slice of this number is a remainder, and the slice; None: it does not wait."""
        for remainder, queues in ((False, self._returned), (True, self._remainders)):
            for queue in queues.values():
                item = queue.find(number)
                if item is not None:
                    return remainder, item
        return None

    def resume(
        self, first_epoch: int, cursor: tuple[int, int, int], waiting: dict[int, tuple[bool, Waiting]]
    ) -> None:
        """Take over what `cursor`, `numbers` and `find` said of another object; for a new one."""
        self.first_epoch = first_epoch
        self.move_to(*cursor)
        for number, (remainder, item) in sorted(waiting.items()):
            self._next_number = number
            self._put(self._remainders if remainder else self._returned, item.slice, item.attempt)

    def __repr__(self) -> str:
        return f"<Backlog epoch={self.cursor_epoch} records={self.records}>"


def to_turns_end(skip: int, limit: int, turn: int) -> int:
    """Return the number of `limit` records from `skip` on, with what follows in the last one's turn."""
    return first_turn(skip + limit, turn) - skip


def split(whole: Slice, limit: int) -> tuple[Slice, Slice]:
    """Cut a slice after its first `limit` records."""
    epoch, shard, middle = whole.epoch, whole.shard, whole.skip + limit
    head = Slice(epoch=epoch, shard=shard, skip=whole.skip, limit=limit)
    return head, Slice(epoch=epoch, shard=shard, skip=middle, limit=whole.stop - middle)
