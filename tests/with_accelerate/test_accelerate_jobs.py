"""Jobs that are killed, or told to end, and go on from Accelerate's states, on any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from accelerate_program import Settings
from kill_matrix import EVERY, each_job
from memory_jobs import (
    KILLED,
    TOLD_TO_END,
    Start,
    kill_and_check,
    kill_ten_times_and_check,
    kill_under_torchrun_and_check,
    tell_and_check,
)
from memory_model import EPOCHS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("ranks", "workers", "accumulate", "every", "seed"), KILLED)
def test_a_job_that_is_killed_learns_each_record_of_each_epoch_once(
    start_job: Start, ranks: int, workers: int, accumulate: int, every: int, seed: int
) -> None:
    settings = Settings(ranks=ranks, workers=workers, accumulate=accumulate, every=every)
    kill_and_check(start_job, settings, seed, {"epoch over": EPOCHS, "saving": EPOCHS})


@each_job
def test_a_job_that_is_killed_ten_times_learns_each_record_of_each_epoch_once(
    start_job: Start, ranks: int, workers: int, accumulate: int
) -> None:
    settings = Settings(ranks=ranks, workers=workers, accumulate=accumulate, every=EVERY[accumulate])
    kill_ten_times_and_check(start_job, settings, {"saving": settings.every}, ["epoch over"])


@pytest.mark.parametrize(("ranks", "workers", "accumulate"), TOLD_TO_END)
def test_a_job_that_is_told_to_end_saves_and_loses_no_step(
    start_job: Start, ranks: int, workers: int, accumulate: int
) -> None:
    settings = Settings(ranks=ranks, workers=workers, accumulate=accumulate, every=100, step_s=0.02)
    tell_and_check(start_job, settings)


def test_under_torchrun_a_killed_rank_costs_a_restart_and_no_record(tmp_path: Path) -> None:
    kill_under_torchrun_and_check(Path(__file__).with_name("accelerate_program.py"), tmp_path)
