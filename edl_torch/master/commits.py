"""Group commit on an event loop: one thread writes the changes of many calls, which wait for it together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from edl_torch.core.changes import Changes, Key
from edl_torch.errors import JournalError, MasterUnavailable
from edl_torch.master.writer import Writer

log = logging.getLogger("edl_torch.master")


class GroupCommit:
    """Commits `changes`: at most one commit runs, and all that changes meanwhile goes into the next one.

    `collect(keys)` is called on the loop, between two calls, and returns the write; that runs in a thread of
    its own. Once a write has failed nothing is ever said to be committed again.
    """

    def __init__(self, changes: Changes, collect: Callable[[tuple[Key, ...]], Callable[[], None]]) -> None:
        self.failure: JournalError | None = None
        self._changes = changes
        self._collect = collect
        self._loop = asyncio.get_running_loop()
        self._writer = Writer("edl-journal")
        # Who waits for the end of the commit that runs, and of the one after it; None: there is no such one.
        self._running: list[asyncio.Future[None]] | None = None
        self._next: list[asyncio.Future[None]] | None = None
        self._failed = asyncio.Event()

    def changed(self) -> None:
        """Begin a commit of what has changed, now or after the one that runs."""
        if self._changes and self._next is None and self.failure is None:
            self._next = []
            if self._running is None:  # a round of the loop later: calls that are here already share it
                self._loop.call_soon(self._loop.call_soon, self._begin)

    async def committed(self) -> None:
        """Wait until all that has happened so far is safe. Raises MasterUnavailable when it never will be."""
        self.changed()
        waiting = self._running if self._next is None else self._next
        if waiting is not None:
            end = self._loop.create_future()
            waiting.append(end)
            await end
        if self.failure is not None:
            raise MasterUnavailable(f"the master stops: {self.failure}") from self.failure

    async def failed(self) -> JournalError:
        """Wait for a failure."""
        await self._failed.wait()
        assert self.failure is not None
        return self.failure

    async def close(self) -> None:
        """Commit the rest and end the thread. A failure is left in `failure`."""
        with contextlib.suppress(MasterUnavailable):
            await self.committed()
        self._writer.close()

    def _begin(self) -> None:
        self._running, self._next = self._next, None
        try:
            self._writer.do(self._collect(self._changes.take()), self._end)
        except Exception as error:  # noqa: BLE001  whatever it is, what was to be written is not
            self._end(error)

    def _end(self, error: Exception | None) -> None:
        if error is not None:
            self._fail(error)
        waiting, self._running = self._running, None
        _wake(waiting)
        if self.failure is not None:
            waiting, self._next = self._next, None
            _wake(waiting)
        elif self._next is not None:
            self._begin()

    def _fail(self, error: Exception) -> None:
        if not isinstance(error, JournalError):
            log.error("commit failed", exc_info=error)
            error = JournalError(f"cannot write the journal: {error!r}")
        self.failure = error
        self._failed.set()

    def __repr__(self) -> str:
        state = "failed" if self.failure else "busy" if self._running is not None else "idle"
        return f"<GroupCommit {state}>"


def _wake(waiting: list[asyncio.Future[None]] | None) -> None:
    for end in waiting or ():
        if not end.done():  # else its call was given up
            end.set_result(None)
