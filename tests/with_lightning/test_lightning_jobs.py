"""Jobs that are killed by SIGKILL and go on from Lightning's checkpoints, with as many ranks as there are.

The model that comes out has learnt every record of every epoch once, and the audit proves it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from memory import each

from edl_torch.master.threaded import ThreadedMaster

JOB = Path(__file__).with_name("killed_job.py")
ROOT = JOB.parents[2]
# ranks, loader workers, accumulation, steps between checkpoints (0: at the end of an epoch), seed
CASES = [
    (1, 0, 1, 1, 11),
    (1, 0, 4, 1, 12),
    (1, 2, 1, 3, 13),
    (1, 2, 4, 0, 14),
    (1, 0, 1, 0, 15),
    (2, 0, 1, 2, 21),
    (2, 0, 4, 1, 22),
    (2, 2, 1, 1, 23),
    (2, 2, 4, 1, 24),
    (2, 0, 4, 0, 25),
]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "workers", "accumulate", "every", "seed"), CASES)
def test_a_job_that_is_killed_learns_each_record_of_each_epoch_once(
    ranks: int, workers: int, accumulate: int, every: int, seed: int, tmp_path: Path
) -> None:
    env = environment()
    command = [sys.executable, str(JOB), str(tmp_path), f"--ranks={ranks}", f"--workers={workers}"]
    command += [f"--accumulate={accumulate}", f"--every={every}", f"--seed={seed}"]
    master = ThreadedMaster("127.0.0.1:0", state=tmp_path / "master") if ranks > 1 else None
    try:
        if master is not None:
            env["EDL_MASTER_ADDR"] = master.address
        ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=220)
    finally:
        if master is not None:
            master.stop()
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads((tmp_path / "learnt.json").read_text())
    assert found["finished"]
    assert learnt(found) == each(), ran.stdout
    check_audit(tmp_path)


@pytest.mark.slow
def test_under_torchrun_a_killed_rank_costs_a_restart_and_no_record(tmp_path: Path) -> None:
    program = JOB.with_name("torchrun_program.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"]
    command += ["--monitor-interval=0.1", str(program), str(tmp_path)]
    ran = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=220)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads((tmp_path / "learnt.json").read_text())
    assert (learnt(found), found["restarts"]) == (each(), 1)
    check_audit(tmp_path)


def environment() -> dict[str, str]:
    """That of this process, without a master, and with what the programs import."""
    ours = ("EDL_", "MASTER_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {**env, "PYTHONPATH": os.pathsep.join([str(ROOT), str(JOB.parent)])}


def learnt(found: dict[str, dict[str, int]]) -> Counter[int]:
    return Counter({int(index): count for index, count in found["learnt"].items()})


def check_audit(folder: Path) -> None:
    """Prove from the trainers' logs what the model says."""
    audit = subprocess.run(
        [sys.executable, "-m", "edl_torch", "audit", str(folder / "audit")],
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert (audit.returncode, ": PROVEN\n" in audit.stdout) == (0, True), audit.stdout + audit.stderr
