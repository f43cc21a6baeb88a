"""`deploy/slurm`, with a stand-in for Slurm: a job that is preempted goes on, and each record counts once."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import quiet_port
from slurm_program import noticed_trainer
from slurm_stand_in import BatchJob

from edl_torch.audit.verdict import audit
from edl_torch.testing import wait_until

RECIPE = Path(__file__).parents[2] / "deploy" / "slurm"
PROGRAM = Path(__file__).with_name("slurm_program.py")

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="process groups")]


@pytest.fixture
def master(tmp_path: Path) -> Iterator[BatchJob]:
    job = BatchJob(1, tmp_path, RECIPE / "master.sbatch", str(tmp_path / "shared"), str(quiet_port()))
    job.start()
    wait_until((tmp_path / "shared" / "address").exists, timeout_s=30)
    yield job
    job.kill()


@pytest.fixture(params=["1", pytest.param("2", marks=pytest.mark.long)], ids="{} task(s)".format)
def trainers(tmp_path: Path, master: BatchJob, request: pytest.FixtureRequest) -> Iterator[BatchJob]:
    command = [sys.executable, str(PROGRAM), str(tmp_path / "job")]
    (tmp_path / "job").mkdir()
    job = BatchJob(
        2, tmp_path, RECIPE / "trainers.sbatch", str(tmp_path / "shared"), *command, ntasks=request.param
    )
    yield job
    job.kill()


def steps(folder: Path) -> int:
    """How many steps all ranks have made, in all starts."""
    lines = [line for path in folder.glob("notes-*") for line in path.read_text().splitlines()]
    return sum('"stepped"' in line for line in lines)


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
