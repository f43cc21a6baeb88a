"""Signals that ask a run to stop: a first one is a notice to the loader, so that a checkpoint can be saved.

SIGTERM needs none of this once the program looks at `loader.preempted`. Here Ctrl-C does the same, and both
also count before there is a loader.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

from edl_torch import ElasticDataLoader


class StopSignal:
    """Makes the first SIGINT or SIGTERM a notice to the loader; a second one interrupts."""

    def __init__(self) -> None:
        self.number = 0
        self._loader: ElasticDataLoader | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def tell(self, loader: ElasticDataLoader) -> None:
        """From now on `loader` hears of the signal, or of the one that came."""
        self._loader = loader
        if self.number:
            loader.preempt()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.number:
            raise KeyboardInterrupt
        self.number = number
        if self._loader is not None:
            self._loader.preempt()
