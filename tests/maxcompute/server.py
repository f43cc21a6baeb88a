"""The server itself: an address, an account, tables, sessions, and what was asked of it."""

from __future__ import annotations

import socket
import socketserver
import sys
import threading
from collections import Counter
from collections.abc import Mapping
from http.server import ThreadingHTTPServer
from types import TracebackType
from typing import Any

from maxcompute.faults import Fault, Faults
from maxcompute.handler import Handler
from maxcompute.signature import Account
from maxcompute.tables import Content, Table
from maxcompute.tunnel import Sessions


class MaxComputeServer:
    """A MaxCompute service and its tunnel on one loopback port; a context manager.

    Args:
        project, access_id, access_key, sts_token: Who may use it, and the one project that it has.
        batch_rows: Content in one Arrow message of a download.
        initiating_polls: How many answers say that a new session is still being made.
        partitions_page: Partitions in one answer of a listing.

    `requests` counts what was asked, by operation (see `faults`); `asked` has the parameters, in order.
    """

    def __init__(
        self,
        project: str = "demo",
        access_id: str = "test-access-id",
        access_key: str = "test-access-key-0123456789",
        sts_token: str | None = None,
        *,
        batch_rows: int = 1024,
        initiating_polls: int = 0,
        partitions_page: int = 1000,
    ) -> None:
        self.project = project
        self.account = Account(access_id, access_key, sts_token)
        self.batch_rows = batch_rows
        self.initiating_polls = initiating_polls
        self.partitions_page = partitions_page
        self.tables: dict[str, Table] = {}
        self.sessions = Sessions()
        self.faults = Faults()
        self.asked: list[tuple[str, dict[str, str]]] = []
        self._lock = threading.Lock()
        handler = type("BoundHandler", (Handler,), {"owner": self})
        self._http = _Http(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def access_id(self) -> str:
        """The account's id."""
        return self.account.access_id

    @property
    def access_key(self) -> str:
        """The account's key."""
        return self.account.access_key

    @property
    def address(self) -> str:
        """`host:port`."""
        return "{}:{}".format(*self._http.server_address[:2])

    @property
    def endpoint(self) -> str:
        """What clients take as the endpoint; the tunnel's they find through it."""
        return f"http://{self.address}/api"

    @property
    def tunnel_endpoint(self) -> str:
        """The tunnel's endpoint, for clients that are told."""
        return f"http://{self.address}"

    @property
    def requests(self) -> Counter[str]:
        """How often each operation was asked for."""
        with self._lock:
            return Counter(operation for operation, _ in self.asked)

    def environment(self) -> dict[str, str]:
        """The variables that make a client use this server."""
        return {
            "ODPS_PROJECT": self.project,
            "ODPS_ACCESS_ID": self.access_id,
            "ODPS_ACCESS_KEY": self.access_key,
            "ODPS_ENDPOINT": self.endpoint,
        }

    def add_table(
        self,
        name: str,
        columns: Mapping[str, str],
        rows: Content | None = None,
        *,
        partition_keys: Mapping[str, str] | None = None,
        partitions: Mapping[str, Content] | None = None,
    ) -> Table:
        """A table of these columns (name to MaxCompute type) with `rows`, or with rows by partition."""
        table = Table(name, dict(columns), dict(partition_keys or {}))
        for spec, part in ({"": rows} if partitions is None else partitions).items():
            if part is not None:
                table.write(part, spec)
        self.tables[name.lower()] = table
        return table

    def note(self, operation: str, params: Mapping[str, str]) -> Fault | None:
        """Remember a request; the fault that it suffers."""
        with self._lock:
            self.asked.append((operation, dict(params)))
        return self.faults.next(operation)

    def close(self) -> None:
        """End it, connections that are open included."""
        self.faults.let_go()
        self._http.shutdown()
        self._http.hang_up()
        self._thread.join()
        self._http.server_close()
        if self._http.mistakes:
            raise AssertionError("a handler of the MaxComputeServer failed") from self._http.mistakes[0]

    def __enter__(self) -> MaxComputeServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<MaxComputeServer {self.endpoint} project={self.project!r} tables={sorted(self.tables)}>"


class _Http(ThreadingHTTPServer):
    """With the connections that are open known, so that an end of the server is an end of them."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[socketserver.BaseRequestHandler]) -> None:
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self.mistakes: list[BaseException] = []
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients come and go; what else goes wrong is a mistake of this server's."""
        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, OSError):
            self.mistakes.append(error)

    def hang_up(self) -> None:
        """Shut down all connections."""
        with self._lock:
            connections = tuple(self._connections)
        for connection in connections:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # it ended by itself
