"""Server of a master: binds an address, authenticates calls, serves, then drains.

As a process it serves until a signal; on a thread, in a process that does something else besides, until told.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import grpc
import grpc.aio

from edl_torch.core.dispatcher import Dispatcher
from edl_torch.core.limits import MESSAGE_BYTES
from edl_torch.core.members import Patience
from edl_torch.errors import AccessDenied, EdlError, MasterStartError
from edl_torch.master.addresses import check_free, checked_address
from edl_torch.master.durable import DurableState, GroupCommit
from edl_torch.master.health import SERVICE as HEALTH_SERVICE
from edl_torch.master.health import Health, HealthPort
from edl_torch.master.host import MasterHost
from edl_torch.master.servicer import SERVICE, MasterServicer
from edl_torch.master.web import web_port
from edl_torch.protocols import MakeServicer, servicers
from edl_torch.rpc.credentials import METADATA_KEY, AccessToken, ServerCredentials
from edl_torch.rpc.status import to_status
from edl_torch.system import descriptors
from edl_torch.system.address import HostPort
from edl_torch.system.processes import keep_children_alive, until_gone
from edl_torch.system.whole_files import whole_file

_OPEN = f"/{HEALTH_SERVICE}/"

Details = grpc.HandlerCallDetails
Continuation = Callable[[Details], Awaitable[Any]]
log = logging.getLogger("edl_torch.master")

DRAIN_S = 5.0
LOOK_S = 5.0  # at how many files are open


class Gate(grpc.aio.ServerInterceptor):
    """Interceptor that refuses calls without the master's token before their message is read.

    Health checks of an orchestrator carry no token, and learn only whether the master serves.
    """

    def __init__(self, token: AccessToken) -> None:
        self._token = token
        # As a stream, which is never read: the message of a stranger costs no memory.
        self._refusal: Any = grpc.stream_stream_rpc_method_handler(_refuse)

    async def intercept_service(self, continuation: Continuation, details: Details) -> Any:
        """Return the call's own handler, or one that refuses it."""
        given = [value for key, value in details.invocation_metadata if key == METADATA_KEY]
        has_token = len(given) == 1 and self._token.opens(given[0])
        if details.method.startswith(_OPEN) or has_token:
            return await continuation(details)
        return self._refusal


async def _refuse(requests: Any, context: Any) -> None:
    refusal = AccessDenied(
        "the master wants the token that it was started with, and the call has not that one: "
        "give EDL_MASTER_TOKEN_FILE=PATH, --token-file PATH, or token_file= of Credentials.read()"
    )
    await context.abort(*to_status(refusal))


