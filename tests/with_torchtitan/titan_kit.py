"""Torchtitan jobs that are killed and started again, and what is left of them.

It does not know torchtitan.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from framework_jobs import acknowledged_by
from processes import quiet_port
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from edl_torch.testing import wait_until

HERE = Path(__file__).parent
EDL = (sys.executable, "-m", "edl_torch")


class Jobs:
    """Incarnations of one job in `folder`, one after the other, in forks of one process."""

    def __init__(self, folder: Path, process: subprocess.Popen[str], **job: Any) -> None:
        self.folder = folder
        self._process = process
        self._job = job

    def start(self, **job: Any) -> int:
        """Start an incarnation. Returns the number of its process group."""
        job = {"folder": str(self.folder), "store_port": quiet_port(), **self._job, **job}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return self._number()

    def end(self) -> int:
        """Wait for the end of the incarnation. Returns its exit status; -9 where it was killed."""
        return self._number()

    def kill_after(self, steps: int, delay_s: float, **job: Any) -> None:
        """Start an incarnation, and kill all its processes after so many steps and then this time."""
        before = self.steps
        group = self.start(**job)
        try:
            wait_until(lambda: self.steps >= before + steps, timeout_s=120)
            time.sleep(delay_s)
        finally:
            os.killpg(group, signal.SIGKILL)
        assert self.end() == -signal.SIGKILL

    def _number(self) -> int:
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())

    @property
    def steps(self) -> int:
        """Steps that were taken by all incarnations."""
        path = self.folder / "steps"
        return path.stat().st_size if path.exists() else 0

    @property
    def acknowledged(self) -> int:
        """Records that have counted by now, of all epochs."""
        return acknowledged_by(self.folder / "state")

    @property
    def last_checkpoint(self) -> Path:
        """The one that torchtitan would load."""
        whole = self.folder.glob("checkpoint/step-*/.metadata")
        return max((path.parent for path in whole), key=lambda path: int(path.name.removeprefix("step-")))

    def counts(self, records: int) -> list[float]:
        """What the model of the last checkpoint has learnt of each record."""
        model = {"counts": torch.zeros(records)}
        load(model, checkpoint_id=self.last_checkpoint, no_dist=True)
        return model["counts"].tolist()

    @property
    def saved_of_the_data(self) -> set[str]:
        """The entries of the dataloader in the last checkpoint."""
        entries = FileSystemReader(self.last_checkpoint).read_metadata().state_dict_metadata
        return {name for name in entries if name.startswith("dataloader")}

    def audit(self) -> tuple[int, dict[str, Any]]:
        """Exit status and verdict of `edl-torch audit`."""
        where = [str(self.folder / "audit"), "--state", str(self.folder / "state"), "--json"]
        said = subprocess.run([*EDL, "audit", *where], capture_output=True, text=True, timeout=60)
        return said.returncode, json.loads(said.stdout)


@contextmanager
def jobs(folder: Path, **job: Any) -> Iterator[Jobs]:
    """A master with a journal, and a process whose forks train."""
    address = f"127.0.0.1:{quiet_port()}"
    env = os.environ | {"EDL_MASTER_ADDR": address, "OMP_NUM_THREADS": "1"}
    where = ["--addr", address, "--state", str(folder / "state")]
    master = subprocess.Popen([*EDL, "master", *where], stdout=subprocess.PIPE, text=True)
    with (folder / "trainer.log").open("w") as log:
        trainer = subprocess.Popen(
            [sys.executable, str(HERE / "titan_trainer.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=env,
        )
    try:
        assert master.stdout is not None
        assert master.stdout.readline().startswith("ready")
        yield Jobs(folder, trainer, **job)
    finally:
        assert trainer.stdin is not None
        trainer.stdin.close()
        for process in (trainer, master):
            process.kill()
            process.wait(20)
            assert process.stdout is not None
            process.stdout.close()
