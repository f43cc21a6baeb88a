"""A plain Trainer that is given what this package makes stops with one error, which names the adapter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from counting import Records
from torch.utils.data import IterableDataset
from train_program import Settings, arguments, parts
from transformers import Trainer

from edl_torch import DataShardService, ElasticDataLoader, ShardedDataset
from edl_torch.errors import InvalidArgument
from edl_torch.readers import MapDatasetReader

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
