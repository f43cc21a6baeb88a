"""MaxCompute tables through the loaders and through the master's command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
import warnings
from collections import Counter

import numpy as np
import pytest
import torch

pytest.importorskip("pyarrow")
pytest.importorskip("odps")

from maxcompute import Fail, MaxComputeServer, Rows

from edl_torch import DataShardService, ElasticDataLoader, ShardedDataset
from edl_torch.client.grpc.client import MasterClient
from edl_torch.errors import SourceChanged
from edl_torch.readers import ODPSDataReader
from edl_torch.testing import wait_until

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


@pytest.mark.parametrize(
    ("num_workers", "method", "shuffle"),
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
)  # rows by new interpreters: test_image_readers_train
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


def test_a_global_shuffle_reads_through_blocks(server):
    reader = ODPSDataReader("clicks", columns=["i"])
    with service(reader, shuffle=True) as data:
        loader = ElasticDataLoader(ShardedDataset(data, reader), batch_size=None)
        assert sorted(row for batch in loader for row in batch["i"].tolist()) == list(range(ROWS))
    assert server.requests["data"] == 2  # a partition is one block here


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


@pytest.fixture
def master(server, tmp_path):
    """`edl-torch master` over the table, with a journal."""
    address, state = tmp_path / f"address-{uuid.uuid4().hex}", tmp_path / "state"
    options = ["--training_data", "odps://demo/tables/clicks", "--validation_data"]
    options += ["odps://demo/tables/clicks/ds=1", "--records_per_task", "100", "--state", str(state)]
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "edl_torch",
            "master",
            "--addr",
            "127.0.0.1:0",
            "--address-file",
            address,
            *options,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_until(lambda: address.exists() or process.poll() is not None, timeout_s=60)
    assert process.poll() is None, process.communicate()
    yield process, address.read_text().strip(), state
    if process.poll() is None:
        process.kill()
    process.communicate()


def test_the_masters_command_line_makes_shards_of_a_table_and_keeps_the_key_to_itself(
    server, master, tmp_path
):
    process, address, state = master
    reader = ODPSDataReader("clicks", columns=["i"])
    client = MasterClient(address, "trainer")
    with DataShardService(batch_size=32, master_client=client, audit_dir=str(tmp_path / "audit")) as data:
        loader = ElasticDataLoader(ShardedDataset(data, reader), batch_size=None)
        rows = [row for batch in loader for row in batch["i"].tolist()]
        token = data.state_dict()
    assert sorted(rows) == list(range(ROWS))
    status = subprocess.run(
        [sys.executable, "-m", "edl_torch", "status", "--addr", address, "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    client.close()
    process.terminate()
    output = process.communicate(timeout=30)[0]
    journal = b"".join(path.read_bytes() for path in state.rglob("*") if path.is_file())
    audit = b"".join(path.read_bytes() for path in (tmp_path / "audit").rglob("*") if path.is_file())
    assert b"demo.clicks/ds=1" in journal
    assert {"training", "evaluation"} <= set(str(json.loads(status.stdout)).replace("'", " ").split())
    assert len(audit) > 0
    for text in (output, status.stdout, status.stderr, json.dumps(token)):
        assert KEY not in text
        assert os.environ["ODPS_ACCESS_ID"] not in text
    for data in (journal, audit):
        assert KEY.encode() not in data


def test_a_master_that_cannot_reach_the_table_says_why_in_one_line(server):
    done = subprocess.run(
        [sys.executable, "-m", "edl_torch", "master", "--training_data", "odps://demo/tables/nothing"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert "NoSuchTable" in done.stderr
    assert "Traceback" not in done.stderr
    assert KEY not in done.stderr + done.stdout
