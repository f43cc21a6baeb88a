"""Faults between a trainer and a fake master: calls and answers that get lost, a master that is away.

A fault is planned beforehand and happens once; nothing here is random.
"""

from __future__ import annotations

import threading
from collections import deque
from enum import Enum


class Fault(Enum):
    """What happens to one call."""

    LOSE_CALL = "the call never reaches the master; the transport repeats it"
    LOSE_ANSWER = "the master acts, its answer is lost; the transport repeats the call"
    REPEAT = "the call reaches the master twice; the second answer arrives"


class Faults:
    """Planned faults by call name: `register`, `lease`, `report`, `snapshot`, `restore`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._planned: dict[str, deque[Fault | None]] = {}
        self._away = False

    def plan(self, call: str, *faults: Fault | None) -> None:
        """The next calls of this name suffer these faults, one each; None is a call without a fault."""
        with self._lock:
            self._planned.setdefault(call, deque()).extend(faults)

    def master_away(self, away: bool = True) -> None:
        """While away every call raises MasterUnavailable, as after `master_timeout_s`."""
        with self._lock:
            self._away = away

    @property
    def away(self) -> bool:
        """Whether the master is away."""
        with self._lock:
            return self._away

    def next(self, call: str) -> Fault | None:
        """The fault of the call that is made now."""
        with self._lock:
            planned = self._planned.get(call)
            return planned.popleft() if planned else None

    def __repr__(self) -> str:
        planned = {call: len(faults) for call, faults in self._planned.items() if faults}
        return f"<Faults {planned}{' away' if self._away else ''}>"
