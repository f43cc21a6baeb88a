"""What runs in loader workers: the user's dataset, `worker_init_fn`, and random numbers."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from loader_kit import NumberReader, elastic, flat, trainer
from torch.utils.data import DataLoader, get_worker_info

from edl_torch import DataShardService, ShardedDataset
from edl_torch.testing import FakeMaster


class Tagged(ShardedDataset):
    """A user's dataset with an attribute of its own."""

    tag = 0

    def __iter__(self) -> Iterator[Any]:
        return ((sample, self.tag) for sample in super().__iter__())


def tag_it(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert info.id == worker
    assert isinstance(info.dataset, Tagged)
    info.dataset.tag = 100 + worker


def test_worker_init_fn_finds_the_users_dataset_and_may_set_attributes() -> None:
    reader = NumberReader({"a": 24})
    with DataShardService(4, FakeMaster(), reader=reader, records_per_shard=4) as service:
        loader = elastic(Tagged(service, reader), num_workers=2, worker_init_fn=tag_it)
        tags = {int(tag) for _, batch_tags in loader for tag in batch_tags}
        assert tags == {100, 101}


class NeedyReader(NumberReader):
    """Needs a module to read."""

    imports = ("edl_needed_to_read",)


def is_imported(sample: Any) -> bool:
    return "edl_needed_to_read" in sys.modules


def test_forked_workers_need_not_import_what_reading_imports(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "edl_needed_to_read.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with trainer(FakeMaster(), NeedyReader({"a": 4}), dataset={"transform": is_imported}) as (_, dataset):
        assert list(elastic(dataset, num_workers=1, collate_fn=list)) == [[True] * 4]
    del sys.modules["edl_needed_to_read"]


def seeds(sample: Any) -> tuple[int, int, float, float]:
    return int(sample), torch.initial_seed(), random.random(), float(np.random.rand())


def drawn(global_seed: int, num_workers: int = 2) -> list[list[tuple[Any, ...]]]:
    torch.manual_seed(global_seed)
    with trainer(FakeMaster(), {"a": 24}, records_per_shard=4, dataset={"transform": seeds}) as (_, dataset):
        return list(elastic(dataset, num_workers=num_workers, collate_fn=list))


def test_workers_are_seeded_as_torch_does() -> None:
    first, again, other = drawn(1), drawn(1), drawn(2)
    seeds_of = [{sample[1] for batch in run for sample in batch} for run in (first, again, other)]
    assert seeds_of[0] == seeds_of[1] != seeds_of[2]
    low, high = sorted(seeds_of[0])
    assert high == low + 1
    torch.manual_seed(1)
    plain = DataLoader(list(range(4)), 1, num_workers=2, collate_fn=seeds_only)
    assert set(plain) == seeds_of[0]
    python = [[sample[2] for batch in run for sample in batch if sample[1] == low] for run in (first, again)]
    shared = min(map(len, python))
    assert python[0][:shared] == python[1][:shared]


def seeds_only(samples: list[int]) -> int:
    return torch.initial_seed()


def augment(number: Any) -> tuple[int, float, float, float]:
    return int(number), random.random(), float(np.random.rand()), float(torch.rand(()))


def test_keyed_augmentation_does_not_depend_on_workers_but_on_the_epoch() -> None:
    def run(num_workers: int) -> list[list[Any]]:
        arguments = {"transform": augment, "seed_transforms": True, "shuffle": True}
        with trainer(FakeMaster(), dataset=arguments, num_epochs=2, seed=5) as (_, dataset):
            loader = elastic(dataset, num_workers=num_workers, collate_fn=list)
            return [sorted(flat(loader)) for _ in range(2)]

    state = torch.get_rng_state()
    assert run(0) == run(2) == run(1)
    first, second = run(0)
    assert [s[0] for s in first] == [s[0] for s in second]
    assert not {s[1:] for s in first} & {s[1:] for s in second}
    assert len({s[1] for s in first}) == len(first)
    torch.set_rng_state(state)


def test_keyed_augmentation_leaves_the_users_random_numbers_alone() -> None:
    arguments = {"transform": augment, "seed_transforms": True}
    with trainer(FakeMaster(), {"a": 8}, dataset=arguments) as (_, dataset):
        loop = iter(elastic(dataset, collate_fn=list))
        next(loop)
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        expected = augment(0)
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        next(loop)
        assert augment(0) == expected
