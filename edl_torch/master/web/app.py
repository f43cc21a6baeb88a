"""HTTP server for people: the page, its stream of events, `/api/status` and `/metrics`.

It reads a master's status and changes nothing. One status a second is made for all that look, and none while
nobody does.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import re
import socket
import ssl
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from functools import cache
from importlib import resources
from typing import Any

from aiohttp import web

from edl_torch.core.status import MasterStatus, plain, plain_frame
from edl_torch.errors import EdlError, MasterStartError
from edl_torch.master.addresses import check_free, checked_address
from edl_torch.master.web import hashes, with_style
from edl_torch.master.web.metrics import CONTENT_TYPE, exposition
from edl_torch.rpc.credentials import ServerCredentials
from edl_torch.system import descriptors
from edl_torch.system.address import HostPort, is_loopback_name

log = logging.getLogger("edl_torch.master")

REFRESH_S = 1.0
LOOK_S = 0.2  # for new events
SHARE = 0.007  # of the time that making frames may take: with sending them to ten viewers a hundredth
SEEN_S = 1.6  # after a frame an event waits no longer: within 2 s it is seen
MOST_VIEWERS = 200
BACKLOG = 128  # connections that wait to be accepted
PATIENCE_S = 30.0  # with a viewer that does not read
MOST_BAD = 100
_OPEN = frozenset(("/", "/healthz"))  # what has no data is for everybody

Status = Callable[[], MasterStatus]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@cache
def page() -> tuple[bytes, str]:
    """Return the page, and the policy that lets it run its own script and style alone."""
    text = with_style(resources.files("edl_torch.master.web").joinpath("page.html").read_text("utf-8"))
    policy = (
        f"default-src 'none'; script-src {hashes(text, 'script')}; style-src {hashes(text, 'style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text.encode(), policy


def pauses(cpu_s: float) -> tuple[float, float]:
    """Return how long after a frame that took so much processor time the next one may be made, and how long
    after it will be though nothing happens."""
    rest_s = cpu_s / SHARE
    return min(rest_s, SEEN_S), max(rest_s, REFRESH_S)


class Frames:
    """Statuses as the page reads them: one for all viewers, made anew once a second and after each event."""

    def __init__(self, status: Status, latest: Callable[[], int]) -> None:
        self._status = status
        self._latest = latest  # number of the last event
        self._changed = asyncio.Condition()
        self._number = 0
        self._frame = b""
        self._task: asyncio.Task[None] | None = None
        self.viewers = 0
        self.ended = False

    async def follow(self) -> AsyncGenerator[bytes, None]:
        """Return frames until `end`; a slow viewer misses some."""
        self.viewers += 1
        try:
            if self._task is None:
                self._task = asyncio.create_task(self._run(), name="edl-page")
            seen = 0
            while not self.ended:
                if self._frame and self._number != seen:
                    seen = self._number
                    yield self._frame
                    continue
                async with self._changed:
                    if not self.ended:
                        await self._changed.wait()
        finally:
            self.viewers -= 1
            if not self.viewers and self._task is not None:
                self._task.cancel()
                self._task, self._frame = None, b""

    def _make(self) -> float:
        """Make a frame. Returns its processor time: a machine that pauses says nothing of frames."""
        begun = time.thread_time()
        value = plain_frame(self._status(), MOST_BAD)
        self._frame = b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"
        self._number += 1
        return time.thread_time() - begun

    async def _run(self) -> None:
        while True:
            known, begun = self._latest(), time.monotonic()
            try:
                least_s, most_s = pauses(self._make())
            except Exception as error:  # the top of a task
                if not isinstance(error, EdlError):  # such as that the master was closed
                    log.exception("the page failed")
                return await self.end()
            async with self._changed:
                self._changed.notify_all()
            await asyncio.sleep(least_s)
            while time.monotonic() - begun < most_s:
                if self._latest() != known:
                    break
                await asyncio.sleep(LOOK_S)

    async def end(self) -> None:
        self.ended = True
        async with self._changed:
            self._changed.notify_all()


class WebPort:
    """HTTP server over a master's status. `start` and `stop` run on one event loop."""

    def __init__(
        self,
        status: Status,
        latest: Callable[[], int],
        address: str,
        *,
        insecure: bool = False,
        credentials: ServerCredentials | None = None,
    ) -> None:
        self._credentials = credentials or ServerCredentials()
        self._wanted = checked_address(address, insecure=insecure, credentials=self._credentials)
        self._status = status
        self._latest = latest
        self._frames: Frames | None = None
        self._accepting: set[asyncio.Task[None]] = set()  # of what listens, and of connections that are new
        self._open: dict[web.RequestHandler, None] = {}  # connections, the oldest first
        self._busy: set[object] = set()  # those with a request
        self._tls: ssl.SSLContext | None = None
        self._most = descriptors.connections(descriptors.PEOPLE)
        self._seldom = descriptors.Seldom()
        app = web.Application(middlewares=[self._guard], client_max_size=1024)
        app.router.add_get("/", self._page)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/api/status", self._api_status)
        app.router.add_get("/api/events", self._events, allow_head=False)
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)

    @property
    def scheme(self) -> str:
        """`https` where the master has a certificate, else `http`."""
        return "https" if self._credentials.encrypted else "http"

    async def start(self) -> HostPort:
        """Bind and serve. Returns the address with its real port; raises MasterStartError."""
        check_free(self._wanted)
        self._frames = Frames(self._status, self._latest)
        await self._runner.setup()
        self._tls = self._credentials.ssl_context()
        try:
            listeners = await self._listen()
        except OSError as exc:
            await self._runner.cleanup()
            raise MasterStartError(f"cannot serve the page on {self._wanted}: {exc.strerror}") from exc
        for listener in listeners:
            self._begin(self._accept(listener))
        return HostPort(self._wanted.host, listeners[0].getsockname()[1])

    async def stop(self) -> None:
        """End all streams, and stop."""
        if self._frames is not None:
            await self._frames.end()
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        await self._runner.cleanup()

    # Who comes in ---------------------------------------------------------------------------------------

    # Not by asyncio's own server: it accepts a hundred connections before it looks at one, and where no file
    # is left it writes thousands of errors a second (Python 3.11 and 3.12).

    async def _listen(self) -> list[socket.socket]:
        found = await asyncio.get_running_loop().getaddrinfo(
            self._wanted.host, self._wanted.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        listeners: list[socket.socket] = []
        try:
            for family, place in dict.fromkeys((family, place) for family, _, _, _, place in found):
                listeners.append(socket.create_server(place[:2], family=family, backlog=BACKLOG))
                listeners[-1].setblocking(False)
        except OSError:
            for listener in listeners:
                listener.close()
            raise
        return listeners

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="edl-page-accepts")
        self._accepting.add(task)
        task.add_done_callback(self._accepting.discard)

    async def _accept(self, listener: socket.socket) -> None:
        with listener:
            while True:
                try:
                    connection, _ = await asyncio.get_running_loop().sock_accept(listener)
                except OSError as error:
                    self._say(error.strerror or "")
                    await asyncio.sleep(1.0)
                    continue
                if self._makes_room():
                    self._begin(self._serve(connection))
                else:
                    connection.close()
                    self._say(f"there are {self._most}")
                await asyncio.sleep(0)  # for what was closed to go: `sock_accept` may not wait at all

    def _makes_room(self) -> bool:
        """Whether one more may come; where all places are taken, the oldest that asks for nothing goes."""
        if len(self._open) + len(self._accepting) > self._most:
            self._open = {connection: None for connection in self._open if connection.transport is not None}
        if len(self._open) + len(self._accepting) <= self._most:
            return True
        oldest = next((connection for connection in self._open if connection not in self._busy), None)
        if oldest is None:
            return False
        del self._open[oldest]
        oldest.force_close()
        return True

    def _say(self, why: str) -> None:
        if self._seldom():
            log.warning("the page accepts no more connections for now: %s", why)

    async def _serve(self, connection: socket.socket) -> None:
        assert self._runner.server is not None
        handler = self._runner.server()
        patience_s = None if self._tls is None else descriptors.SILENT_S
        with contextlib.suppress(OSError):  # it has gone, or its TLS failed
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: handler, connection, ssl=self._tls, ssl_handshake_timeout=patience_s
            )
            self._open[handler] = None

    # Who may see what -----------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self._busy.add(request.protocol)
        try:
            refused = self._refusal(request)
            answer = refused or await handler(request)
        except web.HTTPException as exc:
            answer = web.Response(status=exc.status, text=exc.reason)
        except EdlError as exc:
            answer = web.Response(status=503, text=str(exc))
        finally:
            self._busy.discard(request.protocol)
        if not answer.prepared:
            answer.headers.update(_headers())
        return answer

    def _refusal(self, request: web.Request) -> web.Response | None:
        token = self._credentials.token
        if token is None:
            if self._is_own_name(request.host):
                return None
            text = "This page has no token: open it by an IP address or as localhost, not by another name."
            return web.Response(status=403, text=text)
        if request.path in _OPEN or token.opens(request.headers.get("Authorization", "")):
            return None
        text = "The master wants the token that it was started with: send Authorization: Bearer TOKEN."
        return web.Response(status=401, text=text, headers={"WWW-Authenticate": "Bearer"})

    def _is_own_name(self, host: str) -> bool:
        """Return whether a request may name this host: another site could have its own name lead here."""
        name = host.rpartition(":")[0] if re.search(r":\d+$", host) else host
        name = name.strip("[]").lower()
        if is_loopback_name(name) or name == self._wanted.host.lower() or self._credentials.encrypted:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    # What there is ----------------------------------------------------------------------------------------

    async def _page(self, request: web.Request) -> web.Response:
        body, policy = page()
        headers = {"Content-Security-Policy": policy}
        return web.Response(body=body, content_type="text/html", charset="utf-8", headers=headers)

    async def _healthz(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _api_status(self, request: web.Request) -> web.Response:
        return web.json_response(plain(self._status()))

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=exposition(self._status()), headers={"Content-Type": CONTENT_TYPE})

    async def _events(self, request: web.Request) -> web.StreamResponse:
        frames = self._frames
        if frames is None or frames.viewers >= MOST_VIEWERS:
            return web.Response(status=503, text=f"{MOST_VIEWERS} look already: close a page.")
        answer = web.StreamResponse(headers={**_headers(), "Content-Type": "text/event-stream"})
        await answer.prepare(request)
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with contextlib.aclosing(frames.follow()) as following:
                async for frame in following:
                    await asyncio.wait_for(answer.write(frame), PATIENCE_S)
        return answer

    def __repr__(self) -> str:
        return f"<WebPort {self._wanted}>"


def _headers() -> dict[str, str]:
    return {
        "Cache-Control": "no-store",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
    }
