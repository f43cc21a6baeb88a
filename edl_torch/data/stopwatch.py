"""Times one iteration of the training loop: how long it waits for each batch, how long it works on each.

Two looks at the clock a batch. It must not know what a batch is, nor where it comes from.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from edl_torch.trainer.measuring import Measuring

T = TypeVar("T")


class Stopwatch:
    """Adds what it times to `measuring`. `clock` tells seconds.

    One call a batch counts its wait and the work on the batch before it. A wait that ends without a batch, as
    at the end of an epoch, is not counted. Nor is the work on a batch after which the loop was left: nobody
    says when it was done.
    """

    __slots__ = ("_for_ranks_s", "_handed_at", "_measuring", "clock")

    def __init__(self, measuring: Measuring, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._measuring = measuring
        self._handed_at: float | None = None  # None: the loop has no batch in hand
        self._for_ranks_s = 0.0  # of the wait that is under way

    def __repr__(self) -> str:
        return f"<Stopwatch handed_at={self._handed_at}>"

    def handed(self, asked_at: float, records: int) -> None:
        """The loop gets the batch, of so many records, for which it asked at a time of the clock."""
        now, handed_at = self.clock(), self._handed_at
        if handed_at is not None:
            self._measuring.stepped.add(asked_at - handed_at)
        self._handed_at = now
        self._measuring.handed(records, now - asked_at, self._for_ranks_s)
        self._for_ranks_s = 0.0

    def ended(self, asked_at: float) -> None:
        """The loop asked for a batch at a time of the clock, and there is none."""
        if self._handed_at is not None:
            self._measuring.stepped.add(asked_at - self._handed_at)
        self._handed_at = None
        self._for_ranks_s = 0.0

    def wait_for_ranks(self, wait: Callable[[], T]) -> T:
        """Return what `wait` does, which is ready when the other synchronous ranks are."""
        began = self.clock()
        result = wait()
        self._for_ranks_s += self.clock() - began
        return result
