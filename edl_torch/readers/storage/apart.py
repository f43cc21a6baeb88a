"""Requests to object stores that another process makes: where obstore's threads may not run.

The process ends with the one that began it, however that dies. It is told the options through a socket, and
inherits the
environment: nothing stands in its argument list.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from queue import SimpleQueue
from socket import socketpair
from typing import Any

from edl_torch.readers.storage.drivers import Driver, Object, Page, Transient, driver_for
from edl_torch.readers.storage.names import root_of

log = logging.getLogger("edl_torch.readers")

_BEGIN = (
    "import sys; sys.path[:] = {path!r}; "
    "from edl_torch.readers.storage.apart import serve; serve({descriptor})"
)
_THREADS = 96
_END = object()


class Apart:
    """A process that lists, looks and reads in place of this one. Made at the first request."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = dict(options)
        self._lock = threading.Lock()
        self._server: _Server | None = None

    def listing(self, folder: str) -> Iterator[Page]:
        answers = self._ask("listing", folder)
        while (page := answers.get()) is not _END:
            yield _good(page)

    def look(self, name: str) -> Object:
        found: Object = _good(self._ask("look", name).get())
        return found

    def read(self, one: Object, start: int, length: int) -> bytes:
        data: bytes = _good(self._ask("read", one, start, length).get())
        return data

    def put(self, name: str, data: bytes, new: bool = False) -> bool:
        return bool(_good(self._ask("put", name, data, new).get()))

    def remove(self, name: str) -> None:
        _good(self._ask("remove", name).get())

    def _ask(self, *request: Any) -> SimpleQueue[Any]:
        with self._lock:
            if self._server is None or self._server.is_gone or self._server.pid != os.getpid():
                self._server = _Server(self._options)
            return self._server.ask(request)

    def close(self) -> None:
        """End the process."""
        with self._lock:
            if self._server is not None:
                self._server.close()
                self._server = None


def _good(answer: Any) -> Any:
    if isinstance(answer, BaseException):
        raise answer
    return answer


class _Server:
    """The other process, and the thread here that takes its answers to who asked."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        ours, theirs = socketpair()
        with theirs:
            text = _BEGIN.format(path=[entry for entry in sys.path if entry], descriptor=theirs.fileno())
            self._process = subprocess.Popen(
                [sys.executable, "-c", text],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._connection = Connection(ours.detach())
        self._connection.send(dict(options))
        self._sending = threading.Lock()
        self._asked: dict[int, SimpleQueue[Any]] = {}
        self._number = 0
        self.is_gone = False
        self.pid = os.getpid()
        self._end = weakref.finalize(self, _end, self._process, os.getpid())
        threading.Thread(
            target=_take, args=(weakref.ref(self), self._connection), name="edl-apart", daemon=True
        ).start()

    def ask(self, request: tuple[Any, ...]) -> SimpleQueue[Any]:
        answers: SimpleQueue[Any] = SimpleQueue()
        with self._sending:
            self._number += 1
            self._asked[self._number] = answers
            try:
                self._connection.send((self._number, *request))
            except OSError as exc:
                self._asked.pop(self._number, None)
                self.is_gone = True
                answers.put(Transient(f"the process that reads is gone ({exc})"))
        return answers

    def answered(self, number: int, answer: Any, last: bool) -> None:
        asked = self._asked.pop(number, None) if last else self._asked.get(number)
        if asked is not None:
            asked.put(answer)

    def gone(self) -> None:
        with self._sending:
            self.is_gone = True
            waiting, self._asked = self._asked, {}
        for asked in waiting.values():
            asked.put(Transient("the process that reads is gone"))

    def close(self) -> None:
        self._end()


def _end(process: subprocess.Popen[bytes], pid: int) -> None:
    if os.getpid() == pid:
        process.kill()
        process.wait()  # the thread that takes its answers ends by that, and closes the connection


def _take(server: weakref.ref[_Server], connection: Connection) -> None:
    """Take answers to who asked. Holds no server while it waits."""
    with connection:
        while True:
            try:
                number, answer, last = connection.recv()
            except (EOFError, OSError):
                break
            one = server()
            if one is not None:
                one.answered(number, answer, last)
            del one, answer
    one = server()
    if one is not None:
        one.gone()


# In the other process -----------------------------------------------------------------------------------


def serve(descriptor: int) -> None:
    """Answer requests until who asks is gone."""
    connection = Connection(descriptor)
    sending = threading.Lock()
    drivers: dict[str, Driver] = {}
    try:
        options = connection.recv()

        def send(number: int, answer: Any, last: bool) -> None:
            with sending:
                connection.send((number, answer, last))

        def answer(number: int, verb: str, *request: Any) -> None:
            name = request[0].name if verb == "read" else request[0]
            try:
                root = root_of(name)
                driver = drivers.get(root)
                if driver is None:
                    driver = drivers[root] = driver_for(root, options)
                if verb == "listing":
                    for page in driver.listing(*request):
                        send(number, page, False)
                    send(number, None, True)
                else:
                    said = getattr(driver, verb)(*request)
                    send(number, bytes(said) if verb == "read" else said, True)
            except OSError:
                raise
            except Exception as exc:  # noqa: BLE001  who asked raises it
                send(number, exc, True)

        with ThreadPoolExecutor(_THREADS) as pool:
            while True:
                pool.submit(answer, *connection.recv())
    except (EOFError, OSError):
        os._exit(0)
