"""Parquet through `ElasticDataLoader`: every row once, with its own values, however it is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from edl_torch import DataShardService, ElasticDataLoader, ShardedDataset
from edl_torch.errors import BadRecord
from edl_torch.readers import ParquetReader

ORDERS = {
    "in order": ({}, {}),
    "shards and rows shuffled": ({"shuffle_shards": True}, {"shuffle": True}),
    "global shuffle": ({"shuffle": True}, {}),
}
PROCESSES = [
    pytest.param({}, id="0 workers"),
    pytest.param({"num_workers": 2, "multiprocessing_context": "fork"}, id="2 forked"),
    pytest.param(
        {"num_workers": 2, "multiprocessing_context": "forkserver", "persistent_workers": True},
        id="2 started",
    ),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three files in two partitions, 130 rows, row groups of 8."""
    for number, (year, first, count) in enumerate([(2023, 0, 50), (2023, 50, 30), (2024, 80, 50)]):
        ids = np.arange(first, first + count)
        content = {
            "id": ids,
            "half": pa.array(ids / 2, pa.float32()),
            "vector": pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(ids, 4) * 1.0), 4),
            "text": [f"row {i}" for i in ids],
        }
        place = tmp_path / f"year={year}"
        place.mkdir(exist_ok=True)
        pq.write_table(pa.table(content), place / f"{number}.parquet", row_group_size=8)
    return tmp_path


def check_batch(batch: Any) -> list[int]:
    """The values of a batch belong to its rows; gives their numbers."""
    ids: list[int] = batch["id"].tolist()
    assert torch.equal(batch["half"].double() * 2, batch["id"].double())
    assert torch.equal(batch["vector"], batch["id"].double()[:, None].expand(-1, 4))
    assert list(batch["text"]) == [f"row {i}" for i in ids]
    assert batch["year"].tolist() == [2023 if i < 80 else 2024 for i in ids]
    return ids


def read(reader: ParquetReader, service: dict, dataset: dict, **loader: Any) -> list[list[int]]:
    """Two epochs, the row numbers of each."""
    epochs = []
    with DataShardService(5, reader=reader, num_epochs=2, seed=3, **service) as shards:
        batches = ElasticDataLoader(ShardedDataset(shards, reader, **dataset), **loader)
        while not shards.finished:
            epochs.append([i for batch in batches for i in check_batch(batch)])
    return epochs


@pytest.mark.parametrize("workers", PROCESSES)
@pytest.mark.parametrize("columnar", [True, False], ids=["columns", "rows"])
def test_each_row_once_an_epoch(folder, workers, columnar):
    reader = ParquetReader(folder)
    size = {"batch_size": None} if columnar else {}
    orders = (
        ORDERS.items()
        if workers.get("multiprocessing_context") != "forkserver"
        else [("", ORDERS["global shuffle"])]
    )
    for name, (service, dataset) in orders:
        epochs = read(reader, service, dataset, **workers, **size)
        assert [sorted(epoch) for epoch in epochs] == [list(range(130))] * 2, name
        if service and not workers:
            assert epochs[0] != epochs[1] != list(range(130)), name


def test_columns_become_tensors_of_their_own_types(folder):
    reader = ParquetReader(folder)
    with DataShardService(5, reader=reader) as service:
        batch = next(iter(ElasticDataLoader(ShardedDataset(service, reader), batch_size=None)))
    kinds = {name: values.dtype for name, values in batch.items() if isinstance(values, torch.Tensor)}
    assert kinds == {
        "id": torch.int64,
        "half": torch.float32,
        "vector": torch.float64,
        "year": torch.int64,
    }
    assert isinstance(batch["text"], np.ndarray)


@pytest.mark.parametrize("columnar", [True, False], ids=["columns", "rows"])
def test_a_shuffled_epoch_decodes_each_row_group_once(folder, columnar):
    reader = ParquetReader(folder)
    groups = 7 + 4 + 7
    size = {"batch_size": None} if columnar else {}
    epochs = read(
        *(
            reader,
            {"shuffle_shards": True, "records_per_shard": 2 * reader.rows_per_group},
            {"shuffle": True},
        ),
        **size,
    )
    assert len(epochs) == 2
    assert reader.groups_decoded == groups, "all fits the cache, so the second epoch decodes nothing"


def test_forked_workers_read_after_their_trainer_has_read(folder):
    """The trainer's open files, Arrow's threads and its tables exist already when the workers are forked."""
    reader = ParquetReader(folder)
    for name, rows in reader.create_shards().items():
        reader.read_batch(name, np.arange(rows)[::-1])
    for _ in range(3):
        for epoch in read(reader, {}, {}, num_workers=2, multiprocessing_context="fork", batch_size=None):
            assert sorted(epoch) == list(range(130))


def test_rows_of_a_damaged_row_group_are_quarantined_by_name(folder):
    path = folder / "year=2023" / "0.parquet"
    chunk = pq.read_metadata(path).row_group(2).column(0)
    content = bytearray(path.read_bytes())
    first = chunk.dictionary_page_offset or chunk.data_page_offset
    content[first : first + 20] = b"\xff" * 20
    path.write_bytes(content)
    reader = ParquetReader(folder)
    with DataShardService(5, reader=reader, max_bad_records=8) as service:
        dataset = ShardedDataset(service, reader, on_bad_record="quarantine")
        seen = [i for batch in ElasticDataLoader(dataset, batch_size=None) for i in check_batch(batch)]
        assert service.progress().quarantined == 8
    assert sorted(seen) == [*range(16), *range(24, 130)]
    with (
        DataShardService(5, reader=reader) as service,
        pytest.raises(BadRecord, match="row group 2 is damaged"),
    ):
        for _ in ElasticDataLoader(ShardedDataset(service, reader), batch_size=None):
            pass
