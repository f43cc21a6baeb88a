"""Numbered records, and loops over them that keep book: what every test of the loaders needs.

It knows nothing of how the loaders count; it holds what a loop was given against what the master was told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edl_torch import AbstractDataReader, DataShardService, ElasticDataLoader, ShardedDataset
from edl_torch.data.reading.record_jobs import Block
from edl_torch.testing import FakeMaster

SOURCE_STEP = 1000  # record i of source s is the number 1000 * s + i
UNEVEN = {"a": 21, "b": 5, "c": 13}  # each source's last shard is short


# Embedded without loader workers, and over a network with two. `loop_table` has what is between.
each_way = pytest.mark.parametrize(
    ("num_workers", "in_process"), [(0, True), (2, False)], ids=["embedded", "remote, 2 workers"]
)


class NumberReader(AbstractDataReader):
    """Record `i` of source number `s` is `1000 * s + i`."""

    def __init__(self, counts: Mapping[str, int]) -> None:
        super().__init__()
        self.counts = dict(counts)

    def create_shards(self, mode: Any = None) -> dict[str, int]:
        return self.counts

    def number(self, name: str, index: int) -> int:
        return list(self.counts).index(name) * SOURCE_STEP + index

    def read_records(self, task: Any) -> Iterator[int]:
        return (self.number(task.shard_name, index) for index in range(task.start, task.end))


class PickingReader(NumberReader):
    """With random access."""

    def read_record(self, name: str, index: int) -> int:
        return self.number(name, index)


class SafeReader(PickingReader):
    """Several threads may read."""

    thread_safe = True


class ColumnReader(PickingReader):
    """With columnar reads: a batch is an int64 array."""

    def read_batch(self, name: str, indices: Any) -> Any:
        return np.asarray(indices) + self.number(name, 0)


class LookingColumnReader(ColumnReader):
    """Looks at each record of a batch, by `number`, which may raise."""

    def read_batch(self, name: str, indices: Any) -> Any:
        for index in indices:
            self.number(name, int(index))
        return indices + SOURCE_STEP * list(self.counts).index(name)


@contextmanager
def trainer(
    fake: FakeMaster,
    counts: Mapping[str, int] | AbstractDataReader = UNEVEN,
    *,
    batch_size: int = 4,
    in_process: bool = True,
    dataset: Mapping[str, Any] | None = None,
    **service_arguments: Any,
) -> Iterator[tuple[DataShardService, ShardedDataset]]:
    """A service on the fake master and a dataset around it; closed at the end."""
    reader = counts if isinstance(counts, AbstractDataReader) else NumberReader(counts)
    arguments = {"records_per_shard": 6, **service_arguments}
    client = fake.connect(in_process=in_process)
    with DataShardService(batch_size, client, reader=reader, **arguments) as service:
        yield service, ShardedDataset(service, reader, **(dataset or {}))


def session_at_once(**parts: Any) -> Any:
    """Return a session with these parts, of a trainer whose procedures are plain functions."""
    return SimpleNamespace(run=lambda result: result, do=lambda decide, *given: decide(*given), **parts)


def numbers(batch: Any) -> list[int]:
    """The records of a batch."""
    return [int(number) for number in np.atleast_1d(np.asarray(batch))]


def take(iterator: Iterator[Any], batches: int) -> list[list[int]]:
    """The next batches, as lists of records; fewer where the iterator ends."""
    return [numbers(batch) for _, batch in zip(range(batches), iterator, strict=False)]


def run_through(
    loader: Iterable[Any], seen: list[list[int]], then: Callable[[int], object] = lambda count: None
) -> None:
    """A training loop: notes each batch in `seen`, then calls `then` with the number of batches so far."""
    for batch in loader:
        seen.append(numbers(batch))
        then(len(seen))


def acknowledged(fake: FakeMaster, service: DataShardService) -> Counter[tuple[int, int]]:
    """How often the master heard of (epoch, record) as trained on."""
    service.session.flush()
    outcomes = fake.outcomes[service.dataset_name]
    return as_numbers(outcomes.acknowledged, service)


def quarantined(fake: FakeMaster, service: DataShardService) -> Counter[tuple[int, int]]:
    """How often the master heard of (epoch, record) as bad."""
    return as_numbers(fake.outcomes[service.dataset_name].quarantined, service)


def as_numbers(
    told: Mapping[tuple[int, str, int], int], service: DataShardService
) -> Counter[tuple[int, int]]:
    names = [source.name for source in service.session.plan().spec.sources]
    counts: Counter[tuple[int, int]] = Counter()
    for (epoch, name, index), times in told.items():
        counts[epoch, names.index(name) * SOURCE_STEP + index] += times
    return counts


def once(records: Iterable[int], epoch: int = 0) -> Counter[tuple[int, int]]:
    """What `acknowledged` says when each of these records was trained on once."""
    return Counter((epoch, record) for record in records)


def flat(batches: Iterable[Iterable[int]]) -> list[int]:
    """The records of several batches."""
    return [record for batch in batches for record in batch]


def all_records(counts: Mapping[str, int] = UNEVEN) -> list[int]:
    """Every record of the dataset."""
    return [s * SOURCE_STEP + i for s, count in enumerate(counts.values()) for i in range(count)]


def blocks_waited_for(monkeypatch: pytest.MonkeyPatch) -> list[Block]:
    """The records that loops over threads wait for now."""
    now: list[Block] = []
    wait = Block.wait

    def noted(block: Block) -> None:
        now.append(block)
        try:
            wait(block)
        finally:
            now.remove(block)

    monkeypatch.setattr(Block, "wait", noted)
    return now


def elastic(dataset: ShardedDataset, **arguments: Any) -> ElasticDataLoader:
    """A loader; workers are forked, which is quick."""
    if arguments.get("num_workers"):
        arguments.setdefault("multiprocessing_context", "fork")
    return ElasticDataLoader(dataset, **arguments)


# How a trainer is away, of a master with these timeouts. Each is for the trainer of this session.

AWAY = {"lease_timeout_s": 30.0, "grace_s": 1.0, "progress_timeout_s": 15.0}


def stopped(fake: FakeMaster, session: str) -> None:
    """The process was stopped for longer than the lease timeout: the stream stands, nothing was sent."""
    fake.clock.advance(31.0)
    assert fake.expire()


def cut_off(fake: FakeMaster, session: str) -> None:
    """The stream was broken for longer than the grace."""
    fake.break_stream(session)
    fake.clock.advance(1.5)
    assert fake.expire()


def stalled(fake: FakeMaster, session: str) -> None:
    """The loop hung for longer than the progress timeout, and heartbeats flowed."""
    for _ in range(4):
        fake.clock.advance(5.0)
        presence = fake.listeners[session]
        fake._dispatcher.heartbeat(session, presence.member, fake.clock(), presence.progress)
        fake.listeners[session].answered(fake.clock())
    assert all(item.stalled for item in fake.expire())
