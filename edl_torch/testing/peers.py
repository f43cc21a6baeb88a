"""Synchronous ranks without `torch.distributed`: threads of one process that vote in memory.

For tests of loops with `ElasticDataLoader(synchronous=…)`; a rank that is gone is an error, never a wait.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from edl_torch.client.peers import Ballot, BroadcastBatch, Count, Delivery, Vote
from edl_torch.errors import PeerFailed

T = TypeVar("T")


class ThreadPeers:
    """One rank of `size`, each in a thread of its own; `ThreadPeers.group(size)` makes them all.

    A rank that ends calls `leave()`: the others' votes then raise PeerFailed where they would wait for it.
    """

    def __init__(self, rank: int, size: int, hall: _Hall, parts: ThreadParts | None = None) -> None:
        self.rank = rank
        self.size = size
        self.parts = parts
        self.coordinates = size if parts is None else size // parts.size
        self._hall = hall
        self._turn = 0

    @classmethod
    def group(cls, size: int, timeout_s: float = 60.0, *, parts: int = 1) -> list[ThreadPeers]:
        """All ranks; a vote that lasts longer than `timeout_s` fails.

        Each run of `parts` ranks holds one model in so many parts: of these the first holds the leases.
        """
        hall = _Hall(size, timeout_s)
        if parts == 1:
            return [cls(rank, size, hall) for rank in range(size)]
        halls = [_Hall(parts, timeout_s) for _ in range(size // parts)]
        return [
            cls(rank, size, hall, ThreadParts(rank % parts, halls[rank // parts])) for rank in range(size)
        ]

    def __repr__(self) -> str:
        return f"<ThreadPeers rank={self.rank}/{self.size}>"

    def vote(self, ballot: Ballot) -> Vote:
        """Cast a ballot and go on."""
        return _ThreadVote(self._put(ballot.numbers(self.rank, self.size)))

    def share(self, text: str) -> str:
        """Rank 0's text, on every rank."""
        return str(self._put(text)()[0])

    def lend(self, batch: Any) -> Any:
        """The batch of the lowest rank that gives one."""
        return next(lent for lent in self._put(batch)() if lent is not None)

    def leave(self) -> None:
        """This rank is gone."""
        self._hall.leave(self.rank)
        if self.parts is not None:
            self.parts.leave()

    def _put(self, value: T) -> Callable[[], list[T]]:
        self._turn += 1
        return self._hall.put(self._turn, self.rank, value)


class ThreadParts:
    """One of the ranks that hold one model in parts, each in a thread of its own."""

    def __init__(self, place: int, hall: _Hall) -> None:
        self.holds = place == 0
        self.size = hall.size
        self._place = place
        self._hall = hall
        self._turn = 0

    def __repr__(self) -> str:
        return f"<ThreadParts {self._place}/{self.size}>"

    def send(self, broadcast: BroadcastBatch) -> Delivery:
        """Let the followers have a broadcast, and go on."""
        self._turn += 1
        copied = copy.deepcopy(broadcast)  # the holder's loop may change its own
        for place in range(self.size):
            self._hall.put(self._turn, place, copied)
        return _ThreadDelivery(broadcast)

    def receive(self) -> Delivery:
        """Wait for the holder's next broadcast."""
        self._turn += 1
        return _ThreadDelivery(copy.deepcopy(self._hall.collect(self._turn)[0]))

    def leave(self) -> None:
        """This rank is gone."""
        self._hall.leave(self._place)


class _ThreadDelivery:
    def __init__(self, broadcast: BroadcastBatch) -> None:
        self.broadcast = broadcast

    def batch(self) -> Any:
        return self.broadcast.batch


class _ThreadVote:
    def __init__(self, collect: Callable[[], list[list[float]]]) -> None:
        self._collect = collect

    def wait(self) -> Count:
        return Count.of(map(sum, zip(*self._collect(), strict=True)))


class _Hall:
    """Where values meet: the n-th of each rank belong together."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size = size
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._turns: dict[int, dict[int, Any]] = {}
        self._gone: set[int] = set()

    def put(self, turn: int, rank: int, value: Any) -> Callable[[], list[Any]]:
        with self._changed:
            values = self._turns.setdefault(turn, {})
            values[rank] = value
            self._changed.notify_all()
        return lambda: self._collect(values)

    def collect(self, turn: int) -> list[Any]:
        """What all have put in a turn, when they have."""
        with self._changed:
            values = self._turns.setdefault(turn, {})
        return self._collect(values)

    def _collect(self, values: dict[int, Any]) -> list[Any]:
        with self._changed:
            self._changed.wait_for(
                lambda: len(values) == self.size or self._gone - values.keys(), self._timeout_s
            )
            if len(values) < self.size:
                missing = sorted(set(range(self.size)) - values.keys())
                raise PeerFailed(f"rank(s) {missing} are gone or do not answer")
            return [values[rank] for rank in range(self.size)]

    def leave(self, rank: int) -> None:
        with self._changed:
            self._gone.add(rank)
            self._changed.notify_all()
