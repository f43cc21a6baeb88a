"""The processes of a chaos run: a master with a journal through all its lives, and a trainer in each slot."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import preloaded
from processes import quiet_port

HERE = Path(__file__).parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}


class MasterProcess:
    """`edl-torch master --state`, on one port with one journal."""

    def __init__(
        self, folder: Path, *arguments: str, address: str | None = None, prefix: Sequence[str] = ()
    ) -> None:
        self.address = address or f"127.0.0.1:{quiet_port()}"
        self._prefix = prefix  # of the command: where it runs
        self._state = folder / "state"
        self._log = folder / "master.log"
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Does not wait until it serves."""
        command = [*self._prefix, sys.executable, "-m", "edl_torch", "master", "--addr", self.address]
        with self._log.open("ab") as log:
            start = subprocess.Popen if self._prefix else preloaded.Popen
            self._process = start(
                [*command, "--state", str(self._state), *self._arguments],
                stdout=log,
                stderr=log,
                env=ENVIRONMENT,
            )

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    @property
    def fell(self) -> bool:
        """Whether it ended by itself."""
        return self._process is not None and self._process.poll() is not None

    @property
    def log(self) -> str:
        return self._log.read_text()


def living() -> Iterator[tuple[int, int]]:
    """Every process that has not ended, and its group."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, group, *_ = path.read_text().rpartition(")")[2].split()
            if state not in "ZX":
                yield int(path.parent.name), int(group)


@dataclass(slots=True)
class Life:
    """One trainer process, from its start to its end."""

    slot: int
    worker_id: str
    stem: Path
    pid: int
    killed_at: float | None = None  # seconds since 1970

    @property
    def exit_status(self) -> int | None:
        path = self.path("exit")
        return int(path.read_text()) if path.exists() else None

    @property
    def batches(self) -> list[list[tuple[int, int]]]:
        """Epoch and number of the records of each batch that its loop was done with."""
        path = self.path("notes")
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        numbers = [[int(word) for word in line.split()] for line in lines]
        return [[(epoch, record) for record in records] for epoch, *records in numbers]

    @property
    def errors(self) -> str:
        path = self.path("errors")
        return path.read_text() if path.exists() else ""

    def hang(self, seconds: float) -> None:
        """Its loop stands still for so long, after the batch that it has in hand."""
        new = self.path("hang.new")
        new.write_text(str(seconds))
        new.replace(self.path("hang"))

    @property
    def shown(self) -> bool:
        """Whether it has answered SIGUSR1, or cannot."""
        return self.exit_status is not None or "most recent call first" in self.errors

    @property
    def processes(self) -> list[int]:
        """What lives of it and its loader workers, its group; nothing where there is no /proc."""
        return [pid for pid, group in living() if group == self.pid]

    def path(self, kind: str) -> Path:
        """Where its `notes`, `errors` or `exit` are."""
        return self.stem.with_name(f"{self.stem.name}.{kind}")

    def signal(self, number: int) -> None:
        """Nothing happens to one that has ended."""
        if self.exit_status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """As `kill -9` does."""
        if self.exit_status is None:
            self.killed_at = time.time()
            self.signal(signal.SIGKILL)


@dataclass(slots=True)
class Launcher:
    """Forks trainers from a process that has imported torch."""

    errors: Path
    _process: subprocess.Popen[str] = field(init=False)

    def __post_init__(self) -> None:
        with self.errors.open("ab") as log:
            self._process = preloaded.Popen(
                [sys.executable, "-W", "ignore", str(HERE / "chaos_trainers.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=ENVIRONMENT,
            )

    def start(self, slot: int, worker_id: str, stem: Path, job: dict[str, Any]) -> Life:
        """Start a trainer; returns once it is forked."""
        life = Life(slot=slot, worker_id=worker_id, stem=stem, pid=0)
        paths = {kind: str(life.path(kind)) for kind in ("notes", "errors", "exit", "hang")}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({**job, **paths, "worker_id": worker_id}) + "\n")
        self._process.stdin.flush()
        life.pid = int(self._process.stdout.readline())
        return life

    def close(self) -> None:
        self._process.communicate(timeout=20)

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
