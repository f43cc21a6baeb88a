"""A job with a DeepSpeed engine learns each record of each epoch once, though it is killed."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from deepspeed_program import BATCH, EPOCHS, SIZE, Settings
from framework_jobs import Job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # of many processes, one after the other


@pytest.mark.parametrize(("stage", "accumulation"), [(0, 1), (1, 4), (2, 4), (3, 2)])
def test_a_killed_job_learns_each_record_once_an_epoch(
    start_job: Callable[[Settings], Job], stage: int, accumulation: int
) -> None:
    job = start_job(Settings(stage=stage, accumulation=accumulation))
    chance = random.Random(stage)
    for _ in range(3):
        job.run_and_kill(1, chance, most_steps=3 * accumulation * 3)
    found = job.run(1)
    assert job.kills
    assert found["counts"] == [[EPOCHS] * SIZE] * 2
    assert found["steps"] == EPOCHS * SIZE // (BATCH * accumulation)
    assert job.prove() == EPOCHS * SIZE
