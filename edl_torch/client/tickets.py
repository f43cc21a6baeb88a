"""Which positions of which leases a batch holds, and what has become of them in this trainer.

`Tally` counts where the samples are drawn (maybe in a loader worker); `Book` keeps the trainer's side:
granted, handed to the loop, trained on. Pure accounting: neither sends anything, and neither knows a batch's
content.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from edl_torch.core.calls import Acknowledgement, Failure, GiveBack, Grant, LeaseId
from edl_torch.core.limits import shortened
from edl_torch.errors import AccountingError
from edl_torch.shard import Slice

Ticket = tuple[tuple[int, int, int], ...]  # (task, first position, position after the last), in drawing order


class Tally:
    """Positions drawn since the last batch. One per process that collates; never shared by threads."""

    __slots__ = ("_runs",)

    def __init__(self) -> None:
        self._runs: list[list[int]] = []

    def start(self, task: int, position: int) -> list[int]:
        """Begin to draw a lease at `position`. Returns `[task, first, next]`; who reads moves `next`."""
        run = [task, position, position]
        self._runs.append(run)
        return run

    def take(self) -> Ticket:
        """The positions drawn since the last call."""
        ticket = tuple([(task, first, after) for task, first, after in self._runs if after > first])
        del self._runs[:-1]
        for run in self._runs:
            run[1] = run[2]
        return ticket

    def clear(self) -> None:
        """A new pass begins: what an abandoned one drew is no batch's."""
        self._runs.clear()


def ticket_size(ticket: Ticket) -> int:
    """Positions in a ticket; quarantined ones in the middle of a batch split a run, so each is a sample."""
    return sum([after - first for _, first, after in ticket])


@dataclass(slots=True)
class Holding:
    """One lease as this trainer holds it: acknowledged below `done`, handed to the loop below `handed`.

    `stream` names who reads it, and is empty until somebody does.
    """

    slice: Slice
    attempt: int
    done: int
    handed: int
    stop: int
    stream: str = ""
    holes: set[int] = field(default_factory=set)

    @property
    def records(self) -> int:
        """Records without outcome."""
        return self.stop - self.done - len(self.holes)


