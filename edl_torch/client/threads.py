"""Where a session's locks, threads, clock and id come from: the system, or a test.

What waits is kept apart from what is decided: a session never makes a lock or a thread by itself. It must not
know what they are for.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol


class Condition(Protocol):
    """What a session uses of `threading.Condition`."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *_: Any) -> Any: ...

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        """Wait, with the lock let go, until the predicate holds; returns its last value."""
        ...

    def notify_all(self) -> None:
        """All that wait look again."""
        ...


class Thread(Protocol):
    """One thread of a session."""

    def start(self) -> None:
        """Begin. Apart from the making of it, so that who keeps it has it before it runs."""
        ...

    def join(self, timeout_s: float) -> None:
        """Wait for its end; called by itself it does nothing."""
        ...

    def is_alive(self) -> bool:
        """Whether it has not ended."""
        ...


class Threads(Protocol):
    """Makes what one trainer's session needs of the machine."""

    def new_id(self) -> str:
        """A session id that nobody else has."""
        ...

    def clock(self) -> float:
        """Seconds, for how long to wait."""
        ...

    def lock(self) -> AbstractContextManager[Any]:
        """A lock that may be held while a call to the master is on its way."""
        ...

    def condition(self) -> Condition:
        """A condition with a lock of its own."""
        ...

    def thread(self, target: Callable[[], None], name: str) -> Thread:
        """A thread that will run `target`."""
        ...


class SystemThread:
    """A daemon thread of the system."""

    def __init__(self, target: Callable[[], None], name: str) -> None:
        self._thread = threading.Thread(target=target, name=name, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait for its end; called by itself it does nothing."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._thread.is_alive()


class SystemThreads:
    """The system's own."""

    def new_id(self) -> str:
        """Random, and new in every process."""
        return uuid.uuid4().hex

    def clock(self) -> float:
        """Monotonic."""
        return time.monotonic()

    def lock(self) -> AbstractContextManager[Any]:
        """A lock."""
        return threading.Lock()

    def condition(self) -> Condition:
        """A condition around a reentrant lock."""
        return threading.Condition()

    def thread(self, target: Callable[[], None], name: str) -> Thread:
        """A daemon thread."""
        return SystemThread(target, name)


SYSTEM: Threads = SystemThreads()
