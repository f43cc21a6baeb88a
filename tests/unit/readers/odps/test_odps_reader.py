from __future__ import annotations

import datetime as dt
import itertools
import subprocess
import sys
import time
from decimal import Decimal

import numpy as np
import pytest
from odps.config import options

from edl_torch.errors import BadRecord, InvalidArgument, ReaderError
from edl_torch.fingerprint import describe_change, differ, known_by
from edl_torch.readers.base import reader_fingerprint, reader_sources
from edl_torch.readers.odps.config import parse_table_url
from edl_torch.readers.odps.reader import ODPSDataReader
from edl_torch.readers.registry import open_reader
from edl_torch.shard import Shard, Task, TaskType
from edl_torch.testing import check_reader

DAYS = {"ds": "string", "hh": "bigint"}


@pytest.fixture
def days(server):
    parts = {
        f"ds={day},hh={hour}": {"i": list(range(int(day) * 10 + hour, int(day) * 10 + hour + 3))}
        for day in ("20240201", "20240102", "20240101")
        for hour in (1, 2)
    }
    return server.add_table("days", {"i": "bigint"}, partition_keys=DAYS, partitions=parts)


def read(reader, name, start, end):
    return list(reader.read_records(Task(shard=Shard(name=name, start=start, end=end))))


def test_the_reader_keeps_the_contract(server):
    check_reader(lambda: ODPSDataReader("numbers", block_rows=300))


@pytest.mark.usefixtures("days")
def test_the_reader_keeps_the_contract_over_partitions():
    check_reader(lambda: ODPSDataReader("days", columns=["hh", "i"], cache_bytes=1))


@pytest.mark.usefixtures("server")
def test_records_are_dicts_and_batches_dicts_of_arrays(quick):
    reader = quick(columns=["s", "i", "f"])
    assert reader.create_shards() == {"demo.numbers": 1000}
    assert read(reader, "demo.numbers", 1, 3) == [
        {"s": "row 1", "i": 1, "f": 0.5},
        {"s": "row 2", "i": 2, "f": 1.0},
    ]
    batch = reader.read_batch("demo.numbers", np.array([999, 0, 500]))
    assert list(batch) == ["s", "i", "f"]
    assert batch["i"].tolist() == [999, 0, 500]
    assert batch["s"].tolist() == ["row 999", "row 0", "row 500"]
    np.testing.assert_array_equal(batch["f"], [np.nan, np.nan, 250])
    assert reader.read_record("demo.numbers", 7) == {"s": "row 7", "i": 7, "f": 3.5}


def test_columns_of_every_common_type(server):
    when = dt.datetime(2024, 1, 2, 3, 4, 5, 678000)
    columns = {
        "f": "float",
        "sm": "smallint",
        "bo": "boolean",
        "b": "binary",
        "dt": "datetime",
        "ts": "timestamp",
        "da": "date",
        "de": "decimal(10,2)",
        "a": "array<double>",
        "m": "map<string,bigint>",
    }
    rows = {
        "f": [0.25, None],
        "sm": [-3, -4],
        "bo": [True, False],
        "b": [b"\0\xff", None],
        "dt": [when, None],
        "ts": [when, None],
        "da": [dt.date(2024, 2, 29), None],
        "de": [Decimal("1.50"), None],
        "a": [[0.5, None], None],
        "m": [[("k", 1)], None],
    }
    server.add_table("wide", columns, rows)
    batch = ODPSDataReader("wide").read_batch("demo.wide", np.array([0, 1]))
    assert {name: array.dtype.str for name, array in batch.items()} == {
        "f": "<f4",
        "sm": "<i2",
        "bo": "|b1",
        "b": "|O",
        "dt": "<M8[ms]",
        "ts": "<M8[ns]",
        "da": "<M8[D]",
        "de": "|O",
        "a": "|O",
        "m": "|O",
    }
    assert batch["dt"][0] == batch["ts"][0] == np.datetime64(when)
    assert batch["de"].tolist() == [Decimal("1.50"), None]
    np.testing.assert_array_equal(batch["a"][0], [0.5, np.nan])
    assert batch["m"].tolist() == [{"k": 1}, None]
    check_reader(lambda: ODPSDataReader("wide"))


