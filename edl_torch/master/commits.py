"""Group commit on an event loop: what changed is written by one thread, and who changed it waits together.

It knows neither calls nor SQLite: it takes changes here and has them written there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from edl_torch.core.changes import Changes, Key
from edl_torch.errors import JournalError, MasterUnavailable

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
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="edl-journal")
        self._task: asyncio.Task[None] | None = None  # while something is to be committed
        self._running: asyncio.Future[None] | None = None  # the end of the commit that runs
        self._next: asyncio.Future[None] | None = None  # the end of the one after it
        self._failed = asyncio.Event()

    def changed(self) -> None:
        """See to it that what has changed is committed soon."""
        if self._changes and self._next is None:
            self._next = asyncio.get_running_loop().create_future()
            if self._task is None:
                self._task = asyncio.create_task(self._commit(), name="edl-commit")

    async def committed(self) -> None:
        """Wait until all that has happened so far is safe. Raises MasterUnavailable when it never will be."""
        self.changed()
        awaited = self._next or self._running
        if awaited is not None and self.failure is None:
            await asyncio.shield(awaited)  # it is others' too
        if self.failure is not None:
            raise MasterUnavailable(f"the master stops: {self.failure}") from self.failure

    async def failed(self) -> JournalError:
        """Wait for a failure."""
        await self._failed.wait()
        assert self.failure is not None
        return self.failure

    async def close(self) -> None:
        """Commit the rest and end the thread. A failure is left in `failure`."""
        self.changed()
        if self._task is not None:
            await self._task
        self._writer.shutdown()

    async def _commit(self) -> None:
        try:
            await asyncio.sleep(0)  # calls that are here already share the commit
            while self._next is not None and self.failure is None:
                self._running, self._next = self._next, None
                await self._write()
                self._running.set_result(None)
                self._running = None
        finally:
            self._task = None
            for awaited in (self._running, self._next):
                if awaited is not None and not awaited.done():
                    awaited.set_result(None)

    async def _write(self) -> None:
        try:
            write = self._collect(self._changes.take())
            await asyncio.get_running_loop().run_in_executor(self._writer, write)
        except JournalError as error:
            self._fail(error)
        except Exception as error:  # whatever it is, what was to be written is not
            log.exception("commit failed")
            self._fail(JournalError(f"cannot write the journal: {error!r}"))

    def _fail(self, error: JournalError) -> None:
        self.failure = error
        self._failed.set()

    def __repr__(self) -> str:
        state = "failed" if self.failure else "busy" if self._task else "idle"
        return f"<GroupCommit {state}>"
