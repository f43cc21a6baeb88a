"""Images and tables through the elastic loader: in this process, in forked, in spawned workers, each once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from every_reader import made

from edl_torch import (
    AbstractDataReader,
    DataShardService,
    ElasticDataLoader,
    Shard,
    ShardedDataset,
    Task,
    TaskType,
)
from edl_torch.readers import open_reader
from edl_torch.readers.base import reader_sources
from edl_torch.testing import check_reader
from edl_torch.testing.check_reader import records_equal

KINDS = ("image_folder", "flat_folder", "image_manifest", "coco_captions", "coco_detection", "voc", "odps")


class Together(AbstractDataReader):
    """The sources of several readers: spawned workers are dear, so all readers travel to the same ones."""

    def __init__(self, readers: dict[str, AbstractDataReader]) -> None:
        super().__init__()
        self.readers = readers

    def create_shards(self, mode: Any = TaskType.TRAINING) -> dict[str, int]:
        return {name: reader_sources(reader)[0].count for name, reader in self.readers.items()}

    def read_records(self, task: Task) -> Iterator[Any]:
        return iter(self.readers[task.shard_name].read_records(task))

    def read_record(self, name: str, index: int) -> Any:
        return self.readers[name].read_record(name, index)


@pytest.fixture
def addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Data of each kind: where it is, and which reader is to be chosen for it."""
    for package in ("odps", "pyarrow"):
        pytest.importorskip(package)
    with ExitStack() as stack:
        found = {}
        for kind in KINDS:
            data = stack.enter_context(made(kind, tmp_path / kind))
            for name, value in data.environment.items():
                monkeypatch.setenv(name, value)
            found[data.data] = data.reader
        yield found


@pytest.fixture
def opened(addresses: dict[str, str]) -> dict[str, AbstractDataReader]:
    """A reader of each kind, by the name of its source."""
    readers = [open_reader(address) for address in addresses]
    assert [type(reader).__name__ for reader in readers] == list(addresses.values())
    return {reader_sources(reader)[0].name: reader for reader in readers}


def direct(reader: AbstractDataReader, name: str, index: int) -> Any:
    (record,) = reader.read_records(Task(shard=Shard(name=name, start=index, end=index + 1)))
    return record


def test_each_keeps_the_contract(addresses: dict[str, str]) -> None:
    assert len(addresses) == len(KINDS)
    for address in addresses:
        check_reader(partial(open_reader, address))


@pytest.mark.parametrize(
    ("num_workers", "method"), [(0, None), (2, "fork"), pytest.param(2, "spawn", marks=pytest.mark.long)]
)
def test_each_record_is_trained_on_once_and_is_the_one_that_is_named(
    opened: dict[str, AbstractDataReader], num_workers: int, method: str | None
) -> None:
    reader = Together(opened)
    options = {"num_workers": num_workers, "multiprocessing_context": method} if num_workers else {}
    seen: list[tuple[str, int]] = []
    with DataShardService(3, reader=reader, records_per_shard=4, shuffle_shards=True, seed=3) as service:
        dataset = ShardedDataset(service, reader, shuffle=True)
        loader = ElasticDataLoader(dataset, collate_fn=list, **options)
        for batch in loader:
            assert len(batch) == len(loader.records)
            for record, (name, index) in zip(batch, loader.records, strict=True):
                assert records_equal(record, direct(opened[name], name, index)), (name, index)
                seen.append((name, index))
        assert service.finished
    counts = reader.create_shards()
    assert sorted(seen) == sorted((name, index) for name in counts for index in range(counts[name]))
