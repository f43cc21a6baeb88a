"""A job with a DeepSpeed engine learns each record of each epoch once, though it is killed."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from deepspeed_program import Settings
from framework_jobs import Death
from kill_matrix import EVERY, each_job
from memory_jobs import Start, check, death, kill_and_check, kill_ten_times_and_check
from memory_model import EPOCHS, RECORDS

pytestmark = pytest.mark.timeout(600)  # of many processes, one after the other

PAGE = (Path(__file__).parents[2] / "docs" / "deepspeed.md").read_text("utf-8")
PLACES = {"epoch over": EPOCHS, "saving": EPOCHS}


@pytest.mark.parametrize(
    ("stage", "ranks", "workers", "accumulate", "every", "seed"),
    [
        (0, 1, 0, 1, 1, 11),
        (1, 1, 2, 4, 1, 12),
        (3, 1, 0, 4, 0, 13),
        (0, 2, 0, 1, 2, 21),
        (0, 2, 2, 4, 1, 22),
    ],
)
def test_a_killed_job_learns_each_record_once_an_epoch(
    start_job: Start, stage: int, ranks: int, workers: int, accumulate: int, every: int, seed: int
) -> None:
    """Without ZeRO any number of ranks goes on."""
    settings = Settings(stage=stage, ranks=ranks, workers=workers, accumulate=accumulate, every=every)
    kill_and_check(start_job, settings, seed, PLACES)


@pytest.mark.parametrize(("stage", "accumulate", "seed"), [(1, 1, 31), (2, 4, 32), (3, 4, 33)])
def test_so_it_does_on_two_ranks_with_zero(start_job: Start, stage: int, accumulate: int, seed: int) -> None:
    """ZeRO's own checkpoints are for one number of ranks."""
    settings, chance = Settings(stage=stage, ranks=2, accumulate=accumulate), random.Random(seed)
    job = start_job(settings)
    for _ in range(3):
        dies = death(chance, 16 // accumulate, PLACES)
        print(f"seed {seed}: {dies}")
        job.run_to_death(2, replace(settings, death=dies))
    check(job.run(2))
    assert job.prove() == EPOCHS * RECORDS


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.long), 2, 3])
def test_with_zero_another_number_of_ranks_goes_on_from_a_universal_checkpoint(
    start_job: Start, stage: int
) -> None:
    """From two ranks to one and back."""
    settings = Settings(stage=stage, ranks=2, workers=2, accumulate=2)
    job = start_job(settings)
    for ranks, batch in ((2, 5), (1, 9)):
        job.run_to_death(ranks, replace(settings, death=Death("batch", batch)))
        make_universal(job.folder / "checkpoints")
        settings = replace(settings, universal=True)
    job.run_to_death(2, replace(settings, death=Death("batch", 5)))
    assert job.kills == 3
    check(job.run(2))
    assert job.prove() == EPOCHS * RECORDS


def make_universal(checkpoints: Path) -> None:
    """Make the newest checkpoint universal, as docs/deepspeed.md says."""
    (command,) = re.findall(r"```console\n(tag=.*?)```", PAGE, re.S)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(
        ["sh", "-ec", command], cwd=checkpoints.parent, env={**os.environ, "PATH": path}, check=True
    )


@each_job
def test_a_job_that_is_killed_ten_times_learns_each_record_of_each_epoch_once(
    start_job: Start, ranks: int, workers: int, accumulate: int
) -> None:
    settings = Settings(ranks=ranks, workers=workers, accumulate=accumulate, every=EVERY[accumulate])
    kill_ten_times_and_check(start_job, settings, {"saving": settings.every * accumulate}, ["epoch over"])


@pytest.mark.parametrize("stage", [1, 2, 3])
@each_job
def test_so_does_one_with_zero_that_is_killed_ten_times(
    start_job: Start, ranks: int, workers: int, accumulate: int, stage: int
) -> None:
    """Always on as many ranks: a checkpoint of ZeRO is for one number of them."""
    settings = Settings(
        stage=stage, ranks=ranks, workers=workers, accumulate=accumulate, every=EVERY[accumulate]
    )
    places = {"saving": settings.every * accumulate}
    kill_ten_times_and_check(start_job, settings, places, ["epoch over"], same=True)
