"""Jobs under a Trainer learn each record of each epoch once, though they are killed and start again."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from train_program import Settings

from edl_torch.audit.chain import final_words
from edl_torch.audit.verdict import audit
from edl_torch.master.journal import view

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # of many processes, one after the other


def check(folder: Path, settings: Settings, found: dict[str, Any]) -> None:
    """The model has learnt each record once an epoch, and the audit proves it."""
    assert found["counts"] == [settings.epochs] * settings.size
    assert found["epoch"] == settings.epochs
    assert found["max_steps"] == found["steps"]
    (verdict,) = audit([folder / "audit"], words=final_words(view(folder / "state")))
    assert verdict.proven, verdict
    assert verdict.acknowledged == settings.epochs * settings.size


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_job_learns_each_record_once_an_epoch(
    start_job: Callable[[Settings], Any], tmp_path: Path, ranks: int, workers: int, accumulation: int
) -> None:
    settings = Settings(workers=workers, accumulation=accumulation, items=workers > 0, save_steps=20)
    check(tmp_path, settings, start_job(settings).run(ranks))


@pytest.mark.parametrize("ranks", [(1, 1, 1, 1), (2, 2, 2, 2), (2, 1, 2, 1)])
@pytest.mark.parametrize(("workers", "accumulation"), [(0, 4), (2, 1)])
def test_a_job_that_is_killed_goes_on_from_its_checkpoint(
    start_job: Callable[[Settings], Any],
    tmp_path: Path,
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
    check(tmp_path, settings, job.run(ranks[-1]))


def test_what_ranks_cannot_do_is_refused(start_job: Callable[[Settings], Any]) -> None:
    several, tokens, backward = start_job(Settings(refused=True)).run(2)
    assert several.startswith("2 ranks average their gradients: make the ElasticDataLoader with synchronous")
    assert tokens.endswith("leave out average_tokens_across_devices=False")
    assert backward.startswith("training_step() of OwnBackward does not call self.accelerator.backward(loss)")


def test_ranks_that_the_trainer_does_not_train_together_are_refused(
    start_job: Callable[[Settings], Any],
) -> None:
    (alone,) = start_job(Settings(alone=True)).run(2)
    assert alone.startswith("the process group has 2 ranks, and the Trainer would train a model on each")
