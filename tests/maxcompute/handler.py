"""One request: who asks, for what, what goes wrong with it, and the answer's bytes on the wire."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlsplit

from maxcompute.faults import Corrupt, Cut, Fail, Fault, Hold, Refuse
from maxcompute.service import (
    error_xml,
    partition_xml,
    partitions_xml,
    session_json,
    table_xml,
    tenant_json,
)
from maxcompute.tables import Table
from maxcompute.tunnel import Refusal, body_of, part_of

if TYPE_CHECKING:
    from maxcompute.server import MaxComputeServer

_API = "/api"
_TABLE = re.compile(r"/projects/([^/]+)/tables/([^/]+)")
_TUNNEL = re.compile(r"/projects/([^/]+)/tunnel")
_PIECE_BYTES = 1 << 14


class Handler(BaseHTTPRequestHandler):
    """Answers in HTTP/1.1 with the connection kept, bodies in chunks, as the tunnel does."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    owner: MaxComputeServer

    def do_GET(self) -> None:
        """Dispatch."""
        self._answer()

    def do_POST(self) -> None:
        """Dispatch."""
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a test's output is the test's."""

    def _answer(self) -> None:
        address = urlsplit(self.path)
        params = dict(parse_qsl(address.query, keep_blank_values=True))
        path = unquote(address.path)
        api = path.startswith(_API + "/")
        try:
            if path == f"{_API}/logview/host":
                self._send(b"http://127.0.0.1")
                return
            target = self.path.removeprefix(_API) if api else self.path
            if not self.owner.account.admits(self.command, target, dict(self.headers)):
                raise _wrong_key(api)
            self._serve(path.removeprefix(_API) if api else path, params, api)
        except Refusal as exc:
            self._send(error_xml(exc.code, str(exc)), status=exc.status)

    def _serve(self, path: str, params: dict[str, str], api: bool) -> None:
        operation = _operation(path, params, self.command, api)
        fault = self.owner.note(operation, params)
        if isinstance(fault, Refuse):
            self._hang_up()
            return
        if isinstance(fault, Fail):
            if fault.html:
                self._send(f"<html><body>{fault.message}</body></html>".encode(), status=fault.status)
                return
            raise Refusal(fault.status, fault.code, fault.message)
        if operation in ("tunnel", "tenant"):
            self._send(self.owner.address.encode() if operation == "tunnel" else tenant_json())
            return
        table = self._table(path)
        kind = "application/xml" if api else "application/json"
        if operation == "data":
            self._stream(self._data(table, params, fault), fault)
        else:
            self._send(self._document(operation, table, params), kind=kind)

    def _document(self, operation: str, table: Table, params: dict[str, str]) -> bytes:
        owner, partition = self.owner, params.get("partition", "")
        match operation:
            case "table":
                return table_xml(table)
            case "partitions":
                return partitions_xml(table, partition, params.get("marker", ""), owner.partitions_page)
            case "partition":
                return partition_xml(part_of(table, partition))
        if operation == "session":
            session = owner.sessions.create(table, partition, owner.initiating_polls)
        else:
            session = owner.sessions.find(params["downloadid"], table, partition)
        return session_json(table, session.id, session.status, session.part.rows.num_rows)

    def _data(self, table: Table, params: dict[str, str], fault: Fault | None) -> bytes:
        owner = self.owner
        session = owner.sessions.find(params["downloadid"], table, params.get("partition", ""))
        return body_of(
            session,
            params.get("rowrange", ""),
            params.get("columns", ""),
            arrow="arrow" in params,
            batch_rows=owner.batch_rows,
            fault=fault,
        )

    def _table(self, path: str) -> Table:
        match = _TABLE.fullmatch(path)
        if match is None or match.group(1) != self.owner.project:
            raise Refusal(404, "NoSuchProject", "The specified project name does not exist.")
        table = self.owner.tables.get(match.group(2).lower())
        if table is None:
            raise Refusal(404, "NoSuchTable", "The specified table name does not exist.")
        return table

    def _send(self, body: bytes, status: int = 200, kind: str = "application/xml") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("x-odps-request-id", "0000000000000000")
        self.end_headers()
        self.wfile.write(body)

    def _stream(self, body: bytes, fault: Fault | None) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            for piece in _pieces(body, fault):
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            if isinstance(fault, Cut) and not fault.clean:
                self._hang_up()
                return
            self.wfile.write(b"0\r\n\r\n")
        except OSError:  # the client has gone away, or the server is being closed
            self.close_connection = True

    def _hang_up(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


def _pieces(body: bytes, fault: Fault | None) -> Iterator[bytes]:
    if isinstance(fault, Cut):
        body = body[: fault.after]
    if isinstance(fault, Corrupt):
        at = fault.at % len(body)
        body = body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]
    if isinstance(fault, Hold):
        if fault.after:
            yield body[: fault.after]
        fault.reached.set()
        fault.go.wait()
        body = body[fault.after :]
    for start in range(0, len(body), _PIECE_BYTES):
        yield body[start : start + _PIECE_BYTES]


def _operation(path: str, params: dict[str, str], method: str, api: bool) -> str:
    if api:
        if path == "/tenants":
            return "tenant"
        if _TUNNEL.fullmatch(path):
            return "tunnel"
        if "partitions" in params:
            return "partitions"
        return "partition" if "partition" in params else "table"
    if method == "POST" and "downloads" in params:
        return "session"
    if "downloadid" not in params:
        raise Refusal(400, "InvalidURI", "Couldn't parse the specified URI.")
    return "data" if "data" in params else "reload"


def _wrong_key(api: bool) -> Refusal:
    if api:
        return Refusal(401, "ODPS-0410042", "Invalid signature value - User signature does not match")
    return Refusal(401, "Unauthorized", "The request authorization header is invalid or missing.")
