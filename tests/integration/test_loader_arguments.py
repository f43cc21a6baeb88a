"""`ElasticDataLoader` takes a DataLoader's arguments and leaves batches as the user's code made them."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from loader_kit import (
    ColumnReader,
    NumberReader,
    PickingReader,
    acknowledged,
    all_records,
    elastic,
    flat,
    numbers,
    once,
    take,
    trainer,
)
from torch.utils.data import DataLoader, get_worker_info

from edl_torch import DataShardService, ElasticDataLoader, ShardedDataset
from edl_torch.errors import ConcurrentIteration, InvalidArgument, ServiceClosed
from edl_torch.testing import FakeMaster


class Pair(NamedTuple):
    number: int
    text: str


@dataclass
class Custom:
    total: int
    parts: list[int]


class Batch(dict[str, Any]):
    """A batch type of the user's own."""


def to_dict(number: int) -> dict[str, Any]:
    return {"number": number, "text": str(number), "nested": {"half": number / 2}}


def to_tuple(number: int) -> tuple[int, str]:
    return number, str(number)


def to_pair(number: int) -> Pair:
    return Pair(number, str(number))


def to_array(number: int) -> np.ndarray[Any, Any]:
    return np.full(3, number, dtype=np.float32)


def to_custom(samples: list[int]) -> Custom:
    return Custom(sum(samples), samples)


def to_batch(samples: list[int]) -> Batch:
    return Batch(numbers=torch.tensor(samples))


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    match one:
        case torch.Tensor():
            return one.dtype == other.dtype and bool(torch.equal(one, other))
        case dict():
            return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
        case list() | tuple():
            return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("transform", "collate"),
    [
        *((transform, None) for transform in (None, to_dict, to_tuple, to_pair, to_array, str)),
        *((None, collate) for collate in (to_custom, to_batch, tuple)),
        (to_pair, list),
    ],
    ids=lambda value: getattr(value, "__name__", "default"),
)
def test_a_batch_is_what_a_plain_data_loader_would_make(
    transform: Any, collate: Any, num_workers: int
) -> None:
    records = list(range(10))
    expected = list(DataLoader([transform(r) if transform else r for r in records], 4, collate_fn=collate))  # type: ignore[arg-type]
    with trainer(FakeMaster(), {"a": 10}, records_per_shard=20, dataset={"transform": transform}) as (
        _,
        dataset,
    ):
        arguments = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
        batches = list(elastic(dataset, collate_fn=collate, **arguments))
    key = [
        batch["number"].tolist() if isinstance(batch, dict) and "number" in batch else 0 for batch in batches
    ]
    assert len(key) == 3
    if num_workers:  # two workers: another order, and other borders
        assert {type(batch) for batch in batches} == {type(batch) for batch in expected}
    else:
        assert all(map(same, batches, expected))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_samples_one_by_one(num_workers: int) -> None:
    fake = FakeMaster()
    with trainer(fake, {"a": 10}, dataset={"transform": to_array}) as (service, dataset):
        samples = []
        for sample in elastic(dataset, batch_size=None, num_workers=num_workers):
            assert type(sample) is torch.Tensor  # as torch's default_convert does
            assert acknowledged(fake, service) == once(samples)
            samples.append(int(sample[0]))
            if len(samples) == 7:
                break
        assert acknowledged(fake, service) == once(samples[:6])
        loader = elastic(dataset, batch_size=None)
        assert len(loader) == 10
        rest = [int(sample[0]) for sample in loader]
        assert sorted(samples[:6] + rest) == list(range(10))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("order", ["stored", "shuffled", "global"])
def test_columnar_batches(order: str, num_workers: int) -> None:
    fake = FakeMaster()
    reader = ColumnReader({"a": 21, "b": 5, "c": 13})
    arguments = {"shuffle": order == "global", "shuffle_shards": order != "stored", "num_epochs": 2}
    with trainer(fake, reader, dataset={"shuffle": order == "shuffled"}, **arguments) as (service, dataset):
        loader = elastic(dataset, batch_size=None, num_workers=num_workers)
        seen = []
        for batch in loader:
            assert type(batch) is torch.Tensor
            assert len(batch) <= 4
            seen.append(numbers(batch))
            if len(seen) == 3:
                break
        assert acknowledged(fake, service) == once(flat(seen[:2]))
        seen = seen[:2] + [numbers(batch) for batch in loader]
        assert sorted(flat(seen)) == all_records()
        assert sorted(flat(take(iter(loader), 1000))) == all_records()
        assert service.finished
    fake.outcomes["training"].check_complete(2)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("reader", [NumberReader, PickingReader])
