"""The leases of the pass that is open: what has come, who draws it, and what the master said of the pass."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from edl_torch.core.calls import NEW_PASS, Grant, LeaseAnswer, PassState
from edl_torch.trainer.vocabulary import ASKING, Asking


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
