"""What a session asks of iterations over plain DataLoaders, which it cannot see itself."""

from __future__ import annotations

from typing import Protocol

from edl_torch.trainer.counting import Deliveries


class PlainIterations(Protocol):
    """Iterations over plain DataLoaders, numbered in the order in which this process began them.

    A run names one of them, as its workers do.
    """

    @property
    def newest(self) -> int:
        """The number of the one that began last."""

    def number(self, run: str) -> int:
        """The number of an iteration; 0 where another process began it."""

    def is_over(self, run: str) -> bool:
        """Whether this process has given the iteration up, or come to its end."""

    def deliveries(self, run: str) -> Deliveries | None:
        """What the iteration delivers; None where it cannot be seen."""

    def check(self, run: str) -> None:
        """Raise ForeignLoop for an iteration of a framework that does not go through it in order."""

    def worker_died(self, run: str) -> None:
        """A worker of the iteration was killed."""


class NoIterations:
    """Those of a trainer whose records nobody reads through a DataLoader."""

    newest = 0

    def number(self, run: str) -> int:
        return 0

    def is_over(self, run: str) -> bool:
        return False

    def deliveries(self, run: str) -> Deliveries | None:
        return None

    def check(self, run: str) -> None:
        return

    def worker_died(self, run: str) -> None:
        return
