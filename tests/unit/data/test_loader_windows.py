"""Records mixed inside windows of shards: each once, and each block read once while it is needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from loader_kit import ColumnReader, NumberReader, PickingReader

from edl_torch import DataShardService, ElasticDataLoader, ShardedDataset
from edl_torch.errors import BadRecord
from edl_torch.readers import ParquetReader, RecordIODataReader, RecordIOWriter
from edl_torch.testing import FakeMaster

COUNTS = {"a": 61, "none": 0, "b": 5, "c": 37}
NUMBERS = sorted([*range(61), *range(2000, 2005), *range(3000, 3037)])
WINDOW: dict[str, Any] = {"shuffle": True, "shuffle_window": 4, "records_per_shard": 8}


class CountingReader(NumberReader):
    """Reads in order only, and counts how often each record is read."""

    def __init__(self, counts: dict[str, int], bad: int | None = None) -> None:
        super().__init__(counts)
        self.read: Counter[int] = Counter()
        self.bad = bad

    def read_records(self, task: Any) -> Iterator[int]:
        for number in super().read_records(task):
            self.read[number] += 1
            if number == self.bad:
                raise ValueError("broken")
            yield number


@pytest.mark.parametrize("kind", [NumberReader, PickingReader])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_record_is_trained_on_once_an_epoch(kind: type[NumberReader], num_workers: int) -> None:
    fake = FakeMaster()
    with ElasticDataLoader(
        kind(COUNTS), 4, num_epochs=2, num_workers=num_workers, master_client=fake, **WINDOW
    ) as loader:
        epochs = [[int(n) for batch in loader for n in batch] for _ in loader.epochs()]
    assert [sorted(epoch) for epoch in epochs] == [NUMBERS, NUMBERS]
    assert epochs[0] != epochs[1]
    fake.outcomes["training"].check_complete(2)


def test_a_batch_names_its_records() -> None:
    reader = PickingReader(COUNTS)
    with ElasticDataLoader(reader, 4, master_client=FakeMaster(), **WINDOW) as loader:
        for batch in loader:
            assert batch.tolist() == [reader.number(name, index) for name, index in loader.records]
            assert len({name for name, _ in loader.records}) <= 3


def test_a_reader_that_reads_in_order_reads_each_shard_once() -> None:
    """The tail too: one process keeps the window that it has open."""
    reader = CountingReader(COUNTS)
    with ElasticDataLoader(reader, 4, num_epochs=2, master_client=FakeMaster(), **WINDOW) as loader:
        for _ in loader.epochs():
            for _ in loader:
                pass
    assert reader.read == dict.fromkeys(NUMBERS, 2)


def test_a_window_that_was_given_back_is_read_again_and_trained_on_once() -> None:
    fake, reader = FakeMaster(), CountingReader(COUNTS)
    trained: list[int] = []
    with ElasticDataLoader(reader, 4, master_client=fake, **WINDOW) as loader:
        for left in (3, 5, 100):
            for number, batch in enumerate(loader):
                trained += batch.tolist()
                if number == left:
                    loader.stepped()
                    break
    assert sorted(trained) == NUMBERS
    assert max(reader.read.values()) <= 3, "once for each pass"
    fake.outcomes["training"].check_complete(1)


def test_a_record_that_cannot_be_read_costs_no_other_of_its_window() -> None:
    fake, reader = FakeMaster(), CountingReader(COUNTS, bad=2003)
    with ElasticDataLoader(
        reader, 4, master_client=fake, on_bad_record="quarantine", max_bad_records=1, **WINDOW
    ) as loader:
        trained = [int(n) for _ in loader.epochs() for batch in loader for n in batch]
        (bad,) = loader.progress().quarantine
    assert sorted(trained) == [number for number in NUMBERS if number != 2003]
    assert (bad.name, bad.index) == ("b", 3)
    with (
        ElasticDataLoader(
            CountingReader(COUNTS, bad=2003), 4, master_client=FakeMaster(), **WINDOW
        ) as loader,
        pytest.raises(BadRecord, match="record 3 of 'b'"),
    ):
        list(loader)


def test_columns_of_several_sources_make_whole_batches() -> None:
    reader = ColumnReader(COUNTS)
    with DataShardService(8, FakeMaster(), reader, records_per_shard=8, shuffle_window=4) as service:
        loader = ElasticDataLoader(ShardedDataset(service, reader), batch_size=None)
        batches = [batch.tolist() for batch in loader]
    assert sorted(number for batch in batches for number in batch) == NUMBERS
    assert sum(len(batch) == 8 for batch in batches) >= len(NUMBERS) // 8 - 3  # at the ends of windows fewer
    assert any(len({number // 1000 for number in batch}) > 1 for batch in batches)


@pytest.mark.parametrize("columnar", [True, False], ids=["columns", "rows"])
def test_row_groups_of_a_window_are_decoded_once_whatever_the_cache(tmp_path: Path, columnar: bool) -> None:
    for number in range(3):
        ids = np.arange(40) + 1000 * number
        pq.write_table(
            pa.table({"id": ids, "half": ids / 2}), tmp_path / f"{number}.parquet", row_group_size=8
        )
    reader = ParquetReader(tmp_path, cache_bytes=1)
    with DataShardService(
        4, FakeMaster(), reader, records_per_shard=8, shuffle_shards=True, shuffle_window=5
    ) as service:
        size = {"batch_size": None} if columnar else {}
        loader = ElasticDataLoader(ShardedDataset(service, reader), **size)
        batches = list(loader)
    assert sorted(i for batch in batches for i in batch["id"].tolist()) == sorted(
        1000 * number + i for number in range(3) for i in range(40)
    )
    assert all((batch["half"] * 2 == batch["id"]).all() for batch in batches)
    assert reader.groups_decoded == 15


def test_chunks_of_a_window_are_read_once_whatever_the_cache(tmp_path: Path) -> None:
    with RecordIOWriter(tmp_path / "a.recordio", max_chunk_bytes=64) as writer:
        for number in range(120):
            writer.write(f"{number:08}".encode())
    reader = RecordIODataReader(tmp_path, decode=int, cache_bytes=0)
    reads: Counter[int] = Counter()
    read = reader._read

    def counting(source: Any, row: int) -> Any:
        reads[row] += 1
        return read(source, row)

    reader._read = counting  # type: ignore[method-assign]
    with ElasticDataLoader(
        reader, 4, shuffle=True, shuffle_window=5, records_per_shard=8, master_client=FakeMaster()
    ) as loader:
        assert sorted(int(n) for batch in loader for n in batch) == list(range(120))
    assert reads == dict.fromkeys(range(15), 1)
