"""One lease: a slice on loan to a session, and how far that session has come with it.

Knows nothing of other leases, of what waits, or of who may have it next.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass, field

from edl_torch.errors import InvalidArgument
from edl_torch.shard import Slice


@dataclass(slots=True)
class Lease:
    """Positions `done` to `stop` are without outcome, except the `holes`, which are in quarantine.

    `end` is where the lease ended when it was granted; what was given back lies between `stop` and `end`.
    `handed` says that all its batches are with the training loop.
    """

    task: int
    attempt: int
    session: str
    epoch: int
    shard: int
    done: int
    stop: int
    end: int
    handed: bool = False
    holes: set[int] = field(default_factory=set)

    @property
    def open_records(self) -> int:
        """Records that have no outcome yet."""
        return self.stop - self.done - len(self.holes)

    def is_open(self, position: int) -> bool:
        """Whether the record at this position has no outcome yet."""
        return self.done <= position < self.stop and position not in self.holes

    def pass_holes(self, upto: int) -> int:
        """Forget the holes below `upto`. Returns how many there were."""
        passed = {hole for hole in self.holes if hole < upto}
        self.holes -= passed
        return len(passed)

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
        if start < done and start < self.stop:
            raise InvalidArgument(
                f"task {self.task} is acknowledged up to {done}; {start} cannot be given back"
            )

    def pieces(self, start: int | None = None) -> Iterator[Slice]:
        """The records without outcome, from position `start` on: one slice between each two holes."""
        begin = self.done if start is None else start
        for stop in [*sorted(hole for hole in self.holes if hole >= begin), self.stop]:
            if stop > begin:
                yield Slice(epoch=self.epoch, shard=self.shard, skip=begin, limit=stop - begin)
            begin = stop + 1


def pass_over(position: int, holes: Container[int]) -> int:
    """The first position from `position` on that is no hole."""
    while position in holes:
        position += 1
    return position
