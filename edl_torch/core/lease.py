"""Lease: a slice lent to a session, and which positions of it have no outcome yet.

Outcomes come as ranges of positions. In order they are one prefix, below `done`; what comes out of order is a
hole behind that, until the prefix reaches it. So a lease has no more holes than its trainer has batches in
flight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from edl_torch.errors import InvalidArgument, StaleLease
from edl_torch.shard import Slice

Range = tuple[int, int]  # of positions: the first, and the one after the last


def joined(ranges: list[Range]) -> list[Range]:
    """Return the positions of all these as the fewest ranges, ascending."""
    found: list[Range] = []
    for first, after in sorted(ranges):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(after, found[-1][1])
        else:
            found.append((first, after))
    return found


@dataclass(slots=True, kw_only=True)
class Span:
    """Positions `done` to `stop`, which are open, except the `holes` among them, which are closed.

    Holes ascend and do not touch; `done` stands on none and is never larger than `stop`.
    """

    done: int
    stop: int
    holes: list[Range] = field(default_factory=list)

    @property
    def open_records(self) -> int:
        """Positions that are open."""
        count = self.stop - self.done
        for first, after in self.holes:
            count -= after - first
        return count

    @property
    def is_done(self) -> bool:
        """Whether every position is closed."""
        return self.done >= self.stop

    def is_open(self, first: int, upto: int) -> bool:
        """Return whether all positions from `first` up to `upto` are open."""
        if first < self.done or upto > self.stop:
            return False
        return not self.holes or all(after <= first or upto <= begin for begin, after in self.holes)

    def close(self, first: int, upto: int) -> int:
        """Close the positions from `first` up to `upto`. Returns how many of them were open."""
        if upto > self.stop:
            upto = self.stop
        if first <= self.done and not self.holes:  # in order, as usual
            gained = upto - self.done
            if gained <= 0:
                return 0
            self.done = upto
            return gained
        first = max(first, self.done)
        if first >= upto:
            return 0
        before = self.open_records
        self.holes = joined([*self.holes, (first, upto)])
        if self.holes[0][0] == self.done:
            self.done = self.holes.pop(0)[1]
        return before - self.open_records

    def position_after(self, count: int) -> int:
        """Return the position after the first `count` open ones, or `stop`."""
        for first, after in self.pieces():
            if count <= after - first:
                return first + count
            count -= after - first
        return self.stop

    def pieces(self, first: int = 0, upto: int | None = None) -> Iterator[Range]:
        """Return the open positions from `first` up to `upto` (None: all that follow) as ranges."""
        begin, stop = max(first, self.done), self.stop if upto is None else min(upto, self.stop)
        for hole, after in self.holes:
            if begin < min(hole, stop):
                yield begin, min(hole, stop)
            begin = max(begin, after)
        if begin < stop:
            yield begin, stop


@dataclass(slots=True, kw_only=True)
class Lease(Span):
    """Slice of a shard lent to a session: open are the records that are still lent.

    `returned` are those that were given back: an outcome that is told of one of them comes too late.
    `handed` says that all its batches are with the training loop.
    """

    task: int
    attempt: int
    session: str
    epoch: int
    shard: int
    handed: bool = False
    returned: list[Range] = field(default_factory=list)

    @classmethod
    def of(cls, task: int, attempt: int, session: str, cut: Slice) -> Lease:
        """Return a new lease of a slice, none of whose records has an outcome."""
        return cls(
            task=task,
            attempt=attempt,
            session=session,
            epoch=cut.epoch,
            shard=cut.shard,
            done=cut.skip,
            stop=cut.stop,
        )

    def outcomes(self) -> Iterator[Range]:
        """Return the positions below `stop` that are neither open nor given back."""
        begin = 0
        for first, after in joined([*self.pieces(), *self.returned]):
            if begin < first:
                yield begin, first
            begin = after
        if begin < self.stop:
            yield begin, self.stop

    def check_end(self, upto: int) -> None:
        """Raise InvalidArgument for positions that never belonged to the lease."""
        if upto > self.stop:
            raise InvalidArgument(f"task {self.task} ends at position {self.stop}; {upto} lies behind that")

    def acknowledge(self, start: int, upto: int) -> int:
        """Close the records from `start` up to `upto`, which were trained on. Returns how many were open.

        Raises InvalidArgument for more than the lease has, StaleLease for what was given back of it.
        """
        if upto > self.stop:
            self.check_end(upto)
        for first, after in self.returned:
            if first < upto and start < after:
                raise StaleLease(
                    f"positions {first} to {after - 1} of task {self.task} were given back; they cannot be "
                    f"acknowledged"
                )
        return self.close(start, upto)

    def give_back(self, start: int, upto: int | None = None) -> list[Slice]:
        """Close the records from `start` up to `upto` (None: all that follow), and return those still open.

        Raises InvalidArgument where it begins with a record that has its outcome.
        """
        back = list(self.pieces(start, upto))
        if back:
            if start < self.done and not any(first <= start < after for first, after in self.returned):
                raise InvalidArgument(
                    f"task {self.task} is acknowledged up to {self.done}; {start} cannot be given back"
                )
            self.returned = joined([*self.returned, *back])
            for piece in back:
                self.close(*piece)
        return [self._slice(*piece) for piece in back]

    def slices(self) -> Iterator[Slice]:
        """Return the records that are open, a slice for each range of them."""
        return (self._slice(*piece) for piece in self.pieces())

    def _slice(self, first: int, after: int) -> Slice:
        return Slice(epoch=self.epoch, shard=self.shard, skip=first, limit=after - first)
