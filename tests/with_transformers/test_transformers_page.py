"""The page of Transformers, jobs that are killed and resumed as it says, and a plain Trainer."""

from __future__ import annotations

import difflib
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from counting import Records
from framework_jobs import Job
from kill_matrix import EVERY, RECORDS, each_job, kill_ten_times
from torch.utils.data import IterableDataset
from train_program import Settings, arguments, parts
from transformers import Trainer

from edl_torch import DataShardService, ElasticDataLoader, ShardedDataset
from edl_torch.errors import InvalidArgument
from edl_torch.readers import MapDatasetReader

ROOT = Path(__file__).parents[2]
PLAIN, ELASTIC = (f"examples/transformers/{name}.py" for name in ("plain", "elastic"))


def difference() -> list[str]:
    before, after = ((ROOT / name).read_text("utf-8").splitlines() for name in (PLAIN, ELASTIC))
    return list(difflib.unified_diff(before, after, PLAIN, ELASTIC, n=1, lineterm=""))


def test_the_page_shows_the_difference() -> None:
    page = (ROOT / "docs/transformers.md").read_text("utf-8")
    assert re.findall(r"```diff\n(.*?)\n```", page, re.S) == ["\n".join(difference())]


def test_at_most_five_lines_differ() -> None:
    added = [line for line in difference()[2:] if line.startswith("+") and line != "+"]
    removed = [line for line in difference()[2:] if line.startswith("-")]
    assert len(added) <= 5
    assert len(removed) <= 1


def test_both_programs_train_and_go_on(tmp_path: Path) -> None:
    for name in (PLAIN, ELASTIC):
        output = tmp_path / Path(name).stem
        for _ in range(2):
            subprocess.run([sys.executable, ROOT / name, output], check=True, timeout=100, cwd=tmp_path)
        assert (output / "checkpoint-252" / "trainer_state.json").exists()


# Jobs that are killed, and go on from their checkpoints -----------------------------------------------------


Start = Callable[[Settings], Job]


def check(job: Job, settings: Settings, found: dict[str, Any]) -> None:
    """The model has learnt each record once an epoch, and the audit proves it."""
    assert found["counts"] == [settings.epochs] * settings.size
    assert found["epoch"] == settings.epochs
    assert found["max_steps"] == found["steps"]
    assert job.prove() == settings.epochs * settings.size


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_job_learns_each_record_once_an_epoch(
    start_job: Start, ranks: int, workers: int, accumulation: int
) -> None:
    settings = Settings(workers=workers, accumulation=accumulation, items=workers > 0, save_steps=20)
    job = start_job(settings)
    check(job, settings, job.run(ranks))


@pytest.mark.timeout(600)
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


@pytest.mark.timeout(600)
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


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("ranks", "workers", "accumulation"), [(1, 0, 1), (1, 2, 4), (2, 0, 4), (2, 2, 1)])
def test_a_job_that_is_told_to_end_saves_and_loses_no_step(
    start_job: Start, ranks: int, workers: int, accumulation: int
) -> None:
    settings = Settings(workers=workers, accumulation=accumulation, save_steps=100, step_s=0.02)
    job, chance = start_job(settings), random.Random(ranks)
    assert sum(job.run_and_tell(ranks, chance, 12 // accumulation) for _ in range(2))
    check(job, settings, job.run(ranks))
    assert job.steps() == sorted(set(job.steps()))


@pytest.mark.timeout(600)
def test_what_ranks_cannot_do_is_refused(start_job: Start) -> None:
    several, tokens, backward = start_job(Settings(refused=True)).run(2)
    assert several.startswith("2 ranks average their gradients: make the ElasticDataLoader with synchronous")
    assert tokens.endswith("leave out average_tokens_across_devices=False")
    assert backward.startswith("training_step() of OwnBackward does not call self.accelerator.backward(loss)")


@pytest.mark.timeout(600)
def test_ranks_that_the_trainer_does_not_train_together_are_refused(
    start_job: Start,
) -> None:
    (alone,) = start_job(Settings(alone=True)).run(2)
    assert alone.startswith("the process group has 2 ranks, and the Trainer would train a model on each")


# A plain Trainer --------------------------------------------------------------------------------------------


SETTINGS = Settings(size=20)
ERROR = r"a transformers Trainer fixes the steps.*class MyTrainer\(ElasticTrainer, Trainer\).*elastic_loader="


@pytest.fixture
def dataset(tmp_path: Path) -> Iterator[ShardedDataset]:
    reader = MapDatasetReader(Records(SETTINGS.size))
    with DataShardService(SETTINGS.batch, reader=reader, num_epochs=SETTINGS.epochs) as service:
        yield ShardedDataset(service, reader)


class Wrapped(IterableDataset[Any]):
    """What a user may put around a dataset."""

    def __init__(self, dataset: ShardedDataset) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return iter(self._dataset)


def test_a_sharded_dataset_as_train_dataset(dataset: ShardedDataset, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=ERROR):
        Trainer(train_dataset=dataset, args=arguments(tmp_path, SETTINGS), **parts(SETTINGS))


def test_an_elastic_loader_as_train_dataset(dataset: ShardedDataset, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=ERROR):
        Trainer(
            train_dataset=ElasticDataLoader(dataset), args=arguments(tmp_path, SETTINGS), **parts(SETTINGS)
        )


@pytest.mark.parametrize("steps", [-1, 7])
def test_an_elastic_loader_from_get_train_dataloader(
    dataset: ShardedDataset, tmp_path: Path, steps: int
) -> None:
    class WithLoader(Trainer):
        def get_train_dataloader(self) -> Any:
            return ElasticDataLoader(dataset)

    trainer = WithLoader(args=arguments(tmp_path, SETTINGS, max_steps=steps), **parts(SETTINGS))
    with pytest.raises(InvalidArgument, match=ERROR):
        trainer.train()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_of_the_users_around_a_sharded_one(
    dataset: ShardedDataset, tmp_path: Path, workers: int
) -> None:
    args = arguments(tmp_path, SETTINGS, max_steps=7, dataloader_num_workers=workers)
    trainer = Trainer(train_dataset=Wrapped(dataset), args=args, **parts(SETTINGS))
    with pytest.raises(InvalidArgument, match=ERROR):
        trainer.train()


def test_a_sharded_dataset_for_evaluation(dataset: ShardedDataset, tmp_path: Path) -> None:
    trainer = Trainer(eval_dataset=dataset, args=arguments(tmp_path, SETTINGS), **parts(SETTINGS))
    with pytest.raises(InvalidArgument, match=ERROR):
        trainer.evaluate()


def test_a_loop_that_is_no_trainers_is_not_looked_at(dataset: ShardedDataset) -> None:
    batches = list(ElasticDataLoader(dataset))
    assert len(batches) == len(dataset) // SETTINGS.batch