class MasterServer:
    """Server of a master over one host. `start`, `drain` and `stop` run on one event loop.

    `foreign` serves clients of other protocols; None: of all that there are, as by default.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        address: str,
        *,
        insecure: bool = False,
        credentials: ServerCredentials | None = None,
        commits: GroupCommit | None = None,
        foreign: Sequence[MakeServicer] | None = None,
    ) -> None:
        keep_children_alive()
        self._credentials = credentials or ServerCredentials()
        self._wanted = checked_address(address, insecure=insecure, credentials=self._credentials)
        self.host = MasterHost(dispatcher, commits=commits)
        token = self._credentials.token
        self._server = grpc.aio.server(
            interceptors=[] if token is None else [Gate(token)],
            options=server_options(dispatcher.members.lease_timeout_s),
        )
        MasterServicer(self.host).add_to(self._server)
        self._foreign = [make(self.host) for make in (servicers({}) if foreign is None else foreign)]
        for servicer in self._foreign:
            servicer.add_to(self._server)
        self.health = Health(SERVICE, *(servicer.service for servicer in self._foreign))
        self.health.add_to(self._server)
        self._watching: list[asyncio.Task[None]] = []

    async def start(self) -> HostPort:
        """Bind and serve. Returns the address with its real port; raises MasterStartError."""
        check_free(self._wanted)
        tls = self._credentials.server_credentials()
        try:
            if tls is None:
                port = self._server.add_insecure_port(str(self._wanted))
            else:
                port = self._server.add_secure_port(str(self._wanted), tls)
        except (RuntimeError, ValueError) as exc:
            hint = "; do the certificate and its key belong together?" if self._credentials.encrypted else ""
            raise MasterStartError(f"cannot listen on {self._wanted}: {exc}{hint}") from exc
        self.host.start()
        for servicer in self._foreign:
            servicer.start()
        await self.host.committed()  # datasets of the command line
        await self._server.start()
        self._watching = [
            asyncio.create_task(self._stop_health(), name="edl-health"),
            asyncio.create_task(self._watch_connections(), name="edl-connections"),
        ]
        return HostPort(self._wanted.host, port)

    async def _stop_health(self) -> None:
        await self.host.failed()
        self.health.stop()

    async def _watch_connections(self) -> None:
        own, most, seldom = descriptors.in_use(), descriptors.connections(), descriptors.Seldom()
        while True:
            await asyncio.sleep(LOOK_S)
            if descriptors.in_use() - own >= most and seldom():
                log.warning(
                    "connections=%d as many as files allow (ulimit -n): others are refused. Those that say "
                    "nothing for %d s are closed",
                    most,
                    descriptors.SILENT_S,
                )

    async def drain(self, grace_s: float = DRAIN_S) -> None:
        """Stop gently: take no new calls, answer those that are here, commit."""
        self.health.stop()
        for task in self._watching:
            task.cancel()
        self.host.drain()
        await self._server.stop(grace_s)
        for servicer in self._foreign:
            await servicer.close()
        await self.host.close()

    async def stop(self) -> None:
        await self.drain(0.0)

    def __repr__(self) -> str:
        return f"<MasterServer {self._wanted} {self.host!r}>"


async def serve(
    dispatcher: Dispatcher,
    address: str,
    *,
    insecure: bool = False,
    credentials: ServerCredentials | None = None,
    on_ready: Callable[[HostPort], None],
    make_commits: Callable[[], GroupCommit] | None = None,
    with_process: int | None = None,
    foreign: Sequence[MakeServicer] | None = None,
    health_address: str | None = None,
    http_address: str | None = None,
    on_page: Callable[[str], None] = lambda _: None,
) -> None:
    """Serve until SIGTERM or SIGINT, or the end of `with_process`, then drain; a second one stops at once.

    At `health_address` health checks are answered without TLS, as long as calls are answered at all; at
    `http_address` the page and metrics, whose URL `on_page` hears.
    `make_commits` is called on the loop. Raises JournalError, after it has stopped, when a commit fails.
    """
    signals: asyncio.Queue[int] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signals.put_nowait, number)
    if with_process is not None:
        _watch(with_process, signals)
    commits = None if make_commits is None else make_commits()
    try:
        server = MasterServer(
            dispatcher,
            address,
            insecure=insecure,
            credentials=credentials,
            commits=commits,
            foreign=foreign,
        )
        probes = None if health_address is None else HealthPort(server.health, health_address)
        page = None
        if http_address is not None:
            page = web_port(
                server.host.status,
                lambda: server.host.last_event,
                http_address,
                insecure=insecure,
                credentials=credentials,
            )
    except EdlError:
        if commits is not None:
            await commits.close()
        raise
    try:
        ready = await server.start()
        if probes is not None:
            log.info("health checks on %s", await probes.start())
        if page is not None:
            on_page(f"{page.scheme}://{await page.start()}/")
        on_ready(ready)
    except EdlError as error:
        await server.stop()
        if probes is not None:
            await probes.stop()
        if page is not None:
            await page.stop()
        raise (server.host.failure or error) from None
    await first_of(_signal_came(signals), server.host.failed())
    if server.host.failure is None:
        await _drain_until_signal(server, signals)
    else:
        await server.stop()
    if probes is not None:
        await probes.stop()
    if page is not None:
        await page.stop()
    if server.host.failure is not None:
        raise server.host.failure


def _watch(process: int, signals: asyncio.Queue[int]) -> None:
    """Put SIGTERM there when the process has ended."""
    loop = asyncio.get_running_loop()

    def watch() -> None:
        until_gone(process)
        with contextlib.suppress(RuntimeError):  # the loop has ended before
            loop.call_soon_threadsafe(signals.put_nowait, signal.SIGTERM)

    threading.Thread(target=watch, name="edl-with-process", daemon=True).start()


async def first_of(*waiting: Coroutine[Any, Any, Any]) -> None:
    """Wait until one of them ends; the others are cancelled."""
    tasks = [asyncio.create_task(each) for each in waiting]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _signal_came(signals: asyncio.Queue[int]) -> None:
    log.info("signal %d: draining", await signals.get())


async def _drain_until_signal(server: MasterServer, signals: asyncio.Queue[int]) -> None:
    drained = asyncio.create_task(server.drain(), name="edl-drain")
    again = asyncio.create_task(signals.get(), name="edl-second-signal")
    await asyncio.wait({drained, again}, return_when=asyncio.FIRST_COMPLETED)
    if not drained.done():
        log.info("second signal: stopping at once")
        await server.stop()
    again.cancel()
    await asyncio.gather(drained, again, return_exceptions=True)


def server_options(lease_timeout_s: float) -> list[tuple[str, int]]:
    """Options of the grpc server. Its own pings only clean up: who is dead is decided by `core.members`."""
    patience_ms = max(1000, int(min(lease_timeout_s, 3600.0) * 1000))
    return [
        ("grpc.so_reuseport", 0),  # so that a port in use is an error
        *descriptors.bounded(descriptors.connections()),
        ("grpc.max_receive_message_length", MESSAGE_BYTES),
        ("grpc.max_send_message_length", MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", patience_ms),
        ("grpc.keepalive_timeout_ms", patience_ms),
        ("grpc.http2.ping_timeout_ms", patience_ms),  # of those that keepalive waits for
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 1000),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
        ("grpc.http2.max_ping_strikes", 0),
    ]


def write_address_file(path: Path, address: HostPort) -> None:
    """Write `host:port` so that a reader sees either nothing or all of it. Raises MasterStartError."""
    try:
        with whole_file(path) as file:
            file.write(f"{address}\n".encode())
    except OSError as exc:
        raise MasterStartError(f"cannot write the address file {path}: {exc.strerror}") from exc


# On a thread of its own, in a process that does something else besides --------------------------------

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
        on_failure: Callable[[EdlError], None] = lambda _: None,
        **patience: Unpack[Patience],
    ) -> None:
        self._open = partial(DurableState, state, **patience)
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