def test_shuffled_orders_with_and_without_random_access(reader: Any, num_workers: int) -> None:
    counts = {"a": 21, "b": 5, "c": 13}
    fake = FakeMaster()
    with trainer(fake, reader(counts), dataset={"shuffle": True}, num_epochs=2) as (_, dataset):
        loader = elastic(dataset, num_workers=num_workers)
        first, second = (flat(take(iter(loader), 100)) for _ in range(2))
    assert sorted(first) == sorted(second) == all_records()
    assert first != second
    if not num_workers:
        with trainer(FakeMaster(), PickingReader(counts), dataset={"shuffle": True}, num_epochs=2) as (
            _,
            dataset,
        ):
            assert flat(take(iter(elastic(dataset)), 100)) == first


def test_a_global_shuffle_needs_random_access() -> None:
    with (
        trainer(FakeMaster(), shuffle=True) as (_, dataset),
        pytest.raises(Exception, match="no read_record"),
    ):
        take(iter(elastic(dataset)), 1)


@pytest.mark.parametrize("start_method", ["fork", "spawn", "forkserver"])
def test_every_start_method(start_method: str) -> None:
    fake = FakeMaster()
    with trainer(fake, in_process=False, num_epochs=2) as (service, dataset):
        loader = ElasticDataLoader(
            dataset, num_workers=1, multiprocessing_context=start_method, persistent_workers=True, timeout=60
        )
        seen = take(iter(loader), 3)
        assert acknowledged(fake, service) == once(flat(seen[:2]))
        seen = seen[:2] + take(iter(loader), 100)
        assert sorted(flat(seen)) == all_records()
        take(iter(loader), 100)
        assert service.finished
        del loader
    fake.outcomes["training"].check_complete(2)


def test_the_context_may_be_an_object() -> None:
    import multiprocessing

    with trainer(FakeMaster()) as (_, dataset):
        loader = ElasticDataLoader(
            dataset, num_workers=1, multiprocessing_context=multiprocessing.get_context("fork")
        )
        assert sorted(flat(take(iter(loader), 100))) == all_records()


# What runs in the workers -----------------------------------------------------------------------------------


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


def seeds(sample: Any) -> tuple[int, int, float, float]:
    return int(sample), torch.initial_seed(), random.random(), float(np.random.rand())


def drawn(generator_seed: int, num_workers: int = 2) -> list[list[tuple[Any, ...]]]:
    generator = torch.Generator().manual_seed(generator_seed)
    with trainer(FakeMaster(), {"a": 24}, records_per_shard=4, dataset={"transform": seeds}) as (_, dataset):
        return list(elastic(dataset, num_workers=num_workers, generator=generator, collate_fn=list))


def test_workers_are_seeded_as_torch_does() -> None:
    first, again, other = drawn(1), drawn(1), drawn(2)
    seeds_of = [{sample[1] for batch in run for sample in batch} for run in (first, again, other)]
    assert seeds_of[0] == seeds_of[1] != seeds_of[2]
    low, high = sorted(seeds_of[0])
    assert high == low + 1
    plain = DataLoader(
        list(range(4)), 1, num_workers=2, generator=torch.Generator().manual_seed(1), collate_fn=seeds_only
    )
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
        loop = iter(elastic(dataset, collate_fn=list, generator=torch.Generator()))
        next(loop)
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        expected = augment(0)
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        next(loop)
        assert augment(0) == expected


# Lengths -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "length"),
    [
        ({}, 10),
        ({"drop_last": True}, 9),
        ({"batch_size": 4}, 10),
        ({"batch_size": None}, 39),
        ({"num_workers": 2}, 10),
    ],
)
def test_the_length_is_the_epochs_and_torch_does_not_warn(arguments: dict[str, Any], length: int) -> None:
    with trainer(FakeMaster(), num_epochs=2) as (service, dataset):
        loader = elastic(dataset, **arguments)
        assert len(loader) == length
        assert type(len(loader)) is int
        assert len(dataset) == 39
        for _ in loader:  # partial batches at the ends of sources and workers: more than the estimate
            pass
        assert service.epoch == 1


def test_the_length_of_columnar_loaders_is_in_batches() -> None:
    with trainer(FakeMaster(), ColumnReader({"a": 21})) as (_, dataset):
        assert len(elastic(dataset, batch_size=None)) == 6


# Wrong arguments, second iterators -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        ({"shuffle": True}, "shuffle= at the dataset"),
        ({"sampler": [1]}, "the master decides"),
        ({"sampler": []}, "the master decides"),
        ({"batch_sampler": [[1]]}, "the master decides"),
        ({"batch_size": 5}, "batch_size is 4 at the service"),
        ({"batch_size": None, "drop_last": True}, "leave out batch_size=None"),
    ],
)
def test_wrong_loader_arguments_name_the_remedy(arguments: dict[str, Any], remedy: str) -> None:
    with trainer(FakeMaster()) as (_, dataset), pytest.raises(InvalidArgument, match=remedy):
        ElasticDataLoader(dataset, **arguments)


