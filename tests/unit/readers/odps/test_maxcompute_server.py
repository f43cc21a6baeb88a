"""Unmodified pyodps against the server: its own readers, both ways, and the errors that it is told."""

from __future__ import annotations

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("odps")

from maxcompute import MaxComputeServer, Rows
from maxcompute.framing import crc
from odps import ODPS
from odps.accounts import StsAccount
from odps.config import option_context
from odps.errors import BaseODPSError
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
    """Records are what benchmarks compare with."""
    server.add_table("t", {"a": "bigint", "b": "string", "c": "double"}, {"a": [1], "b": ["x"], "c": [0.5]})
    opened = session(server)
    assert opened.open_arrow_reader(0, 1, columns=["c", "a"]).read().to_pylist() == [{"c": 0.5, "a": 1}]
    assert [list(record) for record in opened.open_record_reader(0, 1, columns=["c", "a"])] == [
        [("c", 0.5), ("a", 1)]
    ]


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
