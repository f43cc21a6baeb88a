"""An event loop whose time stands still while anybody can act, and then jumps to what is due next.

It knows no master; nothing on it may wait for another thread or for the network.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

LONGEST_S = 86_400.0

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "everybody waits, and nothing is due"
            self.now += max(timeout, 0.0)
            assert self.now < LONGEST_S, "it waits for ever"
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs coroutines in no time; `time()` says how long they took."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


def in_virtual_time(work: Coroutine[Any, Any, T]) -> T:
    """The coroutine's result."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
