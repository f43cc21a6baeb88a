"""The page of an embedded master, on a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import threading

from edl_torch.errors import MasterStartError
from edl_torch.master.embedded import LocalMaster
from edl_torch.master.web import web_port

log = logging.getLogger("edl_torch.master")

START_S = 10.0


def show(master: LocalMaster, address: str) -> str:
    """Serve the page of a master in this process until the process ends. Returns its URL.

    Raises MasterStartError. Only this machine can see it: there is no token.
    """
    port = web_port(master.status, lambda: master.last_event, address)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=_run, args=(loop,), name="edl-page", daemon=True)
    thread.start()
    try:
        found = asyncio.run_coroutine_threadsafe(port.start(), loop).result(START_S)
    except BaseException as exc:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(START_S)
        if isinstance(exc, TimeoutError):
            raise MasterStartError(f"the page on {address} did not start within {START_S:g} s") from None
        raise
    url = f"{port.scheme}://{found}/"
    log.warning("page on %s", url)
    return url


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()
