"""The page of Lightning, and jobs that are killed and resumed as it says."""

from __future__ import annotations

from pathlib import Path

import pytest
from framework_pages import Page, models_of
from kill_matrix import EVERY, each_job
from lightning_program import Remembers, Settings
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

PAGE = Page("lightning.md")


def test_five_lines_at_most_are_another() -> None:
    PAGE.check_five_lines_at_most_are_another()


@pytest.mark.parametrize("sign", ["-", "+"])
def test_the_program_runs(sign: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    PAGE.check_program_runs(sign, models_of(monkeypatch, tmp_path, Remembers))


# Jobs that are killed, and go on from their checkpoints -----------------------------------------------------


@pytest.mark.parametrize(("ranks", "workers", "accumulate", "every", "seed"), KILLED)
def test_a_job_that_is_killed_learns_each_record_of_each_epoch_once(
    start_job: Start, ranks: int, workers: int, accumulate: int, every: int, seed: int
) -> None:
    settings = Settings(ranks=ranks, workers=workers, accumulate=accumulate, every=every)
    kill_and_check(start_job, settings, seed, {"epoch over": EPOCHS, "validation": 4})


@each_job
def test_a_job_that_is_killed_ten_times_learns_each_record_of_each_epoch_once(
    start_job: Start, ranks: int, workers: int, accumulate: int
) -> None:
    settings = Settings(ranks=ranks, workers=workers, accumulate=accumulate, every=EVERY[accumulate])
    kill_ten_times_and_check(start_job, settings, {"step": accumulate}, ["epoch over", "validation"])


@pytest.mark.parametrize(("ranks", "workers", "accumulate"), TOLD_TO_END)
def test_a_job_that_is_told_to_end_saves_and_loses_no_step(
    start_job: Start, ranks: int, workers: int, accumulate: int
) -> None:
    settings = Settings(ranks=ranks, workers=workers, accumulate=accumulate, every=100, step_s=0.02)
    tell_and_check(start_job, settings)


def test_under_torchrun_a_killed_rank_costs_a_restart_and_no_record(tmp_path: Path) -> None:
    kill_under_torchrun_and_check(Path(__file__).with_name("lightning_program.py"), tmp_path)