def test_a_null_in_an_integer_column_needs_a_value(server):
    server.initiating_polls = 1  # its session is being made, and waited for
    server.add_table("gaps", {"i": "bigint"}, {"i": [1, None, 3]})
    reader = ODPSDataReader("gaps")
    with pytest.raises(BadRecord, match=r"'i'.*NULL.*fill_nulls"):
        reader.read_batch("demo.gaps", np.array([0, 1]))
    assert reader.read_batch("demo.gaps", np.array([0, 2]))["i"].tolist() == [1, 3]
    filled = ODPSDataReader("gaps", fill_nulls={"i": -1})
    assert [row["i"] for row in read(filled, "demo.gaps", 0, 3)] == [1, -1, 3]
    assert [filled.read_record("demo.gaps", index)["i"] for index in range(3)] == [1, -1, 3]


@pytest.mark.usefixtures("days")
@pytest.mark.parametrize(
    ("partition", "count"),
    [
        (None, 6),
        ("ds=20240102,hh=1", 1),
        ("hh=2, ds='20240102'", 1),
        ("ds=20240102", 2),
        ("hh=1", 3),
        ("ds=202401*", 4),
        ("ds=2024010[12],hh=?", 4),
        (["ds=20240102", "ds=202401*,hh=1"], 3),
    ],
)
def test_partitions_are_chosen_by_name_and_by_pattern(partition, count):
    sources = reader_sources(ODPSDataReader("days", partition))
    assert len(sources) == count
    assert [source.name for source in sources] == sorted(source.name for source in sources)
    assert all(source.name.startswith("demo.days/ds=2024") and source.count == 3 for source in sources)


def test_the_service_narrows_the_listing_where_it_can(server, days):
    ODPSDataReader("days", "ds=20240102,hh=*").create_shards()
    asked = [params.get("partition") for name, params in server.asked if name == "partitions"]
    assert asked == ["ds='20240102'"]


@pytest.mark.usefixtures("days")
def test_partition_keys_are_columns_where_they_are_asked_for():
    reader = ODPSDataReader("days", "ds=20240102,hh=2", ["ds", "hh", "i"])
    batch = reader.read_batch("demo.days/ds=20240102,hh=2", np.array([2, 0]))
    assert batch["ds"].tolist() == ["20240102"] * 2
    assert batch["hh"].tolist() == [2, 2]
    assert batch["i"].tolist() == [202401024, 202401022]


def test_empty_partitions_are_empty_sources(server):
    parts = {"ds=1": {"i": []}, "ds=2": {"i": [5]}}
    server.add_table("sparse", {"i": "bigint"}, partition_keys={"ds": "string"}, partitions=parts)
    reader = ODPSDataReader("sparse")
    assert reader.create_shards() == {"demo.sparse/ds=1": 0, "demo.sparse/ds=2": 1}
    assert read(reader, "demo.sparse/ds=1", 0, 0) == []
    assert reader.read_batch("demo.sparse/ds=1", np.array([], np.int64))["i"].dtype == np.int64


