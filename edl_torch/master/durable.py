"""Durable dispatcher: read from a journal at the start, written to it from then on, by group commits."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Unpack

from edl_torch.core import persistence
from edl_torch.core.changes import Changes, Key
from edl_torch.core.limits import printable
from edl_torch.core.members import Patience
from edl_torch.errors import EdlError, JournalError, MasterStartError, MasterUnavailable
from edl_torch.master.journal import Journal, encoded

Work = Callable[[], None]
Ended = Callable[[Exception | None], None]
log = logging.getLogger("edl_torch.master")
NAMES = 1 << 40  # of which each start skips some at random: those that a lost future may have given


class Writer:
    """Worker thread for the event loop that runs when it is made. `close()` ends it.

    Like `loop.run_in_executor`, with fewer hand-overs of the interpreter's lock: beside a busy loop each of
    them costs as much as a small commit.
    """

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
            error: Exception | None = None
            try:
                work()
            except Exception as exc:  # noqa: BLE001  whoever asked for the work judges it
                error = exc
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody wants to know
                self._loop.call_soon_threadsafe(ended, error)

    def __repr__(self) -> str:
        return f"<Writer {self._thread.name} jobs={self._jobs.qsize()}>"


class GroupCommit:
    """Group commit of `changes`: at most one runs, and all that changes meanwhile goes into the next one.

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
            if not isinstance(error, JournalError):
                log.error("commit failed", exc_info=error)
                error = JournalError(f"cannot write the journal: {error!r}")
            self.failure = error
            self._failed.set()
        waiting, self._running = self._running, None
        _wake(waiting)
        if self.failure is not None:
            waiting, self._next = self._next, None
            _wake(waiting)
        elif self._next is not None:
            self._begin()

    def __repr__(self) -> str:
        state = "failed" if self.failure else "busy" if self._running is not None else "idle"
        return f"<GroupCommit {state}>"


def _wake(waiting: list[asyncio.Future[None]] | None) -> None:
    for end in waiting or ():
        if not end.done():  # else its call was given up
            end.set_result(None)


class DurableState:
    """Dispatcher of the journal in `folder`; every session counts as heard at `now`.

    A journal that is known to be older than what was said from it is suspended, unless it is to be accepted.
    Raises MasterStartError for a folder that cannot be used. `group_commit()` needs a running event loop.
    """

    def __init__(
        self,
        folder: Path,
        *,
        now: float,
        accept_older: bool = False,
        **patience: Unpack[Patience],
    ) -> None:
        self._journal = Journal(folder)
        self._changes = Changes()
        try:
            self.dispatcher = persistence.load(
                self._journal.read(),
                ledger_id=self._journal.ledger_id,
                now=now,
                changes=self._changes,
                **patience,
            )
        except (LookupError, TypeError, ValueError, EdlError) as exc:
            self._journal.close()
            raise MasterStartError(
                f"the journal in {folder} is damaged ({exc!r}): give another --state folder"
            ) from exc
        ledgers = tuple(self.dispatcher.ledgers)
        log.info(
            "%s dir=%s ledger=%s datasets=%d leases=%d sessions=%d",
            *("resumed" if ledgers else "new journal", folder, self.dispatcher.ledger_id),
            *(len(ledgers), sum(len(ledger.leases) for ledger in ledgers), len(self.dispatcher.members)),
        )
        if not self._journal.is_new:
            self._begin_again(accept_older)

    def _begin_again(self, accept_older: bool) -> None:
        """What an earlier master wrote may be older than what it said."""
        self.dispatcher.rollback.begin_again(secrets.randbelow(NAMES) + 1)
        if accept_older:
            self.dispatcher.rollback.accept_older()
            log.warning(
                "--accept-older-journal: goes on from the journal as ledger=%s, all leases are void%s",
                *(self.dispatcher.ledger_id, self._journal.lost and f"; {self._journal.lost}"),
            )
        elif self._journal.lost:
            log.error("%s", self.dispatcher.rollback.suspend(self._journal.lost))
        for dataset, why in self.dispatcher.suspended.items():
            log.error("dataset=%s is suspended: %s", printable(dataset), why)

    def group_commit(self) -> GroupCommit:
        """Return the group commit that a host waits for before it answers."""

        def collect(keys: tuple[Key, ...]) -> Callable[[], None]:
            batch = encoded(persistence.update(self.dispatcher, keys))
            return functools.partial(self._journal.write, batch)

        return GroupCommit(self._changes, collect)

    def close(self) -> None:
        """Close the journal: another master may open the folder."""
        self._journal.close()

    def __repr__(self) -> str:
        return f"<DurableState {self._journal!r} {self.dispatcher!r}>"