def test_torchs_own_checks_stand() -> None:
    with trainer(FakeMaster()) as (_, dataset):
        with pytest.raises(ValueError, match="prefetch_factor"):
            ElasticDataLoader(dataset, prefetch_factor=2)
        with pytest.raises(TypeError, match="workers"):
            ElasticDataLoader(dataset, workers=2)
        ElasticDataLoader(dataset, shuffle=False, sampler=None)


def test_a_loader_takes_a_sharded_dataset_and_that_takes_a_service() -> None:
    with pytest.raises(InvalidArgument, match="not list: wrap the reader"):
        ElasticDataLoader([1])  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="service must be a DataShardService"):
        ShardedDataset(None, NumberReader({"a": 1}))  # type: ignore[arg-type]
    with (
        trainer(FakeMaster()) as (service, _),
        pytest.raises(InvalidArgument, match="'raise' or 'quarantine'"),
    ):
        ShardedDataset(service, NumberReader({"a": 1}), on_bad_record="skip")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        ({"batch_size": 0}, "batch_size must be 1 or more"),
        ({"batch_size": True}, "must be an int"),
        ({"dataset_size": -1}, "dataset_size must be 1 or more"),
        ({"records_per_shard": 8, "num_minibatches_per_shard": 2}, "not both"),
        ({"reader": NumberReader({"a": 1})}, "reader or dataset_size, not both"),
        ({"lookahead": -1}, "lookahead must be 0 or more"),
    ],
)
def test_wrong_service_arguments_name_the_remedy(arguments: dict[str, Any], remedy: str) -> None:
    with pytest.raises(InvalidArgument, match=remedy):
        DataShardService(**{"batch_size": 4, "dataset_size": 8, "master_client": FakeMaster(), **arguments})


def test_a_second_live_iterator_is_an_error_and_the_first_goes_on() -> None:
    with trainer(FakeMaster()) as (_, dataset):
        loader = elastic(dataset)
        first = iter(loader)
        seen = take(first, 2)
        with pytest.raises(ConcurrentIteration, match=r"loader\.close\(\)"):
            iter(loader)
        with pytest.raises(ConcurrentIteration, match="iterated already"):
            iter(elastic(dataset))
        seen += take(first, 100)
        assert sorted(flat(seen)) == all_records()


def test_an_iterator_that_ended_stays_at_its_end() -> None:
    with trainer(FakeMaster(), num_epochs=2) as (_, dataset):
        loader = elastic(dataset)
        first = iter(loader)
        take(first, 100)
        second = iter(loader)
        assert take(first, 1) == []
        assert sorted(flat(take(second, 100))) == all_records()


def test_a_loader_over_a_finished_dataset_yields_nothing() -> None:
    fake = FakeMaster()
    with trainer(fake) as (service, dataset):
        take(iter(elastic(dataset)), 100)
        assert service.finished
        assert service.epoch == 1
        assert take(iter(elastic(dataset, num_workers=2)), 1) == []
    with trainer(fake) as (_, dataset):
        assert take(iter(elastic(dataset)), 1) == []


def test_endless_epochs() -> None:
    with trainer(FakeMaster(), {"a": 6}, num_epochs=0) as (service, dataset):
        loader = elastic(dataset)
        for epoch in range(5):
            assert service.epoch == epoch
            assert sorted(flat(take(iter(loader), 100))) == list(range(6))
        assert not service.finished


def test_without_a_barrier_one_pass_runs_through_all_epochs() -> None:
    fake = FakeMaster()
    with trainer(fake, num_epochs=3, epoch_barrier=False) as (service, dataset):
        records = flat(take(iter(elastic(dataset, num_workers=2)), 1000))
        assert sorted(records) == sorted(3 * all_records())
        assert service.finished
    fake.outcomes["training"].check_complete(3)


def test_a_closed_service_says_so() -> None:
    with trainer(FakeMaster()) as (service, dataset):
        loader = elastic(dataset)
    with pytest.raises(ServiceClosed, match="make a new one"):
        iter(loader)
    with pytest.raises(ServiceClosed):
        service.fetch_shard()
    service.close()


def test_more_workers_than_shards() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        with trainer(FakeMaster(), {"a": 3}) as (service, dataset):
            assert flat(take(iter(elastic(dataset, num_workers=3)), 10)) == [0, 1, 2]
            assert service.finished