@pytest.mark.usefixtures("days")
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("nothing",), ReaderError, "NoSuchTable"),
        (("numbers", "ds=1"), InvalidArgument, "demo.numbers has no partitions"),
        (("days", "ds=1999"), ReaderError, "demo.days has no partition 'ds=1999'"),
        (("days", "dt=1"), InvalidArgument, "partition keys ds, hh, not dt"),
        (("days", None, ["i", "j"]), InvalidArgument, "no column j; it has i, ds, hh"),
    ],
)
def test_what_is_not_there_is_named(arguments, error, message):
    with pytest.raises(error, match=message):
        ODPSDataReader(*arguments).create_shards()


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"table": "a.b.c.d"}, "project.schema.table"),
        ({"table": ""}, "table=''"),
        ({"partition": "ds"}, "key=value"),
        ({"partition": "ds=1,ds=2"}, "each key once"),
        ({"columns": []}, "at least one"),
        ({"columns": ["i", "i"]}, "each once"),
        ({"block_rows": 0}, "block_rows=0"),
        ({"cache_bytes": 1.5}, "cache_bytes=1.5"),
        ({"timeout_s": 0}, "timeout_s=0"),
        ({"timeout_s": "long"}, "timeout_s='long'"),
        ({"retries": "many"}, "retries='many'"),
        ({"retries": -1}, "retries=-1"),
        ({"fill_nulls": "0"}, "fill_nulls='0'"),
        ({"access_id": "x", "access_key": 12345}, "access_key is int, expected text"),
        ({"access_key": "k"}, "without access_id"),
        ({"sts_token": "t"}, "without access_id and access_key"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused_at_once(arguments, message):
    with pytest.raises(InvalidArgument, match=message):
        ODPSDataReader(**{"table": "numbers", **arguments})


@pytest.mark.usefixtures("server")
def test_what_the_environment_lacks_is_named(monkeypatch):
    monkeypatch.delenv("ODPS_ENDPOINT")
    with pytest.raises(InvalidArgument, match=r"endpoint is not known.*ODPS_ENDPOINT or MAXCOMPUTE_ENDPOINT"):
        ODPSDataReader("numbers")
    monkeypatch.setenv("MAXCOMPUTE_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.delenv("ODPS_PROJECT")
    with pytest.raises(InvalidArgument, match="project is not known"):
        ODPSDataReader("numbers")


def test_elasticdls_variables_serve_too(server, monkeypatch):
    for name in server.environment():
        monkeypatch.delenv(name)
    monkeypatch.setenv("MAXCOMPUTE_PROJECT", server.project)
    monkeypatch.setenv("MAXCOMPUTE_AK", server.access_id)
    monkeypatch.setenv("MAXCOMPUTE_SK", server.access_key)
    monkeypatch.setenv("MAXCOMPUTE_ENDPOINT", server.endpoint)
    monkeypatch.setenv("MAXCOMPUTE_TUNNEL_ENDPOINT", server.tunnel_endpoint)
    assert ODPSDataReader("numbers").create_shards() == {"demo.numbers": 1000}
    assert server.requests["tunnel"] == 0  # it was told


@pytest.mark.parametrize(
    ("url", "arguments"),
    [
        ("odps://p/tables/t", {"project": "p", "table": "t"}),
        ("odps://p/tables/t/", {"project": "p", "table": "t"}),
        ("odps://p/schemas/s/tables/t", {"project": "p", "schema": "s", "table": "t"}),
        ("odps://p/tables/t/ds=1,hh=2", {"project": "p", "table": "t", "partition": "ds=1,hh=2"}),
        ("odps://p/tables/t/ds=1/hh=2", {"project": "p", "table": "t", "partition": "ds=1/hh=2"}),
        ("odps://p/tables/t/ds=a%20b", {"project": "p", "table": "t", "partition": "ds=a b"}),
        ("odps://p/tables/t/ds=?,hh=2", {"project": "p", "table": "t", "partition": "ds=?,hh=2"}),
    ],
)
def test_addresses(url, arguments):
    assert parse_table_url(url) == arguments
    assert ODPSDataReader.arguments_for(url, TaskType.TRAINING, {}) == arguments


@pytest.mark.parametrize(
    "url",
    ["odps://", "odps://p", "odps://p/t", "odps:///tables/t", "odps://p/tables/t/ds", "odps://p/tables/t#x"],
)
def test_addresses_that_are_none(url):
    with pytest.raises(InvalidArgument, match="expected"):
        parse_table_url(url)


def test_an_address_opens_the_reader(server):
    assert ODPSDataReader.arguments_for("/data/odps://x", TaskType.TRAINING, {}) is None
    reader = open_reader("odps://demo/tables/numbers", columns=["i"])
    assert isinstance(reader, ODPSDataReader)
    assert reader.create_shards() == {"demo.numbers": 1000}
    assert ODPSDataReader("odps://demo/tables/numbers").create_shards() == {"demo.numbers": 1000}


def test_one_session_serves_all_reads_of_a_partition(server):
    reader = ODPSDataReader("numbers", block_rows=100)
    reader.create_shards()
    reader.create_shards()
    for start in range(0, 1000, 200):
        read(reader, "demo.numbers", start, start + 200)
    assert server.requests["session"] == 1
    assert server.requests["reload"] == 0


@pytest.mark.parametrize(("block_rows", "requests"), [(1000, 1), (100, 10), (300, 4)])
def test_batches_of_one_block_are_one_request(server, block_rows, requests):
    reader = ODPSDataReader("numbers", block_rows=block_rows)
    for start in range(0, 1000, 50):
        batch = reader.read_batch("demo.numbers", np.arange(start, start + 50))
        assert batch["i"].tolist() == list(range(start, start + 50))
    assert server.requests["data"] == requests


def test_an_expected_range_is_downloaded_exactly_once(server):
    reader = ODPSDataReader("numbers", block_rows=150)
    reader.expect([("demo.numbers", 130, 530)])
    order = np.random.default_rng(0).permutation(np.arange(130, 530))
    for part in np.array_split(order, 13):
        assert reader.read_batch("demo.numbers", part)["i"].tolist() == part.tolist()
    ranges = sorted(params["rowrange"] for name, params in server.asked if name == "data")
    assert ranges == ["(130,150)", "(280,150)", "(430,100)"]


def test_rows_in_memory_are_bounded(server):
    reader = ODPSDataReader("numbers", block_rows=100, cache_bytes=1)
    for _ in range(2):
        for index in (5, 105):
            assert reader.read_record("demo.numbers", index)["i"] == index
    assert server.requests["data"] == 4
    roomy = ODPSDataReader("numbers", block_rows=100)
    for _ in range(2):
        for index in (5, 105):
            assert roomy.read_record("demo.numbers", index)["i"] == index
    assert server.requests["data"] == 6


@pytest.fixture
def shanghai(monkeypatch):
    monkeypatch.setenv("TZ", "Asia/Shanghai")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("shanghai")
def test_times_are_in_utc_wherever_the_machine_stands(server):
    when = dt.datetime(2024, 1, 2, 3, 4, 5)
    server.add_table("times", {"t": "datetime", "s": "timestamp"}, {"t": [when], "s": [when]})
    batch = ODPSDataReader("times").read_batch("demo.times", np.array([0]))
    assert batch["t"][0] == batch["s"][0] == np.datetime64(when)


@pytest.mark.usefixtures("server")
def test_pyodps_options_stay_the_users():
    options.retry_times = 3
    try:
        ODPSDataReader("numbers").read_record("demo.numbers", 0)
        assert (options.retry_times, options.local_timezone, options.account) == (3, None, None)
    finally:
        options.retry_times = 4


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize(("start", "end"), [(0, 1001), (1000, 1001), (-1, 3), (5, 2)])
def test_a_range_outside_is_refused_before_it_is_asked_for(server, start, end):
    reader = ODPSDataReader("numbers")
    with pytest.raises(ReaderError, match="has the records 0 to 1000 here"):
        read(reader, "demo.numbers", start, end)
    assert server.requests["data"] == 0


@pytest.mark.usefixtures("days")
@pytest.mark.parametrize(
    "name", ["demo.other", "demo.days", "demo.days/ds=20240201,hh=1", "demo.daysds=1", "x"]
)
def test_another_source_is_refused(name):
    reader = ODPSDataReader("days", "ds=20240102")
    with pytest.raises(ReaderError, match=r"this reader reads demo.days/ds=20240102, not"):
        reader.read_record(name, 0)


def test_without_pyodps_it_says_what_to_install(server):
    code = (
        "import sys; sys.modules['odps'] = None\n"
        "from edl_torch.readers import ODPSDataReader, ODPSReader\n"
        "from edl_torch.errors import ReaderUnavailable\n"
        "try: ODPSDataReader('t').create_shards()\n"
        "except ReaderUnavailable as exc: print(exc)"
    )
    said = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60)
    assert "pip install 'edl-torch[odps]'" in said


def test_a_partition_that_was_written_to_is_named_by_the_fingerprint(days):
    before = reader_fingerprint(ODPSDataReader("days"))
    made = [
        {"columns": ["i"]},
        {"columns": ["hh"]},
        {"fill_nulls": {"i": 0}},
        {"fill_nulls": {"i": 1}},
    ]
    looks = [reader_fingerprint(ODPSDataReader("days", **given)) for given in made]
    assert all(differ(*pair) for pair in itertools.combinations(looks, 2))
    assert known_by([before, looks[0]]) == "partly"
    days.write({"i": [1, 2, 3]}, "ds=20240102,hh=2")
    now = reader_fingerprint(ODPSDataReader("days"))
    assert describe_change(before, now) == "6 then and now: changed 'demo.days/ds=20240102,hh=2'"
