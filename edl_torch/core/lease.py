"""Lease: a slice lent to a session, and the span of positions in it that have no outcome yet."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass, field

from edl_torch.errors import InvalidArgument
from edl_torch.shard import Slice


@dataclass(slots=True, kw_only=True)
class Span:
    """Positions `done` to `stop`, which have no outcome yet, except the `holes` among them, which have.

    `done` stands on no hole and is never larger than `stop`.
    """

    done: int
    stop: int
    holes: set[int] = field(default_factory=set)

    @property
    def open_records(self) -> int:
        """Positions without an outcome."""
        return self.stop - self.done - len(self.holes)

    @property
    def is_done(self) -> bool:
        """Whether every position has its outcome."""
        return self.done >= self.stop

    def is_open(self, position: int) -> bool:
        """Return whether this position has no outcome yet."""
        return self.done <= position < self.stop and position not in self.holes

    def advance(self, upto: int) -> int:
        """Give all positions below `upto`, at most `stop`, their outcome. Returns how many had none."""
        if upto <= self.done:
            return 0
        gained = upto - self.done
        self.done = upto
        if self.holes:
            passed = {hole for hole in self.holes if hole < upto}
            gained -= len(passed)
            self.holes -= passed
            self._pass_holes()
        return gained

    def punch(self, position: int) -> bool:
        """Give one position its outcome. False where it has one already, or lies outside."""
        if not self.is_open(position):
            return False
        self.holes.add(position)
        self._pass_holes()
        return True

    def cut(self, start: int) -> None:
        """End before `start`, at `done` or behind it: what lies after it is in other hands."""
        self.stop = start
        if self.holes:
            self.holes = {hole for hole in self.holes if hole < start}

    def position_after(self, count: int) -> int:
        """Return the position after the first `count` ones without an outcome, or `stop`."""
        if not self.holes:
            return min(self.done + count, self.stop)
        position = self.done
        while position < self.stop and count:
            count -= position not in self.holes
            position += 1
        return position

    def pieces(self, start: int) -> Iterator[tuple[int, int]]:
        """Return the positions without an outcome from `start` on, as (first, position after the last)."""
        begin = max(start, self.done)
        for stop in [*sorted(hole for hole in self.holes if hole >= begin), self.stop]:
            if stop > begin:
                yield begin, stop
            begin = stop + 1

    def _pass_holes(self) -> None:
        self.done = pass_over(self.done, self.holes)
        self.holes = {hole for hole in self.holes if hole > self.done}


def pass_over(position: int, holes: Container[int]) -> int:
    """Return the first position from `position` on that is no hole."""
    while position in holes:
        position += 1
    return position


@dataclass(slots=True, kw_only=True)
class Lease(Span):
    """Slice of a shard lent to a session; the `holes` are in quarantine.

    `end` is where the lease ended when it was granted; what was given back lies between `stop` and `end`.
    `handed` says that all its batches are with the training loop.
    """

    task: int
    attempt: int
    session: str
    epoch: int
    shard: int
    end: int
    handed: bool = False

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
            end=cut.stop,
        )

    def check_failure(self, position: int) -> None:
        """Raise InvalidArgument for a position that never belonged to the lease."""
        if position >= self.end:
            raise InvalidArgument(f"task {self.task} ends at position {self.end}; {position} cannot fail")

    def check_acknowledgement(self, upto: int) -> None:
        """Raise InvalidArgument for more than the lease has."""
        if upto > self.stop:
            raise InvalidArgument(
                f"task {self.task} ends at position {self.stop}; {upto} cannot be acknowledged"
            )

    def check_give_back(self, start: int, done: int) -> None:
        """Raise InvalidArgument for records below `done`, where the acknowledged ones end."""
        if start < done:
            raise InvalidArgument(
                f"task {self.task} is acknowledged up to {done}; {start} cannot be given back"
            )

    def slices(self, start: int | None = None) -> Iterator[Slice]:
        """Return the records without outcome, from position `start` on: one slice between each two holes."""
        for first, after in self.pieces(self.done if start is None else start):
            yield Slice(epoch=self.epoch, shard=self.shard, skip=first, limit=after - first)
