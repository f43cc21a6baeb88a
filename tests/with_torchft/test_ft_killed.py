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

import kill_matrix
import pytest
from framework_jobs import acknowledged_by
from kill_matrix import KILLS, each_job, lives
from processes import quiet_port

from edl_torch.testing import wait_until

HERE = Path(__file__).parent
EDL = (sys.executable, "-m", "edl_torch")
RECORDS = 607
EPOCHS = 2
BATCH = 4
WINDOW_RECORDS = 2 * BATCH


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

    def start(self, number: int, **life: Any) -> subprocess.Popen[str]:
        """Start a replica; `life` is what ft_trainer.py says of it."""
        life = {"records": RECORDS, "folder": str(self.folder), "lighthouse": self._lighthouse, **life}
        with (self.folder / f"{number}.log").open("a") as log:
            self._replicas[number] = subprocess.Popen(
                [sys.executable, str(HERE / "ft_trainer.py"), json.dumps({"number": number, **life})],
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

    def kill_after(self, attempts: int, delay_s: float, number: int, **life: Any) -> None:
        """Start a replica, and kill it so long after it came to so many steps."""
        before = self.attempts(number)
        dying = self.start(number, **life)
        wait_until(lambda: self.attempts(number) >= before + attempts, timeout_s=100)
        time.sleep(delay_s)
        dying.kill()
        assert dying.wait(20) == -signal.SIGKILL, self.log(number)

    @property
    def acknowledged(self) -> int:
        """Records that have counted by now, of all epochs."""
        return acknowledged_by(self.folder / "state")

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


@pytest.mark.timeout(500)
def test_killed_before_its_gradients_go_out_a_replica_leaves_nothing_in_the_model(job: Job) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    kill_one_of_two(job, 5, random.Random(seed), records=RECORDS)
    check(job, RECORDS)


def kill_one_of_two(job: Job, kills: int, chance: random.Random, **life: int) -> None:
    """Kill a replica before its gradients go out, and start it again, so often."""
    stays = job.start(0, **life)
    for _ in range(kills):
        dying = job.start(1, dies_at=chance.randint(1, 4), **life)
        assert dying.wait(100) == -signal.SIGKILL, job.log(1)
        assert stays.poll() is None, "all data were read meanwhile"
    assert job.start(1, **life).wait(200) == 0, job.log(1)
    assert stays.wait(100) == 0, job.log(0)


def kill_the_only_one(job: Job, chance: random.Random, *, records: int, window: int, workers: int) -> None:
    """Kill a replica anywhere, ten times: it goes on from its own checkpoint."""
    life = {"records": records, "window": window, "workers": workers, "saves": True}
    for planned in lives(1, lambda: (EPOCHS * records - job.acknowledged) // BATCH, chance):
        steps, delay_s = (planned.batches - 1) // window, chance.uniform(0, 0.1)
        print(f"after {job.acknowledged} records {steps} steps, {delay_s} s")
        job.kill_after(steps, delay_s, 0, alone_s=0.05, **life)
    assert job.start(0, alone_s=0.0, **life).wait(200) == 0, job.log(0)


def check(job: Job, records: int) -> None:
    """The model has learnt each record once an epoch, and the audit proves it."""
    assert job.newest_counts() == [EPOCHS] * records
    status, verdict = job.audit()
    assert (status, verdict["verdict"]) == (0, "PROVEN"), verdict


@each_job
def test_a_job_that_is_killed_ten_times_learns_each_record_of_each_epoch_once(
    job: Job, ranks: int, workers: int, accumulate: int
) -> None:
    """A replica that is alone is killed anywhere, one of two before its gradients go out."""
    chance = random.Random(f"{ranks} {workers} {accumulate}")
    if ranks == 1:
        records = kill_matrix.RECORDS
        kill_the_only_one(job, chance, records=records, window=accumulate, workers=workers)
    else:
        records = kill_matrix.RECORDS * accumulate + 3  # for those that the other one learns alone
        kill_one_of_two(job, KILLS, chance, records=records, window=accumulate, workers=workers)
    check(job, records)


@pytest.mark.timeout(500)
def test_killed_anywhere_a_replica_leaves_one_window_twice_at_most(job: Job) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    stays = job.start(0, workers=2)
    kills = 5
    for _ in range(kills):
        job.kill_after(chance.randint(1, 4), chance.uniform(0, 0.1), 1, workers=2)
        assert stays.poll() is None, "all data were read meanwhile"
    assert job.start(1, workers=2).wait(200) == 0, job.log(1)
    assert stays.wait(100) == 0, job.log(0)
    counts = job.newest_counts()
    assert min(counts) >= EPOCHS
    assert sum(counts) <= EPOCHS * RECORDS + kills * WINDOW_RECORDS
    status, verdict = job.audit()
    assert (status, verdict["verdict"]) == (0, "PROVEN"), verdict
