"""Signals that ask a run to stop: a first one is noted, so that a checkpoint can be saved."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any


class StopSignal:
    """Notes the first SIGINT or SIGTERM, to be asked about between batches; a second one interrupts.

    With `listen=False` it leaves signals alone.
    """

    def __init__(self, *, listen: bool = True) -> None:
        self.number = 0
        self._listened = (signal.SIGINT, signal.SIGTERM) if listen else ()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        for number in self._listened:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.number:
            raise KeyboardInterrupt
        self.number = number

    def asked(self) -> bool:
        """Whether a signal has come."""
        return self.number != 0


def leave_signals_to_trainer(worker_id: int) -> None:
    """For loader workers: Ctrl-C reaches all processes of a terminal, but the trainer alone decides."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
