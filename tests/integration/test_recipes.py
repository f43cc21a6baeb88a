"""The recipes for Slurm and SkyPilot run as they stand."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from processes import quiet_port
from slurm_program import noticed_trainer
from slurm_stand_in import BatchJob

from edl_torch.audit.verdict import audit
from edl_torch.testing import wait_until

# Slurm ------------------------------------------------------------------------------------------------------


SLURM = Path(__file__).parents[2] / "deploy" / "slurm"
PROGRAM = Path(__file__).with_name("slurm_program.py")
TORCHRUN = Path(__file__).parents[1] / "preloaded_torchrun.py"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="process groups, /proc")


@pytest.fixture
def master(tmp_path: Path) -> Iterator[BatchJob]:
    job = BatchJob(1, tmp_path, SLURM / "master.sbatch", str(tmp_path / "shared"), str(quiet_port()))
    job.start()
    wait_until((tmp_path / "shared" / "address").exists, timeout_s=30)
    yield job
    job.kill()


@pytest.fixture(params=["1", pytest.param("2", marks=pytest.mark.long)], ids="{} task(s)".format)
def trainers(tmp_path: Path, master: BatchJob, request: pytest.FixtureRequest) -> Iterator[BatchJob]:
    command = [sys.executable, str(PROGRAM), str(tmp_path / "job")]
    (tmp_path / "job").mkdir()
    job = BatchJob(
        2, tmp_path, SLURM / "trainers.sbatch", str(tmp_path / "shared"), *command, ntasks=request.param
    )
    yield job
    job.kill()


def steps(folder: Path) -> int:
    """How many steps all ranks have made, in all starts."""
    lines = [line for path in folder.glob("notes-*") for line in path.read_text().splitlines()]
    return sum('"stepped"' in line for line in lines)


@pytest.mark.long
def test_a_job_that_is_preempted_twice_ends_proven(
    master: BatchJob, trainers: BatchJob, tmp_path: Path
) -> None:
    folder = tmp_path / "job"
    for take_away in (trainers.reach_limit, trainers.preempt):
        before = steps(folder)
        trainers.start()
        wait_until(lambda before=before: steps(folder) > before + 4, timeout_s=60)
        take_away()
        assert trainers.wait() == 143, trainers.log
        assert trainers.requeued
    trainers.start()
    assert trainers.wait() == 0, trainers.log
    assert not trainers.requeued
    assert trainers.starts == 3
    weights = json.loads((folder / "weights.json").read_text())
    learnt = [[-round(weight) for weight in epoch] for epoch in weights]
    assert learnt == [[1] * noticed_trainer.RECORDS] * noticed_trainer.EPOCHS
    (verdict,) = audit([folder / "audit"])
    assert verdict.delivered, verdict
    master.reach_limit()
    assert master.wait() == 0, master.log


# SkyPilot ---------------------------------------------------------------------------------------------------


SKYPILOT = Path(__file__).parents[2] / "deploy" / "skypilot" / "job.yaml"


class Machine:
    """A region's machine: a home and a port of its own, and nothing else shared than the bucket."""

    def __init__(self, home: Path, bucket: Path, ranks: str) -> None:
        home.mkdir()
        task: dict[str, Any] = yaml.safe_load(SKYPILOT.read_text())
        (hook,) = task["config"]["hooks"]
        self._hook: str = hook["run"]
        self.home = home
        foreign = ("EDL_MASTER", "TORCH", "PYTEST")
        self._environment = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
        self._environment |= task["envs"] | {
            "BUCKET": str(bucket),
            "EDL_MASTER_ADDR": f"127.0.0.1:{quiet_port()}",
            "HOME": str(home),
            "OMP_NUM_THREADS": "1",
            "PATH": f"{home}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PROGRAM": str(PROGRAM),
            "SKYPILOT_NUM_GPUS_PER_NODE": ranks,
        }
        torchrun = home / "torchrun"  # whose workers find torch imported
        torchrun.write_text(f'#!/bin/sh\nexec {sys.executable} {TORCHRUN} "$@"\n')
        torchrun.chmod(0o755)
        script = home / "task.sh"
        script.write_text(task["run"])
        with (home / "log").open("wb") as log:
            self.process = subprocess.Popen(  # as SkyPilot's shell: interactive, and the leader of a session
                ["bash", "-i", str(script)],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=home,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        return (self.home / "log").read_text()

    def give_notice(self) -> int:
        """Run the hook for preemption, which waits for the job; returns the job's status."""
        with subprocess.Popen(["sh", "-c", self._hook], env=self._environment) as hook:
            status = self.process.wait(60)
            assert hook.wait(60) == 0
        return status

    def lose(self) -> None:
        """Kill all that runs here, without a word: each process of this home."""
        mine = f"HOME={self.home}".encode()
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if mine in path.read_bytes().split(b"\0"):
                    os.kill(int(path.parent.name), signal.SIGKILL)
        self.process.wait(60)

    def steps(self) -> int:
        """How many steps the ranks have made here."""
        notes = (path.read_text() for path in (self.home / "edl-job" / "job").glob("notes-*"))
        return sum(text.count('"stepped"') for text in notes)


@pytest.fixture(params=["1", pytest.param("2", marks=pytest.mark.long)], ids="{} rank(s)".format)
def move(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[[str], Machine]]:
    """Start the job on a machine of the region."""
    machines: list[Machine] = []
    (tmp_path / "bucket").mkdir()

    def start(region: str) -> Machine:
        machines.append(Machine(tmp_path / region, tmp_path / "bucket", request.param))
        return machines[-1]

    yield start
    for machine in machines:
        machine.lose()
        print(f"--- {machine.home.name}\n{machine.log[-6000:]}")  # shown where the test has failed


def train(machine: Machine) -> None:
    """Wait for some steps more than it has unpacked."""
    wait_until(lambda: (machine.home / "edl-job" / "pid").exists(), timeout_s=30)
    before = machine.steps()
    wait_until(lambda: machine.steps() > before + 8, timeout_s=60)


def judge(machine: Machine, tmp_path: Path) -> None:
    """It ends; its bucket holds a model that has learnt each record once, and the proof of it."""
    assert machine.process.wait(60) == 0, machine.log
    with tarfile.open(tmp_path / "bucket" / "job.tar") as packed:
        packed.extractall(tmp_path / "result", filter="data")
    weights = json.loads((tmp_path / "result" / "weights.json").read_text())
    learnt = [[-round(weight) for weight in epoch] for epoch in weights]
    assert learnt == [[1] * noticed_trainer.RECORDS] * noticed_trainer.EPOCHS
    (verdict,) = audit([tmp_path / "result" / "audit"])
    assert verdict.delivered, verdict


def test_a_job_that_moves_to_another_region_ends_proven(
    move: Callable[[str], Machine], tmp_path: Path
) -> None:
    first = move("region-a")
    train(first)
    assert first.give_notice() == 143, first.log
    first.lose()
    second = move("region-b")
    judge(second, tmp_path)
    notes = second.home.glob("edl-job/job/notes-*")
    loaded = [json.loads(path.read_text().splitlines()[0]) for path in notes]
    assert max(note["step"] for note in loaded) > 4, "it began anew"
    assert not [*second.home.glob("edl-job/**/told")], "failures would pass for the first machine's notice"


@pytest.mark.long
def test_a_machine_that_goes_without_notice_costs_the_steps_since_the_checkpoint(
    move: Callable[[str], Machine], tmp_path: Path
) -> None:
    first = move("region-a")
    train(first)
    first.give_notice()
    first.lose()
    second = move("region-b")
    train(second)
    second.lose()
    judge(move("region-c"), tmp_path)


@pytest.mark.long
def test_a_job_that_is_lost_before_its_first_checkpoint_begins_anew(
    move: Callable[[str], Machine], tmp_path: Path
) -> None:
    first = move("region-a")
    train(first)
    first.lose()
    judge(move("region-b"), tmp_path)
