"""Replicas of a torchft job are killed with -9 and started again, while the others go on."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import quiet_port

from edl_torch.testing import wait_until

HERE = Path(__file__).parent
EDL = (sys.executable, "-m", "edl_torch")
RECORDS = 607
EPOCHS = 2
WINDOW_RECORDS = 8  # two batches of four


class Job:
    """A master, and replicas by number."""

    def __init__(self, folder: Path, lighthouse: str) -> None:
        self.folder = folder
        self.address = f"127.0.0.1:{quiet_port()}"
        self._lighthouse = lighthouse
        where = ["--addr", self.address, "--state", str(folder / "state")]
        self._master = subprocess.Popen([*EDL, "master", *where], stdout=subprocess.PIPE, text=True)
        assert self._master.stdout is not None
        assert self._master.stdout.readline().startswith("ready")
        self._replicas: dict[int, subprocess.Popen[str]] = {}

    def start(self, number: int, dies_at: int = 0, workers: int = 0) -> subprocess.Popen[str]:
        """Start a replica that kills itself in this attempt at a step."""
        arguments = [
            str(number),
            self._lighthouse,
            str(RECORDS),
            str(self.folder),
            str(workers),
            str(dies_at),
        ]
        with (self.folder / f"{number}.log").open("a") as log:
            self._replicas[number] = subprocess.Popen(
                [sys.executable, str(HERE / "ft_trainer.py"), *arguments],
                stdout=log,
                stderr=log,
                text=True,
                env=os.environ | {"EDL_MASTER_ADDR": self.address, "OMP_NUM_THREADS": "1"},
            )
        return self._replicas[number]

    def attempts(self, number: int) -> int:
        """Steps that this replica has come to, in all its lives."""
        path = self.folder / f"{number}.attempts"
        return path.stat().st_size if path.exists() else 0

    def log(self, number: int) -> str:
        return (self.folder / f"{number}.log").read_text()[-4000:]

    def newest_counts(self) -> list[float]:
        """Of the model that has taken most steps."""
        models = [json.loads(path.read_text()) for path in self.folder.glob("*.json")]
        return list(max(models)[1])

    def audit(self) -> tuple[int, dict[str, Any]]:
        where = [str(self.folder / "audit"), "--state", str(self.folder / "state"), "--json"]
        said = subprocess.run([*EDL, "audit", *where], capture_output=True, text=True, timeout=60)
        return said.returncode, json.loads(said.stdout)

    def close(self) -> None:
        for process in (*self._replicas.values(), self._master):
            process.kill()
            process.wait(20)
        assert self._master.stdout is not None
        self._master.stdout.close()


@pytest.fixture
def job(tmp_path: Path, lighthouse: str) -> Iterator[Job]:
    made = Job(tmp_path, lighthouse)
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_killed_before_its_gradients_go_out_a_replica_leaves_nothing_in_the_model(job: Job) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    stays = job.start(0)
    for _ in range(5):
        dying = job.start(1, dies_at=chance.randint(1, 4))
        assert dying.wait(100) == -signal.SIGKILL, job.log(1)
        assert stays.poll() is None, "all data were read meanwhile"
    assert job.start(1).wait(200) == 0, job.log(1)
    assert stays.wait(100) == 0, job.log(0)
    assert job.newest_counts() == [EPOCHS] * RECORDS
    status, verdict = job.audit()
    assert (status, verdict["verdict"]) == (0, "PROVEN"), verdict


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_killed_anywhere_a_replica_leaves_one_window_twice_at_most(job: Job) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    stays = job.start(0, workers=2)
    kills = 5
    for _ in range(kills):
        before = job.attempts(1)
        dying = job.start(1, workers=2)
        wanted = before + chance.randint(1, 4)
        wait_until(lambda: job.attempts(1) >= wanted, timeout_s=100)  # noqa: B023
        time.sleep(chance.uniform(0, 0.1))
        dying.kill()
        assert dying.wait(20) == -signal.SIGKILL, job.log(1)
        assert stays.poll() is None, "all data were read meanwhile"
    assert job.start(1, workers=2).wait(200) == 0, job.log(1)
    assert stays.wait(100) == 0, job.log(0)
    counts = job.newest_counts()
    assert min(counts) >= EPOCHS
    assert sum(counts) <= EPOCHS * RECORDS + kills * WINDOW_RECORDS
    status, verdict = job.audit()
    assert (status, verdict["verdict"]) == (0, "PROVEN"), verdict
