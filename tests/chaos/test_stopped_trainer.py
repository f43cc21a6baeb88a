"""A trainer process that is stopped for longer than its timeout, and continued."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import preloaded
import pytest
from ride_kit import BATCH, Gate, Master, Trainer, check

from edl_torch.testing import wait_until

HERE = Path(__file__).parent
SIZE = 600


class Process:
    """A trainer process, and the batches that it was done with."""

    def __init__(self, address: str, out: Path) -> None:
        self._out = out
        self._process = preloaded.Popen(
            [sys.executable, "-W", "ignore", HERE / "stoppable_trainer.py", address, out, str(SIZE)],
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(HERE.parents[1])},
        )

    def batches(self) -> list[list[int]]:
        if not self._out.exists():
            return []
        lines = self._out.read_text().split("\n")[:-1]
        return [[int(number) for number in line.split()] for line in lines]

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def done(self) -> list[int]:
        errors = self._process.communicate(timeout=30)[1].decode()
        assert self._process.returncode == 0, errors
        return [record for batch in self.batches() for record in batch]

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


@pytest.fixture
def start_process(tmp_path: Path) -> Iterator[Callable[[str], Process]]:
    processes: list[Process] = []

    def start(address: str) -> Process:
        processes.append(Process(address, tmp_path / f"trained-{len(processes)}"))
        return processes[-1]

    yield start
    for process in processes:
        process.close()


def test_a_stopped_and_continued_trainer_doubles_one_batch_at_most(
    start_master: Callable[..., Master], start_process: Callable[[str], Process]
) -> None:
    master = start_master(lease_timeout_s=1.5)
    stopped = start_process(master.address)
    wait_until(lambda: len(stopped.batches()) >= 5, timeout_s=40)
    stopped.signal(signal.SIGSTOP)
    wait_until(lambda: master.dispatcher.expired >= 1)
    before = len(stopped.batches())
    gate = Gate(20)  # what the stopped one held is served first
    living = Trainer(master.address, gate, size=SIZE)
    gate.wait_reached()
    stopped.signal(signal.SIGCONT)
    wait_until(lambda: len(stopped.batches()) > before + 5)  # it goes on, with new leases
    gate.open()
    check(master, stopped.done(), living.done().trained, size=SIZE, doubled=BATCH)
