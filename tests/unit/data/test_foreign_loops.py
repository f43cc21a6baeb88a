"""Frameworks that iterate a loader by themselves are refused with the first batch; whoever else asks is not.

The frameworks themselves are in the folders `tests/with_…`: here a module has their name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DataLoader

from edl_torch import DataShardService, ElasticDataLoader, ShardedDataset
from edl_torch.errors import ForeignLoop, InvalidArgument
from edl_torch.readers import MapDatasetReader

REFUSED = ["accelerate.data_loader", "lightning.pytorch.utilities.combined_loader", "pytorch_lightning.loops"]
FINE = ["accelerated", "lightning.fabric.wrappers", "trainer", "__main__"]


def iterator_of(loader: Iterable[Any], module: str) -> Iterator[Any]:
    """What `iter()` gives a function of that module."""
    framework = ModuleType(module)
    exec("def loop(loader):\n    return iter(loader)\n", framework.__dict__)
    found: Iterator[Any] = framework.loop(loader)
    return found


@pytest.mark.parametrize("module", [*REFUSED, *FINE])
def test_a_framework_that_iterates_an_elastic_loader_is_refused(module: str) -> None:
    with ElasticDataLoader(range(12), batch_size=4) as loader:
        batches = iterator_of(loader, module)
        if module in FINE:
            assert len(list(batches)) == 3
            return
        with pytest.raises(ForeignLoop, match=r"iterated by .* itself: .*edl_torch\.integrations\."):
            next(batches)
        assert sum(len(batch) for batch in loader) == 12, "it has lost nothing"
    assert issubclass(ForeignLoop, InvalidArgument)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("module", [REFUSED[0], FINE[0]])
def test_so_is_one_that_iterates_a_plain_loader_over_a_sharded_dataset(
    module: str, num_workers: int, persistent: bool
) -> None:
    reader = MapDatasetReader(range(12))
    with DataShardService(4, reader=reader) as service:
        plain = DataLoader(
            ShardedDataset(service, reader),
            batch_size=4,
            num_workers=num_workers,
            persistent_workers=persistent and num_workers > 0,
        )
        batches = iterator_of(plain, module)
        if module in FINE:
            for _ in batches:
                service.report_batch_done()
            assert service.finished
        else:
            with pytest.raises(ForeignLoop, match="a DataLoader over a ShardedDataset is iterated"):
                next(batches)
            assert service.progress().leased == 0


@pytest.mark.parametrize("module", [REFUSED[0], FINE[0]])
def test_so_is_one_that_iterates_a_sharded_dataset_itself(module: str) -> None:
    reader = MapDatasetReader(range(12))
    with DataShardService(4, reader=reader) as service:
        records = iterator_of(ShardedDataset(service, reader), module)
        if module in FINE:
            assert list(records) == list(range(12))
        else:
            with pytest.raises(ForeignLoop, match="a ShardedDataset is iterated by accelerate itself"):
                next(records)


class Trainer:
    """A trainer of torchtitan's, or an engine of DeepSpeed's."""

    dataloader: Any = None


@pytest.mark.parametrize(
    ("module", "remedy"),
    [
        ("torchtitan.trainer", r"ElasticLoader\.Config.*edl_torch\.integrations\.torchtitan"),
        ("deepspeed.runtime.engine", r"prepare\(engine, loader\) of edl_torch\.integrations\.deepspeed"),
    ],
)
def test_a_trainer_that_reads_by_way_of_others_is_refused_without_its_adapter(
    module: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    framework = ModuleType(module)
    exec("def read(self, function):\n    return function()\n", framework.__dict__)
    monkeypatch.setitem(sys.modules, module, framework)
    trainer = Trainer()
    with ElasticDataLoader(range(12), batch_size=4) as loader:
        with pytest.raises(ForeignLoop, match=remedy):
            framework.read(trainer, lambda: list(loader))
        with pytest.raises(ForeignLoop, match=remedy):
            framework.read(trainer, lambda: len(loader))
        trainer.dataloader = ElasticDataLoader  # it has `attach`, as the adapter for torchtitan
        if module == "torchtitan.trainer":
            assert len(framework.read(trainer, lambda: list(loader))) == 3


def test_a_loop_with_a_manager_of_torchfts_is_refused_unless_that_is_attached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torchft = ModuleType("torchft.manager")
    exec("class Manager:\n    pass\n", torchft.__dict__)
    monkeypatch.setitem(sys.modules, "torchft.manager", torchft)
    with ElasticDataLoader(range(12), batch_size=4, num_epochs=2) as loader:
        assert len(list(loader)) == 3, "it is imported, and not used here"
        job = SimpleNamespace(manager=torchft.Manager())
        with pytest.raises(ForeignLoop, match=r"attach_manager\(loader, manager\)"):
            next(iter(loader))
        job.manager.itself, job = job.manager, None
        assert len(next(iter(loader))) == 4, "nobody has a manager any more"
        job = SimpleNamespace(manager=torchft.Manager())
        loader.keep_stepping()  # as attach_manager() does
        next(iter(loader))


def test_a_trainer_that_asks_by_way_of_others_needs_its_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    framework = ModuleType("transformers.trainer")
    exec("class Trainer:\n    def train(self, ask):\n        return ask()\n", framework.__dict__)
    with ElasticDataLoader(range(12), batch_size=4) as loader:
        assert framework.Trainer().train(lambda: len(loader)) == 3, "it has not been imported"
        monkeypatch.setitem(sys.modules, "transformers.trainer", framework)
        trainer = framework.Trainer()
        for ask in (lambda: next(iter(loader)), lambda: len(loader), lambda: len(loader.dataset)):
            with pytest.raises(
                ForeignLoop, match=r"with edl_torch\.integrations\.transformers\.ElasticTrainer"
            ):
                trainer.train(ask)
        assert len(loader) == 3
        trainer.elastic_loader = loader
        assert trainer.train(lambda: len(list(loader))) == 3
