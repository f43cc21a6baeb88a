"""A clock that stands still until a test moves it."""

from __future__ import annotations

import threading


class FakeClock:
    """Call it for the time in seconds; `advance` moves it. Safe for several threads."""

    def __init__(self, now: float = 1000.0) -> None:
        self._now = now
        self._lock = threading.Lock()

    def __call__(self) -> float:
        with self._lock:
            return self._now

    def advance(self, seconds: float) -> float:
        """Let time pass; returns the new time. A clock never goes back: raises ValueError."""
        if seconds < 0:
            raise ValueError(f"a monotonic clock cannot go back by {-seconds} s")
        with self._lock:
            self._now += seconds
            return self._now

    def __repr__(self) -> str:
        return f"<FakeClock {self()}>"
