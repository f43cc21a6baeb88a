"""Jobs whose model remembers what it has learnt: they are killed, or told to end, and go on.

The model that comes out has learnt every record of every epoch once, and the audit proves it.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import kill_matrix
import pytest
from framework_jobs import Death, Job, audit_of
from kill_matrix import kill_ten_times
from memory_model import BATCH, EPOCHS, RECORDS
from processes import quiet_port

Start = Callable[[Any], Job]

# Ranks at most, loader workers, accumulation, steps or batches between checkpoints (0: an epoch), seed
KILLED = [
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
# Ranks, loader workers, accumulation
TOLD_TO_END = [(1, 0, 1), (1, 2, 4), (2, 0, 4), (2, 2, 1)]


def check(found: dict[str, Any], records: int = RECORDS) -> None:
    """The model has learnt all that there was, once an epoch."""
    assert found["finished"]
    assert found["learnt"] == [EPOCHS] * records


def death(chance: random.Random, often: int, most: dict[str, int]) -> Death:
    """Choose where the last rank dies: a job comes to most places `often`, to some as `most` says."""
    place = chance.choice(["batch", "backward", "step", "batch over", "clock", "clock", *most])
    count = chance.randint(1, {"clock": 1500, **most}.get(place, often))
    return Death("start", 1, later_s=count / 1000) if place == "clock" else Death(place, count)


def kill_and_check(start_job: Start, settings: Any, seed: int, most: dict[str, int]) -> None:
    """Kill three attempts with a random number of ranks; `most` is how often a place is come to."""
    job, chance = start_job(settings), random.Random(seed)
    for _ in range(3):
        dies = death(chance, EPOCHS * RECORDS // BATCH // settings.accumulate, most)
        print(f"seed {seed}: {dies}")
        job.run_to_death(chance.randint(1, settings.ranks), replace(settings, death=dies))
    check(job.run(chance.randint(1, settings.ranks)))
    assert job.prove() == EPOCHS * RECORDS


def kill_ten_times_and_check(
    start_job: Start, settings: Any, places: dict[str, int], ends: Sequence[str], *, same: bool = False
) -> None:
    """Kill it ten times; `places` and `ends` are where it can die, and `same`, as `kill_ten_times` says."""
    settings = replace(settings, records=kill_matrix.RECORDS)
    job = start_job(settings)
    batches = EPOCHS * settings.records // BATCH
    places = {"batch": 1, "backward": 1, "step": 1, "batch over": 1, **places}
    found = kill_ten_times(
        job, settings, settings.ranks, batches=batches, places=places, ends=ends, same=same
    )
    check(found, settings.records)
    assert job.prove() == EPOCHS * settings.records


def tell_and_check(start_job: Start, settings: Any) -> None:
    """Tell two attempts to end: no step is lost, so none is made twice."""
    job, chance = start_job(settings), random.Random(settings.ranks)
    told = sum(job.run_and_tell(settings.ranks, chance, 12 // settings.accumulate) for _ in range(2))
    assert told, "the job ended before it was told"
    check(job.run(settings.ranks))
    assert job.steps() == sorted(set(job.steps()))
    assert job.prove() == EPOCHS * RECORDS


def kill_under_torchrun_and_check(program: Path, folder: Path) -> None:
    """Run it on two ranks, of which `program` kills one in its first life."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("EDL_MASTER_ADDR", raising=False)
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"]
        command += [f"--master-port={quiet_port()}", "--monitor-interval=0.1", str(program), str(folder)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=220)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "exitcode: -9" in ran.stderr
    check(json.loads((folder / "result.json").read_text()))
    assert audit_of(folder).delivered
