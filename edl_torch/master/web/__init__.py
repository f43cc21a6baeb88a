"""Page and metrics of a master over HTTP, for people and for Prometheus; needs `edl-torch[web]`.

They read a master's status alone. Here is what the rest of the package calls, without those packages: the
server of the page, that of an embedded master, and what all HTML pages for people share.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import re
import threading
from collections.abc import Callable
from importlib import resources
from typing import TYPE_CHECKING

from edl_torch.errors import MasterStartError

if TYPE_CHECKING:
    from edl_torch.core.status import MasterStatus
    from edl_torch.master.embedded import LocalMaster
    from edl_torch.master.web.app import WebPort
    from edl_torch.rpc.credentials import ServerCredentials

log = logging.getLogger("edl_torch.master")

START_S = 10.0


def web_port(
    status: Callable[[], MasterStatus],
    latest: Callable[[], int],
    address: str,
    *,
    insecure: bool = False,
    credentials: ServerCredentials | None = None,
) -> WebPort:
    """Return a server of the page, not started. Raises MasterStartError where its packages are missing."""
    try:
        from edl_torch.master.web.app import WebPort
    except ModuleNotFoundError as exc:
        raise MasterStartError(
            f"the page needs {exc.name}, which is not installed: pip install 'edl-torch[web]'"
        ) from exc
    return WebPort(status, latest, address, insecure=insecure, credentials=credentials)


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


def with_style(text: str) -> str:
    """Return a page with the common style in its place."""
    style = resources.files("edl_torch.master.web").joinpath("base.css").read_text("utf-8")
    return text.replace("/* base.css */\n", style, 1)


def hashes(text: str, tag: str) -> str:
    """Return the sources of a Content-Security-Policy that admit these elements of a page and no others."""
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.S)
    digests = [hashlib.sha256(body.encode()).digest() for body in found]
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
