"""Jobs under a Trainer learn each record of each epoch once, though they are killed and start again."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from framework_jobs import Job
from kill_matrix import EVERY, RECORDS, each_job, kill_ten_times
from train_program import Settings

Start = Callable[[Settings], Job]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # of many processes, one after the other


def check(job: Job, settings: Settings, found: dict[str, Any]) -> None:
    """The model has learnt each record once an epoch, and the audit proves it."""
    assert found["counts"] == [settings.epochs] * settings.size
    assert found["epoch"] == settings.epochs
    assert found["max_steps"] == found["steps"]
    assert job.prove() == settings.epochs * settings.size


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_job_learns_each_record_once_an_epoch(
    start_job: Start, ranks: int, workers: int, accumulation: int
) -> None:
    settings = Settings(workers=workers, accumulation=accumulation, items=workers > 0, save_steps=20)
    job = start_job(settings)
    check(job, settings, job.run(ranks))


@pytest.mark.parametrize("ranks", [(1, 1, 1, 1), (2, 2, 2, 2), (2, 1, 2, 1)])
@pytest.mark.parametrize(("workers", "accumulation"), [(0, 4), (2, 1)])
def test_a_job_that_is_killed_goes_on_from_its_checkpoint(
    start_job: Start,
    ranks: tuple[int, ...],
    workers: int,
    accumulation: int,
) -> None:
    settings = Settings(workers=workers, accumulation=accumulation)
    job = start_job(settings)
    seed = 11 * len(ranks) + 7 * ranks[1] + workers
    chance = random.Random(seed)
    for killed in ranks[:-1]:
        job.run_and_kill(killed, chance, most_steps=12 if accumulation == 1 else 6)
    assert job.kills, f"seed {seed}"
    check(job, settings, job.run(ranks[-1]))


@each_job
def test_a_job_that_is_killed_ten_times_learns_each_record_of_each_epoch_once(
    start_job: Start, ranks: int, workers: int, accumulate: int
) -> None:
    every, window = EVERY[accumulate], accumulate
    settings = Settings(
        size=RECORDS, workers=workers, accumulation=accumulate, save_steps=every, items=workers > 0, step_s=0
    )
    job = start_job(settings)
    places = {"step begins": window, "backward": window, "step": window, "batch over": 1}
    found = kill_ten_times(
        job,
        settings,
        ranks,
        batches=settings.epochs * settings.size // settings.batch,
        places={**places, "saved": every * window},
        ends=["epoch over", "evaluated"],
    )
    check(job, settings, found)


@pytest.mark.parametrize(("ranks", "workers", "accumulation"), [(1, 0, 1), (1, 2, 4), (2, 0, 4), (2, 2, 1)])
def test_a_job_that_is_told_to_end_saves_and_loses_no_step(
    start_job: Start, ranks: int, workers: int, accumulation: int
) -> None:
    settings = Settings(workers=workers, accumulation=accumulation, save_steps=100, step_s=0.02)
    job, chance = start_job(settings), random.Random(ranks)
    assert sum(job.run_and_tell(ranks, chance, 12 // accumulation) for _ in range(2))
    check(job, settings, job.run(ranks))
    assert job.steps() == sorted(set(job.steps()))


def test_what_ranks_cannot_do_is_refused(start_job: Start) -> None:
    several, tokens, backward = start_job(Settings(refused=True)).run(2)
    assert several.startswith("2 ranks average their gradients: make the ElasticDataLoader with synchronous")
    assert tokens.endswith("leave out average_tokens_across_devices=False")
    assert backward.startswith("training_step() of OwnBackward does not call self.accelerator.backward(loss)")


def test_ranks_that_the_trainer_does_not_train_together_are_refused(
    start_job: Start,
) -> None:
    (alone,) = start_job(Settings(alone=True)).run(2)
    assert alone.startswith("the process group has 2 ranks, and the Trainer would train a model on each")
