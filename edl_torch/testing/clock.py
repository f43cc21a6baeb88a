"""Time in tests: a clock that stands still until it is moved, and waiting without sleeping blindly."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


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


def wait_until(
    condition: Callable[[], T], *, timeout_s: float = 10.0, poll_s: float = 0.01, what: str = ""
) -> T:
    """Call `condition` until it returns something true, and return that.

    Looks every `poll_s` seconds. After `timeout_s` seconds raises AssertionError, which names `what`
    (default: the condition) and the last value seen. An exception of the condition is not caught.

        address = wait_until(lambda: path.exists() and path.read_text(), timeout_s=5)
    """
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() >= deadline:
            raise AssertionError(
                f"not within {timeout_s:g} s: {what or condition}; the last value: {value!r}"
            )
        time.sleep(poll_s)
