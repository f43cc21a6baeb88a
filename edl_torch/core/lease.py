"""Lease: a slice lent to a session, and how far that session has come with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from edl_torch.core.span import Span
from edl_torch.errors import InvalidArgument
from edl_torch.shard import Slice


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
