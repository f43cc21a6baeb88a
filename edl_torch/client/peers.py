"""What synchronous ranks agree on, and the port through which they do.

Ranks that train in lock-step count one ballot each, a few numbers, at every step. How numbers travel is the
port's; it does not know torch, nor what a batch is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Protocol

from edl_torch.errors import PeerFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class Ballot:
    """One rank's word, or the sum over all ranks. Every number is 0 or more.

    Attributes:
        batches: 1 for a rank that has a batch for the step.
        records: the records of that batch.
        bare: 1 for a rank that never had a batch, and so nothing to stand in for one.
        failed: 1 for a rank that cannot go on.
        verdict: what rank 0 knows of the master: 1 for yes. Other ranks leave it out.
    """

    batches: int = 0
    records: int = 0
    bare: int = 0
    failed: int = 0
    verdict: int = 0

    @property
    def numbers(self) -> list[int]:
        """The values in the order of the fields."""
        return [getattr(self, field.name) for field in fields(self)]

    @classmethod
    def of(cls, numbers: list[int]) -> Ballot:
        """The reverse of `numbers`."""
        return cls(**dict(zip((field.name for field in fields(cls)), numbers, strict=True)))


class Vote(Protocol):
    """A vote under way."""

    def wait(self) -> Ballot:
        """The sum of all ranks' ballots. Raises PeerFailed when a rank is gone."""
        ...


class Peers(Protocol):
    """All ranks that step together. Every rank makes the same calls in the same order."""

    @property
    def rank(self) -> int:
        """This rank's number; rank 0 speaks to the master for all."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def vote(self, ballot: Ballot) -> Vote:
        """Cast a ballot and go on."""
        ...

    def share(self, text: str) -> str:
        """Rank 0's text, on every rank. Raises PeerFailed when a rank is gone."""
        ...

    def lend(self, batch: Any) -> Any:
        """The batch of the lowest rank that gives one (None is none), on every rank."""
        ...


def together(peers: Peers, prepare: Callable[[], object], ask: Callable[[], str]) -> str:
    """Prepare on every rank, then ask on rank 0, and give every rank the answer.

    What goes wrong on one rank ends the call on all: that rank raises its own error, the others PeerFailed.
    """
    _all_do(peers, prepare)
    answers: list[str] = []
    _all_do(peers, lambda: answers.append(ask() if peers.rank == 0 else ""))
    return peers.share(answers[0])


def _all_do(peers: Peers, act: Callable[[], object]) -> None:
    error: Exception | None = None
    try:
        act()
    except Exception as exc:  # noqa: BLE001  the others must hear of it before it goes on
        error = exc
    count = peers.vote(Ballot(failed=int(error is not None))).wait()
    if error is not None:
        raise error
    check_peers(count)


def check_peers(count: Ballot) -> None:
    """Raise PeerFailed if a rank cannot go on."""
    if count.failed:
        raise PeerFailed(
            f"{count.failed} other rank(s) of this job cannot go on: their own errors say why. Start all "
            "ranks again from the last checkpoint, as torchrun does by itself"
        )
