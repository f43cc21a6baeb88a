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

    A wait that ends without a batch, as at the end of an epoch, is not counted. Nor is the work on a batch
    after which the loop was left: nobody says when it was done.
    """

    __slots__ = ("_asked_at", "_clock", "_for_ranks_s", "_handed_at", "_measuring")

    _asked_at: float
    _for_ranks_s: float  # since then

    def __init__(self, measuring: Measuring, clock: Callable[[], float] = time.perf_counter) -> None:
        self._measuring = measuring
        self._clock = clock
        self._handed_at: float | None = None  # None: the loop has no batch in hand

    def __repr__(self) -> str:
        return f"<Stopwatch {'waiting' if self._handed_at is None else 'stepping'}>"

    def asked(self) -> None:
        """The loop asks for a batch: it is done with the one before."""
        self._asked_at = now = self._clock()
        self._for_ranks_s = 0.0
        if self._handed_at is not None:
            self._measuring.stepped.add(now - self._handed_at)
            self._handed_at = None

    def handed(self, records: int) -> None:
        """The loop gets the batch that it asked for, of so many records."""
        self._handed_at = now = self._clock()
        self._measuring.handed(records, now - self._asked_at, self._for_ranks_s)

    def wait_for_ranks(self, wait: Callable[[], T]) -> T:
        """Return what `wait` does, which is ready when the other synchronous ranks are."""
        began = self._clock()
        result = wait()
        self._for_ranks_s += self._clock() - began
        return result
