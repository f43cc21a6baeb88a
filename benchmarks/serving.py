"""Server processes of our own on this machine, and what the system says that they have used.

It does not know what is asked of them. Processor time and memory come from /proc: elsewhere they are nan.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

READY_S = 60.0


@dataclass(frozen=True, slots=True)
class Server:
    """A process that serves at `address`."""

    address: str
    pid: int

    def cpu_s(self) -> float:
        """Seconds of processor time so far, of all its threads that live."""
        try:
            tasks = list(Path(f"/proc/{self.pid}/task").iterdir())
            return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
        except OSError:
            return math.nan

    def peak_mb(self) -> float:
        """The most memory that it had resident, in MB."""
        return self._status_mb("VmHWM")

    def rss_mb(self) -> float:
        """The memory that it has resident now, in MB."""
        return self._status_mb("VmRSS")

    def _status_mb(self, row: str) -> float:
        try:
            lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        except OSError:
            return math.nan
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(row))


@contextmanager
def serving(command: Sequence[str]) -> Iterator[Server]:
    """A Python process that prints a line which ends in its address, until the end of the block."""
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=folder,
            env=environment_of_children(),
        )
        try:
            assert process.stdout is not None
            yield Server(process.stdout.readline().split()[-1], process.pid)
        finally:
            process.terminate()
            process.wait(READY_S)


@contextmanager
def master(*options: str) -> Iterator[Server]:
    """A master process, started with `options`."""
    with serving(["-m", "edl_torch", "master", "--addr", "127.0.0.1:0", *options]) as server:
        yield server


def environment_of_children() -> dict[str, str]:
    """Ours, with this checkout first on the path."""
    import edl_torch

    root = str(Path(edl_torch.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
