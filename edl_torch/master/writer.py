"""Worker thread of an event loop: does one piece of work after another, and tells the loop how each ended.

Like `loop.run_in_executor`, with fewer hand-overs of the interpreter's lock: beside a busy loop each of them
costs as much as a small commit.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue

Work = Callable[[], None]
Ended = Callable[[Exception | None], None]


class Writer:
    """Worker thread for the event loop that runs when it is made. `close()` ends it."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._jobs: SimpleQueue[tuple[Work, Ended] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def do(self, work: Work, ended: Ended) -> None:
        """Run `work` in the thread, after all that was asked for before; then `ended(error)` on the loop."""
        self._jobs.put((work, ended))

    def close(self) -> None:
        """End the thread once all work is done."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, ended = job
            error = _error_of(work)
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody wants to know
                self._loop.call_soon_threadsafe(ended, error)

    def __repr__(self) -> str:
        return f"<Writer {self._thread.name} jobs={self._jobs.qsize()}>"


def _error_of(work: Work) -> Exception | None:
    try:
        work()
    except Exception as error:  # noqa: BLE001  whoever asked for the work judges it
        return error
    return None
