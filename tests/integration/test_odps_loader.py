"""Loaders of MaxCompute tables and of Parquet."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import preloaded
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from cases import cases

from edl_torch import DataShardService, ElasticDataLoader, ShardedDataset
from edl_torch.cli.main import main
from edl_torch.readers import ParquetReader

pytest.importorskip("pyarrow")
pytest.importorskip("odps")

from maxcompute import Fail, MaxComputeServer, Rows

from edl_torch.errors import SourceChanged
from edl_torch.readers import ODPSDataReader

ROWS = 700
KEY = "a-key-that-nobody-may-see"


@pytest.fixture
def server(monkeypatch):
    """Two partitions of 350 rows."""
    with MaxComputeServer(access_key=KEY, batch_rows=64) as running:
        for name, value in running.environment().items():
            monkeypatch.setenv(name, value)
        parts = {f"ds={part}": table(part * 350, 350) for part in (0, 1)}
        columns = {"i": "bigint", "x": "double", "s": "string", "t": "datetime"}
        running.add_table("clicks", columns, partition_keys={"ds": "string"}, partitions=parts)
        yield running


def table(start, count):
    numbers = list(range(start, start + count))
    times = [np.datetime64(number, "s").item() for number in numbers]
    return {"i": numbers, "x": [n / 2 for n in numbers], "s": [f"row {n}" for n in numbers], "t": times}


def service(reader, **arguments):
    return DataShardService(batch_size=32, reader=reader, records_per_shard=100, seed=5, **arguments)


def with_context(num_workers, method):
    if not num_workers:
        return {}
    return {"num_workers": num_workers, "multiprocessing_context": method, "persistent_workers": True}


@cases(
    "num_workers, method, shuffle",
    [(0, None, False), (2, "fork", True)],
    [
        (0, None, False),
        (0, None, True),
        (2, "fork", False),
        (2, "fork", True),
        (2, "spawn", True),  # a forkserver began without the key
    ],
)
def test_columnar_batches_train_each_row_once_in_each_epoch(server, num_workers, method, shuffle):
    reader = ODPSDataReader("clicks")
    seen = Counter()
    with service(reader, num_epochs=2, shuffle_shards=shuffle) as data, warnings.catch_warnings():
        warnings.simplefilter("error")
        dataset = ShardedDataset(data, reader, shuffle=shuffle)
        loader = ElasticDataLoader(dataset, batch_size=None, **with_context(num_workers, method))
        while not data.finished:
            for batch in loader:
                assert isinstance(batch["i"], torch.Tensor)
                assert batch["x"].dtype == torch.float64
                assert torch.equal(batch["x"], batch["i"] / 2)
                assert batch["s"].tolist() == [f"row {number}" for number in batch["i"].tolist()]
                assert batch["t"].astype("M8[s]").astype(int).tolist() == batch["i"].tolist()
                seen.update(batch["i"].tolist())
    assert seen == Counter(dict.fromkeys(range(ROWS), 2))
    assert server.requests["session"] == 2  # one a partition, whoever reads


@pytest.mark.parametrize(
    ("num_workers", "method"), [(0, None), (2, "fork")]
)  # rows by new interpreters: test_file_readers
def test_rows_train_each_row_once(server, num_workers, method):
    reader = ODPSDataReader("clicks", columns=["i", "x"])
    seen = Counter()
    with service(reader) as data:
        loader = ElasticDataLoader(ShardedDataset(data, reader), **with_context(num_workers, method))
        for batch in loader:
            assert torch.equal(batch["x"], batch["i"] / 2)
            seen.update(batch["i"].tolist())
    assert seen == Counter(range(ROWS))


def test_a_shard_is_downloaded_once_however_it_is_shuffled(server):
    reader = ODPSDataReader("clicks", columns=["i"])
    with service(reader, shuffle_shards=True) as data:
        loader = ElasticDataLoader(ShardedDataset(data, reader, shuffle=True), batch_size=None)
        rows = [row for batch in loader for row in batch["i"].tolist()]
    assert sorted(rows) == list(range(ROWS)) != rows
    ranges = [params["rowrange"] for name, params in server.asked if name == "data"]
    assert sorted(ranges) == sorted(2 * ["(0,100)", "(100,100)", "(200,100)", "(300,50)"])


def test_faults_below_the_loader_lose_nothing(server):
    reader = ODPSDataReader("clicks", columns=["i"])
    reader.table.retries.first_s = 0.001
    server.faults.plan("data", Fail(), Rows(30), Fail(429, "FlowExceeded", "slow down"), Rows(0), Rows(200))
    with service(reader) as data:
        loader = ElasticDataLoader(ShardedDataset(data, reader), batch_size=None)
        assert sorted(row for batch in loader for row in batch["i"].tolist()) == list(range(ROWS))
    assert reader.retries == 5


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_table_written_to_ends_the_loop_with_its_name(server, num_workers):
    reader = ODPSDataReader("clicks", columns=["i"])
    with service(reader) as data:
        context = with_context(num_workers, "fork")
        loader = ElasticDataLoader(ShardedDataset(data, reader), batch_size=None, **context)
        batches = iter(loader)
        next(batches)
        server.tables["clicks"].touch("ds=1")
        server.tables["clicks"].touch("ds=0")
        with pytest.raises(Exception, match=r"demo\.clicks/ds=. was written to since") as caught:
            list(batches)
        assert num_workers or isinstance(caught.value.__cause__, SourceChanged)


def test_the_masters_command_line_makes_shards_of_a_table_and_keeps_the_key_to_itself(
    server, start_master, tmp_path
):
    options = ("--training_data", "odps://demo/tables/clicks", "--records_per_task", "100")
    options += ("--validation_data", "odps://demo/tables/clicks/ds=1")
    master = start_master(*options, durable=True)
    reader = ODPSDataReader("clicks", columns=["i"])
    client = master.client("trainer")
    with DataShardService(batch_size=32, master_client=client, audit_dir=str(tmp_path / "audit")) as data:
        loader = ElasticDataLoader(ShardedDataset(data, reader), batch_size=None)
        rows = [row for batch in loader for row in batch["i"].tolist()]
        token = data.state_dict()
    assert sorted(rows) == list(range(ROWS))
    status = preloaded.run(
        [sys.executable, "-m", "edl_torch", "status", "--addr", master.address, "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    client.close()
    master.stop()
    journal = b"".join(path.read_bytes() for path in master.state.rglob("*") if path.is_file())
    audit = b"".join(path.read_bytes() for path in (tmp_path / "audit").rglob("*") if path.is_file())
    assert b"demo.clicks/ds=1" in journal
    assert {"training", "evaluation"} <= set(str(json.loads(status.stdout)).replace("'", " ").split())
    assert len(audit) > 0
    for text in (master.log, status.stdout, status.stderr, json.dumps(token)):
        assert KEY not in text
        assert os.environ["ODPS_ACCESS_ID"] not in text
    for data in (journal, audit):
        assert KEY.encode() not in data


def test_a_master_that_cannot_reach_the_table_says_why_in_one_line(server, capsys):
    assert main(["master", "--addr=127.0.0.1:0", "--training_data", "odps://demo/tables/nothing"]) != 0
    said = capsys.readouterr()
    assert "NoSuchTable" in said.err
    assert said.err.count("\n") == 1
    assert KEY not in said.err + said.out


# Parquet ----------------------------------------------------------------------------------------------------


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
@pytest.mark.parametrize(
    "columnar", [True, pytest.param(False, marks=pytest.mark.long)], ids=["columns", "rows"]
)
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


def test_forked_workers_read_after_their_trainer_has_read(folder):
    """The trainer's open files, Arrow's threads and its tables exist already when the workers are forked."""
    reader = ParquetReader(folder)
    for name, rows in reader.create_shards().items():
        reader.read_batch(name, np.arange(rows)[::-1])
    for _ in range(3):
        for epoch in read(reader, {}, {}, num_workers=2, multiprocessing_context="fork", batch_size=None):
            assert sorted(epoch) == list(range(130))
