"""`edl-torch master` as a process: started, killed, and started again where it was. A master on a thread.

It knows nothing of what is asked of a master.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeAlias

import preloaded
import pytest
from loop_thread import LoopThread
from processes import quiet_port

from edl_torch.client.grpc.client import MasterClient
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.master.server import MasterServer

EDL = (sys.executable, "-m", "edl_torch")
END_S = 20.0

ROWS = """
class Rows:
    def __init__(self, data_origin, rows):
        self.rows = {data_origin: rows}

    def create_shards(self, mode):
        return self.rows

    def read_records(self, task):
        return ()
"""

MakeMaster: TypeAlias = "Callable[..., MasterProcess]"


def write_rows_reader(folder: Path, patch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Write a reader of as many records as `rows` says. Returns the options that give it to a master."""
    (folder / "rows_reader.py").write_text(ROWS)
    patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *sys.path]))
    return "--custom-data-reader", "rows_reader:Rows"


class MasterProcess:
    """A master on one port, through all its lives; with `state` it keeps a journal there.

    `arguments` and `state` may be changed between two lives. `log` is what it said in all of them.
    """

    def __init__(self, folder: Path, *arguments: str, state: Path | None = None) -> None:
        self.arguments = arguments
        self.state = state
        self.address = f"127.0.0.1:{quiet_port()}"
        self.address_file = folder / f"address-{self.address.rpartition(':')[2]}"
        self._log = self.address_file.with_suffix(".log")
        self._process: subprocess.Popen[str] | None = None
        self._clients: list[MasterClient] = []

    @property
    def process(self) -> subprocess.Popen[str]:
        """The last one that was started."""
        assert self._process is not None, "the master was never started"
        return self._process

    @property
    def log(self) -> str:
        return self._log.read_text()

    def start(self, **options: Any) -> None:
        """Start it, with `options` of Popen, and wait until it serves."""
        where = ["--addr", self.address, "--address-file", str(self.address_file)]
        journal = [] if self.state is None else ["--state", str(self.state)]
        with self._log.open("ab") as log:
            start = subprocess.Popen if "preexec_fn" in options else preloaded.Popen
            self._process = start(
                [*EDL, "master", *where, *journal, *self.arguments],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                **options,
            )
        assert self._process.stdout is not None
        ready = self._process.stdout.readline()
        assert ready == f"ready on {self.address}\n", f"{ready!r}\n{self.log}"

    def kill(self) -> None:
        """As `kill -9` does."""
        self.process.kill()
        self._end()

    def stop(self) -> None:
        """As a supervisor does, with SIGTERM."""
        self.process.terminate()
        self._end()
        assert self.process.returncode == 0, self.log

    def _end(self) -> None:
        self.process.wait(END_S)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def client(self, worker_id: str = "test", **options: Any) -> MasterClient:
        """A client of it, closed with it."""
        self._clients.append(MasterClient(self.address, worker_id, **options))
        return self._clients[-1]

    def close(self) -> None:
        """Leave nothing behind."""
        for client in self._clients:
            client.close()
        if self._process is not None:
            self._process.kill()
            self._end()


class ServerThread:
    """A master in this process, on a loop of its own, and clients for it. `options` are its dispatcher's."""

    def __init__(
        self,
        dispatcher: Dispatcher | None = None,
        make_commits: Callable[[], Any] | None = None,
        *,
        foreign: Any = None,
        **options: Any,
    ) -> None:
        self.dispatcher = dispatcher or Dispatcher(ledger_id="ledger", **options)
        self._loop = LoopThread()
        self.server = self.run(self._make(make_commits, foreign))
        self.address = str(self.run(self.server.start()))
        self._clients: list[Any] = []

    async def _make(self, make_commits: Callable[[], Any] | None, foreign: Any) -> MasterServer:
        commits = make_commits and make_commits()
        return MasterServer(self.dispatcher, "127.0.0.1:0", commits=commits, foreign=foreign)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run(coroutine)

    def client(self, worker_id: str = "w", **options: Any) -> MasterClient:
        """A client of it, closed with it."""
        self._clients.append(MasterClient(self.address, worker_id, **options))
        return self._clients[-1]

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self.run(self.server.stop())
        self._loop.close()
