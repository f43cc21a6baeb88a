"""Parquet in an S3 store: a real server in a process of its own, s3fs in between."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from s3_server import KEYS, s3_server

from edl_torch import DataShardService, ElasticDataLoader, ShardedDataset
from edl_torch.errors import ReaderError, SourceChanged
from edl_torch.readers import ParquetReader, open_reader
from edl_torch.testing import check_reader

ROWS = 60


def content(first: int, count: int) -> bytes:
    rows = pa.table(
        {"id": np.arange(first, first + count), "noise": np.random.default_rng(first).random(count)}
    )
    written = io.BytesIO()
    pq.write_table(rows, written, row_group_size=8)
    return written.getvalue()


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture
def options(server: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    return {**KEYS, "endpoint_url": server}


@pytest.fixture
def table(options: dict[str, Any]) -> Iterator[str]:
    store = fsspec.filesystem("s3", **options)
    if not store.exists("bucket"):
        store.mkdir("bucket")
    for number in range(3):
        store.pipe(f"bucket/table/day={number}/part.parquet", content(20 * number, 20))
    yield "s3://bucket/table"
    store.rm("bucket/table", recursive=True)


def test_a_partitioned_table_keeps_the_contract(table, options):
    check_reader(lambda: ParquetReader(table, storage_options=options))
    check_reader(lambda: ParquetReader(f"{table}/day=[12]/*.parquet", storage_options=options))
    reader = open_reader(f"{table}/day=1/part.parquet", storage_options=options)
    assert reader.create_shards() == {f"{table}/day=1/part.parquet": 20}
    assert open_reader(table, storage_options=options).columns == ["id", "noise", "day"]


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


def test_only_the_columns_that_are_read_travel(table, options, monkeypatch):
    """Bytes over the network: the ranges of one column in one row group, not the file."""
    from s3fs.core import S3File

    store = fsspec.filesystem("s3", **options)
    rng = np.random.default_rng(0)
    wide = pa.table({name: rng.random(40_000) for name in "abcdefgh"})
    written = io.BytesIO()
    pq.write_table(wide, written, row_group_size=10_000, compression="none", use_dictionary=False)
    store.pipe("bucket/table/wide.parquet", written.getvalue())
    fetched: list[int] = []
    fetch = S3File._fetch_range

    def counted(self: Any, start: int, end: int) -> Any:
        fetched.append(end - start)
        return fetch(self, start, end)

    monkeypatch.setattr(S3File, "_fetch_range", counted)
    reader = ParquetReader(f"{table}/wide.parquet", ["c"], storage_options=options)
    fetched.clear()
    reader.read_record(f"{table}/wide.parquet", 25_000)
    footer = 64 << 10
    assert 80_000 <= sum(fetched) < 80_000 + 2 * footer, f"{fetched} of {len(written.getvalue())} bytes"


def refusal(url: str, options: dict[str, Any]) -> str:
    with pytest.raises(ReaderError) as caught:
        ParquetReader(url, storage_options=options)
    assert KEYS["secret"] not in str(caught.value)
    return str(caught.value)


def test_what_is_wrong_is_said_with_its_remedy(table, options):
    assert "does not exist; check the path and the bucket" in refusal(f"{table}/none.parquet", options)
    assert "does not exist; check the path and the bucket" in refusal("s3://nobucket/a.parquet", options)
    anonymous = {"endpoint_url": options["endpoint_url"]}
    said = refusal(table, anonymous)
    assert "Unable to locate credentials" in said
    assert "check the credentials in storage_options={…} or the environment" in said
    assert "storage_options" in refusal(table, {**options, "nonsense": 1})
    nobody = {
        **options,
        "endpoint_url": "http://127.0.0.1:9",
        "config_kwargs": {"retries": {"max_attempts": 0}},
    }
    assert "check the network, the endpoint" in refusal(table, nobody)


def test_damage_and_change_are_seen_there_too(table, options):
    store = fsspec.filesystem("s3", skip_instance_cache=True, **options)  # somebody else, elsewhere
    store.pipe("bucket/table/day=1/part.parquet", content(20, 20)[:-30])
    assert "truncated Parquet file" in refusal(table, options)
    store.pipe("bucket/table/day=1/part.parquet", content(20, 20))
    reader = ParquetReader(table, storage_options=options)
    store.pipe("bucket/table/day=1/part.parquet", content(20, 25))
    with pytest.raises(SourceChanged, match="has changed since the reader was made"):
        reader.read_record(f"{table}/day=1/part.parquet", 0)


@pytest.mark.parametrize("is_open", [False, True], ids=["new", "open"])
def test_rows_in_another_order_under_the_same_footer_are_seen_there_too(table, options, is_open):
    def rows(order: Any) -> bytes:
        written = io.BytesIO()
        plain: dict[str, Any] = {"compression": "none", "use_dictionary": False, "write_statistics": False}
        pq.write_table(pa.table({"id": np.arange(20)[order]}), written, row_group_size=10, **plain)
        return written.getvalue()

    store = fsspec.filesystem("s3", skip_instance_cache=True, **options)
    one, other = rows(slice(None)), rows(slice(None, None, -1))
    assert (len(one), one[-100:]) == (len(other), other[-100:])
    store.pipe("bucket/table/rows.parquet", one)
    reader, name = ParquetReader(f"{table}/rows.parquet", storage_options=options), f"{table}/rows.parquet"
    if is_open:
        assert reader.read_record(name, 0)["id"] == 0
    store.pipe("bucket/table/rows.parquet", other)
    with pytest.raises(SourceChanged, match="it was written to since"):
        reader.read_record(name, 15)


def test_an_answer_cut_short_is_asked_for_again(table, options, monkeypatch):
    from s3fs.core import S3File

    reader = ParquetReader(table, storage_options=options)
    path = f"{table}/day=1/part.parquet"
    fetch, cuts = S3File._fetch_range, []

    def cut(self: Any, start: int, end: int) -> Any:
        found = fetch(self, start, end)
        is_footer = end == self.size
        return found if is_footer or not cuts else found[: len(found) // cuts.pop()]

    monkeypatch.setattr(S3File, "_fetch_range", cut)
    cuts.append(2)
    assert reader.read_record(path, 10)["id"] == 30
    assert not cuts
    cuts.extend([2] * 20)
    with pytest.raises(ReaderError):
        reader.read_record(path, 19)
    assert len(cuts) < 20


def test_memory_of_one_process_and_its_forks(tmp_path):
    store = fsspec.filesystem("memory")
    store.pipe("/made/a.parquet", content(0, 30))
    check_reader(lambda: ParquetReader("memory://made"))
    reader = ParquetReader("memory://made/*.parquet")
    assert reader.create_shards() == {"memory://made/a.parquet": 30}
    with DataShardService(4, reader=reader) as service:
        loader = ElasticDataLoader(
            ShardedDataset(service, reader), num_workers=2, multiprocessing_context="fork"
        )
        assert sorted(i for batch in loader for i in batch["id"].tolist()) == list(range(30))
    store.rm("/made", recursive=True)


@pytest.mark.parametrize("content_then", [b"\xab" * 4000, b"PAR1 cut"], ids=["garbage", "truncated"])
def test_a_file_that_is_overwritten_while_a_job_runs_has_changed(table, options, content_then):
    """Not 500 records in quarantine."""
    reader = ParquetReader(table, storage_options=options, cache_bytes=1)
    service = DataShardService(4, reader=reader, max_bad_records=500)
    dataset = ShardedDataset(service, reader, on_bad_record="quarantine")
    store = fsspec.filesystem("s3", **options)
    with ElasticDataLoader(dataset) as loader, service:
        batches = iter(loader)
        next(batches)
        for number in range(3):
            store.pipe(f"bucket/table/day={number}/part.parquet", content_then)
        with pytest.raises(SourceChanged, match="has changed since the reader was made"):
            list(batches)
        assert service.progress().quarantined == 0
