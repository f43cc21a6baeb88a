"""Unmodified pyodps against the server: its own readers, both ways, and the errors that it is told."""

from __future__ import annotations

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("odps")

from maxcompute import Corrupt, Cut, MaxComputeServer, Refuse, Rows
from maxcompute.framing import crc
from odps import ODPS
from odps.accounts import StsAccount
from odps.config import option_context
from odps.errors import BaseODPSError, ChecksumError, TableModified
from odps.tunnel import TableTunnel


@pytest.fixture
def server():
    with MaxComputeServer() as running:
        yield running


@pytest.fixture(autouse=True)
def utc(monkeypatch):
    """pyodps reads times into the local zone."""
    with option_context() as options:
        options.local_timezone = False
        options.retry_delay = 0
        yield


def client(server, key=None, **arguments):
    key = key or server.access_key
    return ODPS(server.access_id, key, server.project, server.endpoint, overwrite_global=False, **arguments)


def session(server, table="t", **arguments):
    return TableTunnel(client(server)).create_download_session(table, **arguments)


def test_records_and_arrow_in_the_columns_asked_for(server):
    server.add_table("t", {"a": "bigint", "b": "string", "c": "double"}, {"a": [1], "b": ["x"], "c": [0.5]})
    opened = session(server)
    assert opened.open_arrow_reader(0, 1, columns=["c", "a"]).read().to_pylist() == [{"c": 0.5, "a": 1}]
    assert [list(record) for record in opened.open_record_reader(0, 1, columns=["c", "a"])] == [
        [("c", 0.5), ("a", 1)]
    ]


def test_ranges_over_many_messages_and_chunks(server):
    server.batch_rows = 100
    server.add_table("t", {"i": "bigint", "s": "string"}, {"i": list(range(9000)), "s": ["x" * 20] * 9000})
    opened = session(server)
    assert opened.open_arrow_reader(17, 8000).read()["i"].to_pylist() == list(range(17, 8017))
    assert [record[0] for record in opened.open_record_reader(17, 8000)] == list(range(17, 8017))
    with pytest.raises(BaseODPSError, match="row range"):
        opened.open_arrow_reader(8999, 2)


def test_partitions_are_listed_page_by_page_and_read(server):
    server.partitions_page = 2
    parts = {f"ds={day},hh={hour}": {"i": [10 * day + hour]} for day in (1, 2) for hour in (1, 2, 3)}
    server.add_table("p", {"i": "bigint"}, partition_keys={"ds": "string", "hh": "bigint"}, partitions=parts)
    table = client(server).get_table("p")
    assert [str(found.partition_spec).replace("'", "") for found in table.partitions] == list(parts)
    assert len(list(table.iterate_partitions("ds=2"))) == 3
    assert server.requests["partitions"] == 3 + 2
    assert table.get_partition("ds='2',hh='3'").record_num == 1
    with table.open_reader(partition="ds=2,hh=3") as reader:
        assert [record["i"] for record in reader] == [23]
    with pytest.raises(BaseODPSError, match="partition"):
        session(server, "p")
    with pytest.raises(BaseODPSError, match="does not exist"):
        session(server, "p", partition_spec="ds=3,hh=3")


def test_a_session_is_a_snapshot_and_finds_the_table_modified(server):
    table = server.add_table("t", {"i": "bigint"}, {"i": [1]})
    opened = session(server)
    table.write({"i": [1, 2]})
    assert session(server).count == 2
    assert opened.count == 1
    with pytest.raises(TableModified):
        opened.open_arrow_reader(0, 1)


@pytest.mark.parametrize("region", [None, "cn-hangzhou"])
def test_the_signature_is_checked_in_both_versions(server, region):
    server.add_table("t", {"i": "bigint"}, {"i": [1]})
    right = client(server, region_name=region)
    right.get_table("t").reload()
    assert TableTunnel(right).create_download_session("t").count == 1
    wrong = client(server, key="another-key", region_name=region, tunnel_endpoint=server.tunnel_endpoint)
    with pytest.raises(BaseODPSError, match="signature"):
        wrong.get_table("t").reload()
    with pytest.raises(BaseODPSError, match="authorization header"):
        TableTunnel(wrong).create_download_session("t")


def test_a_temporary_token_is_asked_for():
    with MaxComputeServer(sts_token="token") as server:
        server.add_table("t", {"i": "bigint"}, {"i": [1]})
        with pytest.raises(BaseODPSError):
            client(server).get_table("t").reload()
        account = StsAccount(server.access_id, server.access_key, "token", expired_hours=None)
        odps = ODPS(account, project=server.project, endpoint=server.endpoint, overwrite_global=False)
        odps.get_table("t").reload()


def test_pyodps_itself_survives_a_corrupt_byte_and_a_dropped_connection(server):
    server.add_table("t", {"i": "bigint"}, {"i": list(range(50))})
    opened = session(server)
    for fault in (Corrupt(100), Cut(after=100), Refuse()):
        server.faults.plan("data", fault)
        assert opened.open_arrow_reader(0, 50).read()["i"].to_pylist() == list(range(50))
    assert server.requests["data"] == 6


def test_pyodps_raises_for_corruption_that_stays(server):
    server.add_table("t", {"i": "bigint"}, {"i": list(range(50))})
    opened = session(server)
    server.faults.always("data", Corrupt(100))
    with pytest.raises(ChecksumError):
        opened.open_arrow_reader(0, 50).read()


def test_pyodps_does_not_notice_a_cut_at_a_border(server):
    server.batch_rows = 10
    server.add_table("t", {"i": "bigint"}, {"i": list(range(50))})
    opened = session(server)
    server.faults.plan("data", Rows(30), Rows(70))
    assert opened.open_arrow_reader(0, 50).read()["i"].to_pylist() == list(range(30))
    assert opened.open_arrow_reader(0, 50).read().num_rows == 70
    server.faults.plan("data", Rows(30))
    assert len(list(opened.open_record_reader(0, 50))) == 30


def test_the_checksum_is_crc_32c():
    assert crc(b"123456789").hex() == "e3069283"  # RFC 3720, appendix B.4
