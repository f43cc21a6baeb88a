"""What is measured of each kind of loop, as the master's status shows it."""

from __future__ import annotations

import random
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from loader_kit import ColumnReader, NumberReader, elastic, trainer
from lockstep_kit import Rank, run_ranks
from torch.utils.data import DataLoader, get_worker_info

from edl_torch import DataShardService, ElasticDataLoader, ShardedDataset
from edl_torch.core.status import Measures
from edl_torch.testing import FakeMaster

SLOW_S = 0.005


def measures_of(fake: FakeMaster, trainer: int = 0) -> Measures:
    measures = fake.status().trainers[trainer].measures
    assert measures is not None
    return measures


def slow(record: Any) -> Any:
    time.sleep(SLOW_S)
    return record


def test_a_slow_transform_is_time_that_the_loop_waits() -> None:
    fake = FakeMaster()
    with trainer(fake, {"a": 10}, dataset={"transform": slow}) as (_, dataset):
        began = time.perf_counter()
        for _ in ElasticDataLoader(dataset):
            pass
        whole_s = time.perf_counter() - began
        measures = measures_of(fake)
    assert (measures.batches, measures.records) == (3, 10)
    waited, stepped = measures.waited, measures.stepped
    assert waited.sum_s >= 10 * SLOW_S
    assert waited.count == stepped.count == 3
    assert waited.sum_s + stepped.sum_s <= whole_s
    assert measures.waiting_share == waited.sum_s / (waited.sum_s + stepped.sum_s)


@pytest.mark.parametrize("options", [{}, {"num_threads": 2}, {"num_workers": 1}], ids=str)
def test_how_long_records_of_a_batch_are_transformed_comes_with_the_batch(options: dict[str, Any]) -> None:
    fake = FakeMaster()
    with trainer(fake, {"a": 12}, dataset={"transform": slow}) as (_, dataset):
        list(ElasticDataLoader(dataset, **options))
        measures = measures_of(fake)
    assert 1 <= measures.timed <= 3
    assert measures.transform_s >= measures.timed * 4 * SLOW_S
    assert measures.read_s > 0


def test_a_slow_step_is_time_that_it_works() -> None:
    fake = FakeMaster()
    with trainer(fake, {"a": 12}) as (_, dataset):
        for _ in ElasticDataLoader(dataset):
            time.sleep(4 * SLOW_S)
        measures = measures_of(fake)
    assert measures.stepped.sum_s >= 12 * SLOW_S
    assert measures.stepped.count == 3


def test_what_happens_between_two_passes_is_not_timed() -> None:
    fake = FakeMaster()
    with trainer(fake, {"a": 12}, num_epochs=2) as (_, dataset):
        loader = ElasticDataLoader(dataset)
        in_passes_s = 0.0
        for leaves in (True, False, False):
            began = time.perf_counter()
            for _ in loader:
                if leaves:
                    break
            in_passes_s += time.perf_counter() - began
            time.sleep(40 * SLOW_S)
        measures = measures_of(fake)
    assert measures.batches == 1 + 3 + 3
    assert measures.stepped.count == 6, "nobody says when a loop that breaks is done with its batch"
    assert measures.stepped.sum_s < in_passes_s


def test_batches_that_a_reader_makes_are_measured() -> None:
    fake = FakeMaster()
    with trainer(fake, ColumnReader({"a": 10}), dataset={"transform": slow}) as (_, dataset):
        list(ElasticDataLoader(dataset, batch_size=None))
        measures = measures_of(fake)
    assert measures.records == 10
    assert measures.timed >= 1
    assert measures.transform_s >= measures.timed * SLOW_S
    assert measures.read_s > 0


def test_a_stand_in_is_a_batch_without_records() -> None:
    fake = FakeMaster()
    arguments: dict[str, Any] = {"records_per_shard": 4, "master_client": fake, "synchronous": False}
    loaders = [ElasticDataLoader(range(8), 4, **arguments) for _ in range(2)]
    with loaders[0], loaders[1]:
        loaders[1].keep_stepping()
        loops = [iter(loader) for loader in loaders]
        for loop in (0, 1, 1):
            next(loops[loop])
        first, second = measures_of(fake, 0), measures_of(fake, 1)
    assert (first.batches, first.records) == (1, 4)
    assert (second.batches, second.records) == (2, 4)


def test_of_two_synchronous_ranks_one_waits_for_the_slow_one() -> None:
    fake = FakeMaster()
    mine = threading.local()
    found: dict[str, Measures] = {}

    def train(rank: Rank) -> None:
        mine.is_slow = rank.peers.rank == 1
        list(rank.one_pass())
        for status in fake.status().trainers:
            if status.worker_id == f"rank{rank.peers.rank}" and status.measures is not None:
                found[status.worker_id] = status.measures

    def slow_on_one(record: int) -> int:
        if mine.is_slow:
            time.sleep(4 * SLOW_S)  # in sum far longer than a busy machine holds the other one up
        return record

    run_ranks(fake, 2, train, {"a": 48}, dataset={"transform": slow_on_one})
    fast, slower = found["rank0"], found["rank1"]
    assert fast.batches == slower.batches
    assert fast.records + slower.records == 48
    assert fast.waited_for_ranks_s > slower.waited_for_ranks_s
    for measures in (fast, slower):
        assert measures.waited_for_ranks_s <= measures.waited.sum_s
    assert own_wait_s(slower) >= slower.records * 4 * SLOW_S
    assert own_wait_s(slower) > own_wait_s(fast)


def own_wait_s(measures: Measures) -> float:
    return measures.waited.sum_s - measures.waited_for_ranks_s


def test_of_a_plain_loop_only_reports_are_known() -> None:
    fake = FakeMaster()
    with trainer(fake, {"a": 10}) as (service, dataset):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for batch in DataLoader(dataset, 4):
                service.report_batch_done(len(batch))
        measures = measures_of(fake)
    assert (measures.batches, measures.records) == (3, 10)
    assert (measures.waited.count, measures.waiting_share) == (0, None)


# What runs in loader workers: the user's dataset, `worker_init_fn`, and random numbers ----------------------


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
