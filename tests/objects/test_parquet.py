"""Parquet in a store: rows, requests and errors are those that they should be."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from stores import BUCKET, SECRET, Proxy, Request, Weed, put

from edl_torch import DataShardService, ElasticDataLoader, ShardedDataset
from edl_torch.errors import ReaderError, SourceChanged
from edl_torch.readers import ParquetReader
from edl_torch.shard import Shard, Task

ROWS, TABLE = 60, f"s3://{BUCKET}/table"


def content(first: int, count: int, group: int = 8) -> bytes:
    rows = pa.table(
        {"id": np.arange(first, first + count), "noise": np.random.default_rng(first).random(count)}
    )
    written = io.BytesIO()
    pq.write_table(rows, written, row_group_size=group)
    return written.getvalue()


@pytest.fixture
def options(weed: Weed, proxy: Proxy) -> dict[str, Any]:
    return weed.options(proxy.url)


@pytest.fixture
def table(bucket: Any) -> Iterator[str]:
    put(bucket, {f"table/day={number}/part.parquet": content(20 * number, 20) for number in range(3)})
    put(bucket, {"table/_SUCCESS": b"", "table/day=0/.part.crc": b"x"})
    yield TABLE
    found = bucket.list_objects_v2(Bucket=BUCKET, Prefix="table/")["Contents"]
    for one in found:
        bucket.delete_object(Bucket=BUCKET, Key=one["Key"])


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_workers_read_each_row_once(table, options, method):
    """The trainer's connections and event loop are alive when the workers are forked."""
    reader = ParquetReader(table, storage_options=options)
    reader.read_record(f"{table}/day=0/part.parquet", 3)
    with DataShardService(4, reader=reader, num_epochs=2, shuffle_shards=True) as service:
        dataset = ShardedDataset(service, reader, shuffle=True)
        loader = ElasticDataLoader(dataset, num_workers=2, batch_size=None, multiprocessing_context=method)
        while not service.finished:
            batches = list(loader)
            assert sorted(i for batch in batches for i in batch["id"].tolist()) == list(range(ROWS))
            assert all(bool((batch["day"] == batch["id"] // 20).all()) for batch in batches)


def sizes(requests: list[Request]) -> list[int]:
    """Bytes that were asked for."""
    ranges = [one.range.removeprefix("bytes=").split("-") for one in requests if one.range]
    return [int(last) - int(first) + 1 for first, last in ranges]


def test_only_the_columns_that_are_read_travel(table, options, bucket, proxy):
    """Bytes over the network: the ranges of one column in one row group, not the file."""
    rng = np.random.default_rng(0)
    wide = pa.table({name: rng.random(40_000) for name in "abcdefgh"})
    written = io.BytesIO()
    pq.write_table(wide, written, row_group_size=10_000, compression="none", use_dictionary=False)
    put(bucket, {"table/wide.parquet": written.getvalue()})
    reader = ParquetReader(f"{table}/wide.parquet", ["c"], storage_options=options)
    proxy.log.clear()
    reader.read_record(f"{table}/wide.parquet", 25_000)
    footer, column = sizes(proxy.gets())
    assert footer == 64 << 10
    assert 80_000 <= column < 81_000


def test_row_groups_are_asked_for_before_they_are_needed(table, options, bucket, proxy):
    put(bucket, {"table/long.parquet": content(0, 4000, group=100)})
    name = f"{table}/long.parquet"
    reader = ParquetReader(name, storage_options=options)
    proxy.log.clear()
    records = reader.read_records(Task(shard=Shard(name=name, start=0, end=4000)))
    assert next(records)["id"] == 0
    proxy.until(lambda: len(proxy.gets()) == 4)  # its footer, the first row group, and two more
    assert [record["id"] for record in records] == list(range(1, 4000))
    assert len(proxy.gets()) == 1 + 40
    # What a second pass needs is asked for again, as little of it is kept.
    reader = ParquetReader(name, storage_options=options, cache_bytes=1)
    for _ in range(2):
        proxy.log.clear()
        records = reader.read_records(Task(shard=Shard(name=name, start=0, end=4000)))
        assert next(records)["id"] == 0
        proxy.until(lambda: len(proxy.gets()) >= 3)
        assert len(list(records)) == 3999
    shuffled = np.random.default_rng(0).permutation(4000)
    reader = ParquetReader(name, storage_options=options)
    proxy.log.clear()
    reader.expect([(name, 0, 2000), (name, 3000, 4000)])
    wanted = shuffled[(shuffled < 2000) | (shuffled >= 3000)]
    assert [reader.read_record(name, index)["id"] for index in wanted.tolist()] == wanted.tolist()
    assert len(proxy.gets()) == 1 + 30, "each row group was read once"


def refusal(url: str, options: dict[str, Any]) -> str:
    with pytest.raises(ReaderError) as caught:
        ParquetReader(url, storage_options=options)
    assert SECRET not in str(caught.value)
    return str(caught.value)


def test_what_is_wrong_is_said_with_its_remedy(table, options):
    assert "does not exist; check the path and the bucket" in refusal(f"{table}/none.parquet", options)
    assert "does not exist; check the path and the bucket" in refusal("s3://nobucket/a.parquet", options)
    said = refusal(table, {**options, "secret": "wrong"})
    assert "check the credentials in storage_options={…} or the environment" in said
    assert "storage_options" in refusal(table, {**options, "nonsense": 1})


def test_damage_and_change_are_seen_there_too(table, options, bucket):
    put(bucket, {"table/day=1/part.parquet": content(20, 20)[:-30]})
    assert "truncated Parquet file" in refusal(table, options)
    put(bucket, {"table/day=1/part.parquet": content(20, 20)})
    reader = ParquetReader(table, storage_options=options)
    put(bucket, {"table/day=1/part.parquet": content(20, 25)})
    with pytest.raises(SourceChanged, match="has changed since"):
        reader.read_record(f"{table}/day=1/part.parquet", 0)
