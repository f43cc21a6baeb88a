"""An event loop in a thread of its own, for servers that a test talks to from outside.

It must not know what is served.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs from its making until `close`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="test loop", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """What the coroutine returns on the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    def call(self, action: Callable[[], T]) -> T:
        """What `action()` returns on the loop, between two others."""

        async def act() -> T:
            return action()

        return self.run(act())

    def close(self) -> None:
        """End the loop and its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()
