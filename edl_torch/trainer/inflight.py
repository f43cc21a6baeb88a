"""Leases of one trainer: those of the pass that is open, and what of each is drawn, handed out, acknowledged.

The queue has what has come, who draws it, and what the master said of the pass.

"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import count

from edl_torch.core.calls import NEW_PASS, Acknowledgement, Failure, GiveBack, Grant, LeaseAnswer, PassState
from edl_torch.core.leases import Range, Span, joined
from edl_torch.core.limits import shortened
from edl_torch.errors import AccountingError
from edl_torch.shard import Slice
from edl_torch.trainer.batches import Hold
from edl_torch.trainer.vocabulary import ASKING, Asking, Ticket


class Mode(Enum):
    """Kinds of passes: those of an `ElasticDataLoader`, which end with the epoch, and all others."""

    ELASTIC = "elastic"
    PLAIN = "plain"


@dataclass(slots=True, kw_only=True)
class Pass:
    """One pass, from the first lease that it asks for to its end."""

    number: int = 0
    mode: Mode = Mode.PLAIN
    is_open: bool = False
    epoch: int = NEW_PASS  # the one that it reads; NEW_PASS while it has none
    joins: bool = True  # whichever epoch runs
    state: PassState = PassState.OPEN
    granted: int = 0  # leases so far
    ahead: bool = False  # whether leases are fetched before they are asked for
    streams: set[str] = field(default_factory=set)  # those that draw
    broken: dict[str, str] = field(default_factory=dict)  # those that died, and the records that they were at

    @property
    def is_over(self) -> bool:
        """Whether the master has said that the epoch is over, or all of them.

        A pass that joins whichever epoch runs and has read nothing joins the next one instead.
        """
        if self.joins and self.state is PassState.EPOCH_OVER and not self.granted:
            self.epoch, self.state = NEW_PASS, PassState.OPEN
        return self.state is not PassState.OPEN


class LeaseQueue:
    """The leases of the pass that is open, or was last."""

    def __init__(self, *, ahead: bool) -> None:
        self.current = Pass()
        self.phase = Asking.IDLE
        self.request = 0  # the last call for leases that was answered
        self.lost_in = 0  # the pass that made the call after it, if its answer did not come
        self.answers = 0
        self.empty_answers = 0  # of those, the ones without a lease
        self.error: Exception | None = None  # what fetching ahead led to: the next one to ask raises it
        self._ahead = ahead
        self._ready: deque[Grant] = deque()
        self._reserved: dict[str, deque[Grant]] = {}  # the rest of a bundle, for the stream that began it

    def __repr__(self) -> str:
        current = self.current
        state = f"open epoch={current.epoch}" if current.is_open else "closed"
        return f"<LeaseQueue pass={current.number} {state} ready={len(self._ready)}>"

    @property
    def ready(self) -> int:
        """How many leases nobody has drawn."""
        return len(self._ready)

    def open(self, mode: Mode, epoch: int = NEW_PASS) -> int:
        """Begin a pass; the one before is closed. With an `epoch` it is over when that epoch is."""
        self.error = None
        self.current = Pass(
            number=self.current.number + 1,
            mode=mode,
            is_open=True,
            epoch=epoch,
            joins=epoch == NEW_PASS,
            ahead=self._ahead,
        )
        return self.current.number

    def close(self) -> list[Grant]:
        """End the pass. Returns the leases that nobody drew."""
        self.current.is_open = False
        undrawn = self.take_ready()
        for reserved in self._reserved.values():
            undrawn += reserved
        self._reserved.clear()
        return undrawn

    def rest(self) -> list[Grant]:
        """Fetch nothing ahead in this pass any more. Returns the leases that nobody drew.

        The rest of a bundle stays with the stream that began it: without it there would be no whole batch.
        """
        self.current.ahead = False
        return self.take_ready()

    def take_ready(self) -> list[Grant]:
        """Return the leases that nobody drew; they are not ready any more."""
        ready = list(self._ready)
        self._ready.clear()
        return ready

    def draw(self, stream: str, number: int) -> Grant | None:
        """Return the next lease for a stream of pass `number`, where there is one."""
        if number != self.current.number or not self.current.is_open:
            return None
        reserved = self._reserved.get(stream)
        if reserved:
            return reserved.popleft()
        if not self._ready:
            return None
        grant = self._ready.popleft()
        while grant.bundle and self._ready and self._ready[0].bundle == grant.bundle:
            self._reserved.setdefault(stream, deque()).append(self._ready.popleft())
        return grant

    def may_get_more(self, number: int) -> bool:
        """Whether pass `number` is open and its epoch not over."""
        return self.current.is_open and number == self.current.number and not self.current.is_over

    @property
    def wants_ahead(self) -> bool:
        """Whether a lease should be fetched before it is asked for."""
        current = self.current
        return (
            current.ahead
            and current.is_open
            and current.granted > 0
            and current.state is PassState.OPEN
            and self.phase is Asking.IDLE
            and len(self._ready) < max(1, len(current.streams))
        )

    @property
    def to_ask_for(self) -> int:
        """How many leases to ask for."""
        if not self.current.ahead:
            return 1
        return max(1, len(self.current.streams) - len(self._ready))

    def begin_asking(self) -> None:
        """Note that a call for leases goes out."""
        self.phase = ASKING[self.phase, Asking.ASKING]

    def end_asking(self) -> None:
        """Note that the call was answered, or given up."""
        self.phase = ASKING[self.phase, Asking.IDLE]
        self.answers += 1

    def take_in(self, answer: LeaseAnswer, number: int) -> bool:
        """Take in what was granted to pass `number`. False where it is over: nobody wants the leases."""
        current = self.current
        if number != current.number or not current.is_open:
            return False
        current.epoch, current.state = answer.epoch, answer.state
        current.granted += len(answer.grants)
        self._ready += answer.grants
        self.empty_answers += not answer.grants
        return True

    def void(self, tasks: tuple[int, ...]) -> None:
        """Forget leases that the master took back."""
        self._ready = deque(grant for grant in self._ready if grant.task not in tasks)
        for stream, reserved in self._reserved.items():
            self._reserved[stream] = deque(grant for grant in reserved if grant.task not in tasks)

    def clear(self) -> None:
        """Forget all leases: they are void."""
        self._ready.clear()
        self._reserved.clear()


# What of them is in flight ----------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Held(Span):
    """One lease in this trainer: closed is what was acknowledged, failed or given back.

    What lies below `handed` was handed to the loop. `stream` names who reads the lease, and is empty until
    somebody does.
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
            replace(held.slice, skip=first, limit=after - first)
            for held in drawn
            for first, after in held.pieces(held.handed)
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
            if held is None or after > held.stop or (held.holes and not held.is_open(first, after)):
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
        for task, first, after in ticket:
            held = self._held.get(task)
            if held is None or not held.is_open(first, after):
                return False
        return True

    def acknowledge(self, batches: Iterable[Ticket]) -> list[Acknowledgement]:
        """Note that the loop is done with batches. Returns what to say of them; nothing of void leases."""
        said = []
        for ticket in batches:
            for task, first, after in ticket:
                held = self._held.get(task)
                if held is None:
                    continue
                if first == held.done and not held.holes:  # in order, as usual
                    said.append(Acknowledgement(task=task, attempt=held.attempt, upto=after, start=first))
                    held.done = after
                else:
                    for start, upto in held.pieces(first, after):
                        said.append(Acknowledgement(task=task, attempt=held.attempt, upto=upto, start=start))
                    held.close(first, after)
                if held.handed < held.done or held.done >= held.stop:
                    self._close_if_done(task, held)
        return said

    def fail(self, task: int, position: int, reason: str) -> list[Failure]:
        """Note that a record cannot be read."""
        held = self._held.get(task)
        if held is None or not held.close(position, position + 1):
            return []
        self._close_if_done(task, held)
        return [Failure(task=task, attempt=held.attempt, position=position, reason=shortened(reason))]

    def slice_of(self, task: int) -> Slice | None:
        """Return what a lease lends; None where it is not held."""
        held = self._held.get(task)
        return None if held is None else held.slice

    # Records go back --------------------------------------------------------------------------------------

    def give_back(self, batches: Iterable[Ticket], *, remainder: bool = False) -> list[GiveBack]:
        """Give batches back, or parts of one that are less than a batch; nothing of void leases."""
        runs: dict[int, list[Range]] = {}
        for ticket in batches:
            for task, first, after in ticket:
                runs.setdefault(task, []).append((first, after))
        return self._give_back(runs, remainder=remainder)

    def withdraw(self, batches: Iterable[Ticket]) -> list[GiveBack]:
        """Give back the newest batches, and all that was never handed out: the pass ended early."""
        runs = {task: [(held.handed, held.stop)] for task, held in self._held.items()}
        for ticket in batches:
            for task, first, after in ticket:
                runs.get(task, []).append((first, after))
        return self._give_back(runs)

    def give_back_undelivered(self) -> list[GiveBack]:
        """Give back what streams have drawn and no batch has brought to the loop."""
        drawn = {task: [(held.handed, held.stop)] for task, held in self._held.items() if held.stream}
        return self._give_back(drawn)

    def give_back_undrawn(self, grants: Iterable[Grant]) -> list[GiveBack]:
        """Give back leases that no stream has begun; those of a bundle were remainders, and are again."""
        backs = []
        for grant in grants:
            runs = {grant.task: [(grant.slice.skip, grant.slice.stop)]}
            backs += self._give_back(runs, remainder=bool(grant.bundle))
        return backs

    def give_back_unacknowledged(self) -> list[GiveBack]:
        return self._give_back({task: [(held.done, held.stop)] for task, held in self._held.items()})

    def _give_back(self, runs: dict[int, list[Range]], *, remainder: bool = False) -> list[GiveBack]:
        """Give back what is open in these ranges of leases, as few ranges as there can be."""
        backs = []
        for task, ranges in runs.items():
            held = self._held.get(task)
            if held is None:
                continue
            for first, after in joined([piece for run in ranges for piece in held.pieces(*run)]):
                upto = after if after < held.stop else None
                backs.append(
                    GiveBack(task=task, attempt=held.attempt, start=first, upto=upto, remainder=remainder)
                )
                held.close(first, after)
            self._close_if_done(task, held)
        return backs

    def _close_if_done(self, task: int, held: Held) -> None:
        held.handed = max(held.handed, held.done)  # a hole at the front is no batch's
        if held.done >= held.stop:
            del self._held[task]

    # What is where ----------------------------------------------------------------------------------------

    def drawn(self) -> Ticket:
        """Return what streams have begun to read and is not acknowledged."""
        drawn = [(task, held) for task, held in self._held.items() if held.stream]
        return tuple([(task, first, after) for task, held in drawn for first, after in held.pieces()])

    def void(self, tasks: Iterable[int]) -> None:
        """Forget leases that the master took back."""
        for task in tasks:
            self._held.pop(task, None)

    def clear(self) -> None:
        """Forget everything: it is void."""
        self._held.clear()


def _check_skipped(task: int, held: Held, first: int, after: int) -> None:
    """Raise AccountingError unless what lies between the last batch and this one is closed."""
    if first < held.handed or any(held.pieces(held.handed, first)):
        raise AccountingError(
            f"a batch holds positions {first}…{after - 1} of task {task}, expected {held.handed}"
        )
