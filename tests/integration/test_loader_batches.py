"""Batches are what a plain `DataLoader` over the same records would make, in whatever way they are read."""

from __future__ import annotations

import gc
import math
import operator
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from loader_kit import (
    NumberReader,
    acknowledged,
    all_records,
    elastic,
    flat,
    once,
    take,
    trainer,
)
from torch.utils.data import DataLoader

import edl_torch
from edl_torch import AbstractDataReader, DataShardService, ElasticDataLoader, LocalMaster, ShardedDataset
from edl_torch.data.reading import sample_reading as reading_times
from edl_torch.readers import MapDatasetReader
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


class Sample:
    """Something that a weak reference can be made of."""


class SampleReader(NumberReader):
    """Makes each sample anew and keeps none."""

    def read_records(self, task: Any) -> Iterator[Any]:
        return (Sample() for _ in range(task.start, task.end))


def test_samples_do_not_outlive_their_batch() -> None:
    def refer(samples: list[Sample]) -> list[weakref.ref[Sample]]:
        return [weakref.ref(sample) for sample in samples]

    with trainer(FakeMaster(), SampleReader({"a": 10}), records_per_shard=5) as (_, dataset):
        batches = 0
        for references in elastic(dataset, collate_fn=refer):
            assert all(reference() is None for reference in references)
            batches += 1
        assert batches == 3


class RangeReader(NumberReader):
    """Runs no Python for a record."""

    def read_records(self, task: Any) -> Any:
        return range(task.start, task.end)


class ComparingReader(RangeReader):
    """Nor where each is read by itself."""

    read_record = staticmethod(operator.is_)


def comparing_reader(records: int, *, shuffle: bool) -> AbstractDataReader:
    return ComparingReader({"a": records}) if shuffle else RangeReader({"a": records})


def map_dataset_reader(records: int, *, shuffle: bool) -> AbstractDataReader:
    return MapDatasetReader(range(records))


ReaderOf = Callable[..., AbstractDataReader]


def calls_of_an_epoch(
    batch_size: int, *, shuffle: bool, reader_of: ReaderOf = comparing_reader, folder: str = ""
) -> int:
    """How many Python functions are called for 16 batches in 4 shards: all, or those defined in `folder`."""
    reader = reader_of(16 * batch_size, shuffle=shuffle)
    calls = 0

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(folder)

    master = LocalMaster(clock=repeat(1.0).__next__)  # else its history looks at the job once a second
    master.report_delay_s = math.inf  # else more reports leave where the machine is slow
    with DataShardService(
        batch_size, master, reader, records_per_shard=4 * batch_size, num_epochs=0
    ) as service:
        loader = ElasticDataLoader(ShardedDataset(service, reader, shuffle), collate_fn=len)
        assert list(loader) == [batch_size] * 16  # what is made once is made by now
        gc.collect()
        gc.disable()  # it may call whatever waits for the end of somebody else's object
        before = sys.getprofile()
        sys.setprofile(count)
        try:
            for _ in loader:
                pass
        finally:
            sys.setprofile(before)
            gc.enable()
    return calls


@pytest.mark.parametrize("each_s", [0.0, math.inf], ids=["timed", "not timed"])
@pytest.mark.parametrize("reader_of", [comparing_reader, map_dataset_reader])
@pytest.mark.parametrize("shuffle", [False, True], ids=["in order", "shuffled"])
def test_a_record_costs_no_python_beside_reading_it(
    shuffle: bool, reader_of: ReaderOf, each_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading_times, "EACH_S", each_s)
    few, many = (calls_of_an_epoch(size, shuffle=shuffle, reader_of=reader_of) for size in (40, 400))
    assert abs(many - few) < 16 * (400 - 40) / 10  # a lock that is found taken costs some calls


def test_a_batch_and_its_share_of_a_lease_cost_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside reading: its way to the loop, its acknowledgement, and that of an embedded master."""
    monkeypatch.setattr(reading_times, "EACH_S", math.inf)  # else more are timed where the machine is slow
    assert calls_of_an_epoch(40, shuffle=False, folder=os.path.dirname(edl_torch.__file__)) / 16 <= 130