class Book:
    """All leases of this trainer, and the batches that its loop has and has not finished with.

    It takes no lock itself. `lock` is for those who share a book: held over a change and the note of it to
    the reporter, and let go before anything is sent.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._holdings: dict[int, Holding] = {}
        self._batches: deque[Ticket] = deque()

    @property
    def records(self) -> int:
        """Records leased and not yet acknowledged."""
        return sum(holding.records for holding in self._holdings.values())

    @property
    def batches(self) -> int:
        """Batches that the loop has been handed and that are not acknowledged."""
        return len(self._batches)

    @property
    def batch_records(self) -> int:
        """Records of those batches."""
        return sum(map(ticket_size, self._batches))

    def __bool__(self) -> bool:
        return bool(self._holdings)

    def __contains__(self, task: int) -> bool:
        return task in self._holdings

    def __repr__(self) -> str:
        return f"<Book leases={len(self._holdings)} records={self.records} batches={self.batches}>"

    def held(self) -> tuple[LeaseId, ...]:
        """Every lease, as it is presented to the master."""
        return tuple((task, held.attempt) for task, held in self._holdings.items())

    def grant(self, grant: Grant) -> None:
        """A lease arrived."""
        cut = grant.slice
        self._holdings[grant.task] = Holding(cut, grant.attempt, cut.skip, cut.skip, cut.stop)

    def draw(self, task: int, stream: str) -> None:
        """A stream begins to read a lease."""
        if task in self._holdings:
            self._holdings[task].stream = stream

    def unhanded(self, stream: str) -> list[Slice]:
        """What a stream has begun to read and no batch has brought yet."""
        drawn = [holding for holding in self._holdings.values() if holding.stream == stream]
        return [
            replace(holding.slice, skip=holding.handed, limit=holding.stop - holding.handed)
            for holding in drawn
            if holding.handed < holding.stop
        ]

    def hand(self, ticket: Ticket) -> bool:
        """A batch goes to the loop. False when one of its leases is void: then it must be discarded."""
        if not self.is_mine(ticket):
            return False
        for task, first, after in ticket:
            self._advance(task, first, after)
        self._batches.append(ticket)
        return True

    def slices(self, ticket: Ticket) -> tuple[tuple[Slice, int, int], ...]:
        """What a batch that was handed holds: of each slice the positions `first … after - 1`."""
        return tuple([(self._holdings[task].slice, first, after) for task, first, after in ticket])

    def is_mine(self, ticket: Ticket) -> bool:
        """Whether all leases of a batch are held."""
        for task, _, after in ticket:
            holding = self._holdings.get(task)
            if holding is None or after > holding.stop:
                return False
        return True

    def discard(self, ticket: Ticket) -> list[GiveBack]:
        """A batch is thrown away: what of it is still this trainer's goes back, with what follows it."""
        starts: dict[int, int] = {}
        for task, first, _ in ticket:
            if task in self._holdings:
                starts.setdefault(task, first)  # runs of one lease are in order: the first begins it
        return self._give_back_all(starts)

    def _advance(self, task: int, first: int, after: int) -> None:
        holding = self._holdings[task]
        skipped = range(holding.handed, first)
        if first != holding.handed and not (skipped and holding.holes.issuperset(skipped)):
            raise AccountingError(
                f"a batch holds positions {first}…{after - 1} of task {task}, expected {holding.handed}"
            )
        holding.handed = after

    def settle(self, keep: int) -> list[Acknowledgement]:
        """The loop is done with all batches but the last `keep`."""
        done: dict[int, Acknowledgement] = {}
        while len(self._batches) > keep:
            for task, _, after in self._batches.popleft():
                acknowledgement = self.acknowledge(task, after)
                if acknowledgement is not None:
                    done[task] = acknowledgement
        return list(done.values())

    def acknowledge(self, task: int, upto: int) -> Acknowledgement | None:
        """Positions of a lease below `upto` were trained on; None when the lease is void."""
        holding = self._holdings.get(task)
        if holding is None:
            return None
        if holding.holes:
            holding.holes = {hole for hole in holding.holes if hole >= upto}
        holding.done = max(upto, holding.done)
        self._close_if_done(task, holding)
        return Acknowledgement(task=task, attempt=holding.attempt, upto=upto)

    def fail(self, task: int, position: int, reason: str) -> list[Failure]:
        """A record cannot be read."""
        holding = self._holdings.get(task)
        if holding is None or position in holding.holes or not holding.done <= position < holding.stop:
            return []
        holding.holes.add(position)
        attempt = holding.attempt
        self._close_if_done(task, holding)
        return [Failure(task=task, attempt=attempt, position=position, reason=shortened(reason))]

    def fail_batch(self, reason: str, ahead: int = 0) -> list[Failure]:
        """The batch in hand, after which `ahead` were handed out, failed: its records go to quarantine."""
        if len(self._batches) <= ahead:
            return []
        ticket = self._batches[-1 - ahead]
        del self._batches[-1 - ahead]
        positions = ((task, position) for task, first, after in ticket for position in range(first, after))
        return [failure for task, position in positions for failure in self.fail(task, position, reason)]

    def return_remainder(self, ticket: Ticket) -> list[GiveBack]:
        """A partial batch that is not to be trained goes back as remainders."""
        # One at a time: a lease may be done for after its first run.
        held = ((task, first) for task, first, _ in ticket if task in self._holdings)
        backs = [self._give_back(task, first, remainder=True) for task, first in held]
        return [back for back in backs if back is not None]

    def withdraw(self, batches: int) -> list[GiveBack]:
        """The pass ended early: its last `batches` batches, and all that was never handed out, go back."""
        starts: dict[int, int] = {task: holding.handed for task, holding in self._holdings.items()}
        for _ in range(min(batches, len(self._batches))):
            for task, first, _ in self._batches.pop():
                if task in starts:
                    starts[task] = min(first, starts[task])
        return self._give_back_all(starts)

    def give_back_undelivered(self) -> list[GiveBack]:
        """Return what streams have drawn and no batch has brought to the loop."""
        drawn = {task: holding.handed for task, holding in self._holdings.items() if holding.stream}
        return self._give_back_all(drawn)

    def give_back_undrawn(self, grants: Iterable[Grant]) -> list[GiveBack]:
        """Return leases that no stream has begun; those of a bundle as remainders, as they were before."""
        held = [grant for grant in grants if grant.task in self._holdings]
        backs = (
            self._give_back(grant.task, grant.slice.skip, remainder=bool(grant.bundle)) for grant in held
        )
        return [back for back in backs if back is not None]

    def give_back_unacknowledged(self) -> list[GiveBack]:
        """Return all that is not acknowledged."""
        self._batches.clear()
        return self._give_back_all({task: holding.done for task, holding in self._holdings.items()})

    def _give_back_all(self, starts: dict[int, int]) -> list[GiveBack]:
        backs = (self._give_back(task, start) for task, start in starts.items())
        return [back for back in backs if back is not None]

    def _give_back(self, task: int, start: int, *, remainder: bool = False) -> GiveBack | None:
        holding = self._holdings[task]
        if start >= holding.stop:
            return None
        holding.stop = start
        holding.handed = min(holding.handed, start)
        holding.holes = {hole for hole in holding.holes if hole < start}
        self._close_if_done(task, holding)
        return GiveBack(task=task, attempt=holding.attempt, start=start, remainder=remainder)

    def _close_if_done(self, task: int, holding: Holding) -> None:
        while holding.done in holding.holes:
            holding.holes.discard(holding.done)
            holding.done += 1
        holding.handed = max(holding.handed, holding.done)  # a hole at the front is no batch's
        if holding.done >= holding.stop:
            del self._holdings[task]

    def handed(self, newest: int | None = None, untouched: int = 0) -> Ticket:
        """What the loop has and has not finished with: of the `newest` batches (of all), less `untouched`
        that it cannot have trained on."""
        batches = list(self._batches)[0 if newest is None else max(0, len(self._batches) - newest) :]
        return tuple([run for ticket in batches[: max(0, len(batches) - untouched)] for run in ticket])

    def drawn(self) -> Ticket:
        """What streams have begun to read and is not acknowledged."""
        held = self._holdings.items()
        return tuple([(task, holding.done, holding.stop) for task, holding in held if holding.stream])

    def handed_of(self, tasks: Iterable[int]) -> int:
        """How many of the batches that the loop has not finished with hold records of these leases."""
        wanted = set(tasks)
        return sum(any(task in wanted for task, _, _ in ticket) for ticket in self._batches)

    def void(self, tasks: Iterable[int]) -> None:
        """The master took these leases back: forget them."""
        for task in tasks:
            self._holdings.pop(task, None)

    def clear(self) -> None:
        """Another lineage: nothing is held any more."""
        self._holdings.clear()
        self._batches.clear()
