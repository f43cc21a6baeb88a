"""Master with a journal on a thread of its own, in a process that does something else besides."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from pathlib import Path

from edl_torch.errors import EdlError, MasterStartError
from edl_torch.master.durable import DurableState
from edl_torch.master.server import MasterServer, first_of
from edl_torch.rpc.credentials import ServerCredentials

log = logging.getLogger("edl_torch.master")

START_S = 60.0
STOP_S = 10.0


class ThreadedMaster:
    """Serves `address` from the constructor, which raises MasterStartError, to `stop()`.

    It goes on where the journal in the folder `state` ends. `on_failure` is called, on its thread,
    when the journal cannot be written any more: nothing is answered then.
    """

    def __init__(
        self,
        address: str,
        *,
        state: Path,
        insecure: bool = False,
        credentials: ServerCredentials | None = None,
        lease_timeout_s: float = 30.0,
        grace_s: float = 1.0,
        progress_timeout_s: float = 0.0,
        on_failure: Callable[[EdlError], None] = lambda _: None,
    ) -> None:
        self._open = partial(
            DurableState,
            state,
            lease_timeout_s=lease_timeout_s,
            grace_s=grace_s,
            progress_timeout_s=progress_timeout_s,
        )
        self._server = partial(MasterServer, address=address, insecure=insecure, credentials=credentials)
        self._on_failure = on_failure
        self._ready: Future[str] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()
        self._unwanted = False
        self._thread = threading.Thread(target=self._run, name="edl-master", daemon=True)
        self._thread.start()
        try:
            self.address = self._ready.result(START_S)
        except TimeoutError:
            self._ask_to_stop()
            raise MasterStartError(
                f"the master on {address} with its journal in {state} did not start within {START_S:g} s: "
                f"is the disk of the journal slow, or the machine overloaded?"
            ) from None

    def stop(self) -> None:
        """Answer the calls that are here, commit, and end the thread."""
        self._ask_to_stop()
        self._thread.join(STOP_S)

    def _ask_to_stop(self) -> None:
        self._unwanted = True  # looked at once there is a loop
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._stopping.set)

    def _run(self) -> None:
        try:
            with closing(self._open(now=time.monotonic())) as state:
                asyncio.run(self._serve(state))
        except Exception as error:  # the top of a thread
            if not self._ready.done():
                self._ready.set_exception(error)
                return
            log.exception("the master failed")
            failure = (
                error if isinstance(error, EdlError) else MasterStartError(f"the master failed: {error!r}")
            )
            self._on_failure(failure)

    async def _serve(self, state: DurableState) -> None:
        self._loop = asyncio.get_running_loop()
        if self._unwanted:
            return
        commits = state.group_commit()
        try:
            server = self._server(state.dispatcher, commits=commits)
        except EdlError:
            await commits.close()
            raise
        try:
            self._ready.set_result(str(await server.start()))
            await first_of(self._stopping.wait(), server.host.failed())
        finally:
            await server.drain()
        if server.host.failure is not None:
            raise server.host.failure

    def __repr__(self) -> str:
        return f"<ThreadedMaster {self.address}>"
