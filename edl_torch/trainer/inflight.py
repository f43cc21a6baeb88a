"""The leases of one trainer: how much of each was drawn, handed out in batches, and acknowledged."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import count

from edl_torch.core.calls import Acknowledgement, Failure, GiveBack, Grant
from edl_torch.core.lease import Span, pass_over
from edl_torch.core.limits import shortened
from edl_torch.errors import AccountingError
from edl_torch.shard import Slice
from edl_torch.trainer.batches import Hold
from edl_torch.trainer.tickets import Ticket


@dataclass(slots=True, kw_only=True)
class Held(Span):
    """One lease in this trainer: acknowledged below `done`, handed to the loop below `handed`.

    `stream` names who reads it, and is empty until somebody does.
    """

    slice: Slice
    attempt: int
    handed: int
    stream: str = ""


class InFlight:
    """Every lease of the trainer by task."""

    def __init__(self) -> None:
        self._held: dict[int, Held] = {}
        self._taken_over = count()  # tasks of another trainer's batches

    @property
    def records(self) -> int:
        """Records leased and not yet acknowledged."""
        return sum(held.open_records for held in self._held.values())

    def __bool__(self) -> bool:
        return bool(self._held)

    def __contains__(self, task: int) -> bool:
        return task in self._held

    def __repr__(self) -> str:
        return f"<InFlight leases={len(self._held)} records={self.records}>"

    # Leases come, and are drawn ---------------------------------------------------------------------------

    def leases(self) -> tuple[tuple[int, int], ...]:
        """Return (task, attempt) of every lease, as it is presented to the master."""
        return tuple([(task, held.attempt) for task, held in self._held.items()])

    def grant(self, grant: Grant) -> None:
        """Take in a lease that arrived."""
        cut = grant.slice
        self._held[grant.task] = Held(
            slice=cut, attempt=grant.attempt, done=cut.skip, handed=cut.skip, stop=cut.stop
        )

    def slices(self, ticket: Ticket) -> tuple[Slice, ...]:
        """Return the records of a batch."""
        held = self._held
        return tuple(
            [replace(held[task].slice, skip=first, limit=after - first) for task, first, after in ticket]
        )

    def take_over(self, slices: Iterable[Slice]) -> Ticket:
        """Hold a batch of another trainer, each run of it as a lease of its own. Returns its ticket here."""
        ticket = []
        for part in slices:
            task = next(self._taken_over)
            self.grant(Grant(task=task, attempt=0, slice=part))
            ticket.append((task, part.skip, part.stop))
        return tuple(ticket)

    def draw(self, task: int, stream: str) -> None:
        """Note that a stream begins to read a lease."""
        if task in self._held:
            self._held[task].stream = stream

    def unhanded(self, stream: str) -> list[Slice]:
        """Return what a stream has begun to read and no batch has brought yet."""
        drawn = [held for held in self._held.values() if held.stream == stream]
        return [
            replace(held.slice, skip=held.handed, limit=held.stop - held.handed)
            for held in drawn
            if held.handed < held.stop
        ]

    # Batches go to the loop -------------------------------------------------------------------------------

    def hand(self, ticket: Ticket) -> list[Hold] | None:
        """Hand a batch to the loop. Returns what it holds: of each slice the positions `first … after - 1`.

        None when one of its leases is void: then it must be discarded.
        """
        holds: list[Hold] = []
        leases = self._held
        for task, first, after in ticket:
            held = leases.get(task)
            if held is None or after > held.stop:
                return None
            holds.append((held.slice, first, after))
        for task, first, after in ticket:
            held = leases[task]
            if first != held.handed:
                _check_skipped(task, held, first, after)
            held.handed = after
        return holds

    def is_mine(self, ticket: Ticket) -> bool:
        """Whether all leases of a batch are held."""
        for task, _, after in ticket:
            held = self._held.get(task)
            if held is None or after > held.stop:
                return False
        return True

    def acknowledge_all(self, tickets: Iterable[Ticket]) -> list[Acknowledgement]:
        """Acknowledge batches, oldest first: the loop is done with them."""
        done: dict[int, Acknowledgement] = {}
        for ticket in tickets:
            for task, _, after in ticket:
                acknowledgement = self.acknowledge(task, after)
                if acknowledgement is not None:
                    done[task] = acknowledgement
        return list(done.values())

    def acknowledge(self, task: int, upto: int) -> Acknowledgement | None:
        """Note that positions of a lease below `upto` were trained on; None when the lease is void."""
        held = self._held.get(task)
        if held is None:
            return None
        held.advance(upto)
        if held.handed < held.done or held.done >= held.stop:
            self._close_if_done(task, held)
        return Acknowledgement(task=task, attempt=held.attempt, upto=upto)

    def fail(self, task: int, position: int, reason: str) -> list[Failure]:
        """Note that a record cannot be read."""
        held = self._held.get(task)
        if held is None or not held.punch(position):
            return []
        self._close_if_done(task, held)
        return [Failure(task=task, attempt=held.attempt, position=position, reason=shortened(reason))]

    def slice_of(self, task: int) -> Slice | None:
        """Return what a lease lends; None where it is not held."""
        held = self._held.get(task)
        return None if held is None else held.slice

    # Records go back --------------------------------------------------------------------------------------

    def give_back(self, tickets: Iterable[Ticket]) -> list[GiveBack]:
        """Give batches back: what of them is still this trainer's, and what follows it in their leases."""
        return self._give_back_all(self._starts(tickets))

    def _starts(self, tickets: Iterable[Ticket]) -> dict[int, int]:
        starts: dict[int, int] = {}
        for ticket in tickets:
            for task, first, _ in ticket:
                if task in self._held:
                    starts[task] = min(first, starts.get(task, first))
        return starts

    def return_remainder(self, ticket: Ticket) -> list[GiveBack]:
        """Give back a partial batch that is not to be trained, as a remainder."""
        # One at a time: a lease may be done for after its first run.
        held = ((task, first) for task, first, _ in ticket if task in self._held)
        backs = [self._give_back(task, first, remainder=True) for task, first in held]
        return [back for back in backs if back is not None]

    def withdraw(self, tickets: Iterable[Ticket]) -> list[GiveBack]:
        """Give back the newest batches, and all that was never handed out: the pass ended early."""
        undelivered = {task: held.handed for task, held in self._held.items()}
        return self._give_back_all(undelivered | self._starts(tickets))

    def give_back_undelivered(self) -> list[GiveBack]:
        """Give back what streams have drawn and no batch has brought to the loop."""
        drawn = {task: held.handed for task, held in self._held.items() if held.stream}
        return self._give_back_all(drawn)

    def give_back_undrawn(self, grants: Iterable[Grant]) -> list[GiveBack]:
        """Give back leases that no stream has begun; those of a bundle were remainders, and are again."""
        held = [grant for grant in grants if grant.task in self._held]
        backs = (
            self._give_back(grant.task, grant.slice.skip, remainder=bool(grant.bundle)) for grant in held
        )
        return [back for back in backs if back is not None]

    def give_back_unacknowledged(self) -> list[GiveBack]:
        """Give back all that is not acknowledged."""
        return self._give_back_all({task: held.done for task, held in self._held.items()})

    def _give_back_all(self, starts: dict[int, int]) -> list[GiveBack]:
        backs = (self._give_back(task, start) for task, start in starts.items())
        return [back for back in backs if back is not None]

    def _give_back(self, task: int, start: int, *, remainder: bool = False) -> GiveBack | None:
        held = self._held[task]
        start = pass_over(start, held.holes)  # an acknowledgement up to there passes over them, too
        if start >= held.stop:
            return None
        held.cut(start)
        self._close_if_done(task, held)
        return GiveBack(task=task, attempt=held.attempt, start=start, remainder=remainder)

    def _close_if_done(self, task: int, held: Held) -> None:
        held.handed = max(held.handed, held.done)  # a hole at the front is no batch's
        if held.done >= held.stop:
            del self._held[task]

    # What is where ----------------------------------------------------------------------------------------

    def drawn(self) -> Ticket:
        """Return what streams have begun to read and is not acknowledged."""
        return tuple([(task, held.done, held.stop) for task, held in self._held.items() if held.stream])

    def void(self, tasks: Iterable[int]) -> None:
        """Forget leases that the master took back."""
        for task in tasks:
            self._held.pop(task, None)

    def clear(self) -> None:
        """Forget everything: it is void."""
        self._held.clear()


def _check_skipped(task: int, held: Held, first: int, after: int) -> None:
    """Raise AccountingError unless what lies between the last batch and this one is in quarantine."""
    skipped = range(held.handed, first)
    if not (skipped and held.holes.issuperset(skipped)):
        raise AccountingError(
            f"a batch holds positions {first}…{after - 1} of task {task}, expected {held.handed}"
        )
