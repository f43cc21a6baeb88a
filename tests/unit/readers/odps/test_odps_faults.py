"""What goes wrong between a reader and the service: rows are whole, or there is an error that says why."""

from __future__ import annotations

import logging
import os
import sys
from functools import partial

import numpy as np
import pytest
from maxcompute import Corrupt, Cut, Fail, Hold, Refuse, Rows
from maxcompute.framing import arrow_body
from odps.tunnel.checksum import Checksum

from edl_torch.errors import ReaderError, SourceChanged
from edl_torch.readers.odps.client import Crc32c, Retries
from edl_torch.readers.odps.reader import ODPSDataReader

NAME = "demo.numbers"
BUSY = Fail(503, "ServiceUnavailable", "busy")
FULL = Fail(429, "FlowExceeded", "Your flow quota is exceeded")


def rows(reader, start=0, end=1000, name=NAME):
    return reader.read_batch(name, np.arange(start, end))["i"].tolist()


@pytest.fixture
def warm(quick):
    """A reader that has its session, so that the next request is one for rows."""

    def make(**options):
        reader = quick(**options)
        reader.create_shards()
        return reader

    return make


def body_size(server, count):
    return len(arrow_body(server.tables["numbers"].parts[""].rows.slice(0, count), server.batch_rows))


class BreaksAtTheEnd:
    """A client whose first stream breaks after its last row."""

    def __init__(self, client):
        self.client = client

    def read(self, *arguments):
        self.client.read(*arguments)
        raise ConnectionResetError("reset by peer")

    def __getattr__(self, name):
        return getattr(self.client, name)


@pytest.mark.parametrize(
    ("fault", "step"),
    [(Cut, 37), (partial(Cut, clean=True), 41), (Corrupt, 43)],
    ids=["cut", "cut in peace", "turned over"],
)
def test_a_stream_with_a_fault_at_any_byte_is_never_taken_for_whole(server, warm, fault, step):
    server.batch_rows = 8
    size, reader = body_size(server, 24), warm(columns=None, block_rows=24)
    for at in range(0, size, step):
        server.faults.plan("data", fault(at))
        fresh = reader.table.fetch("", 0, 24)
        assert fresh["i"].to_pylist() == list(range(24)), at
        assert fresh["s"].to_pylist() == [f"row {row}" for row in range(24)], at
    assert reader.retries >= size // step


def test_a_stream_that_does_not_end_well_is_not_complete_even_with_all_its_rows(server, warm):
    reader = warm()
    reader.table._client = BreaksAtTheEnd(reader.table._client)
    assert rows(reader) == list(range(1000))
    asked = [params["rowrange"] for name, params in server.asked if name == "data"]
    assert asked == ["(0,1000)", "(950,50)"]  # the last message is read again
    server.faults.plan("data", Cut(after=body_size(server, 1000)))
    assert reader.table.fetch("", 0, 1000)["i"].to_pylist() == list(range(1000))
    assert reader.retries == 2


def test_without_google_crc32c_pyodps_checks(server, warm, monkeypatch):
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    reader = warm()
    server.faults.plan("data", Corrupt(1000))
    assert rows(reader) == list(range(1000))
    assert reader.retries == 1


def test_checksums_are_googles_and_the_same_as_pyodps(server, warm, monkeypatch):
    google_crc32c = pytest.importorskip("google_crc32c")
    sizes, extend = [], google_crc32c.extend

    def counting(value, data):
        sizes.append(len(data))
        return extend(value, data)

    monkeypatch.setattr(google_crc32c, "extend", counting)
    assert rows(warm()) == list(range(1000))
    assert sum(sizes) > 2 * 8 * 1000, "each byte counts for its chunk and for the stream"
    ours, theirs = Crc32c(), Checksum()
    for data in (b"", b"abc", bytes(range(256))):
        ours.update(data)
        theirs.update(data)
        assert ours.getvalue() == theirs.getvalue()
    ours.reset()
    assert ours.getvalue() == 0


def test_a_cut_that_no_checksum_sees_is_seen_by_the_count(server, warm):
    reader = warm()
    server.faults.plan("data", Rows(0), Rows(350), Rows(400))
    assert rows(reader) == list(range(1000))
    asked = [params["rowrange"] for name, params in server.asked if name == "data"]
    assert asked == ["(0,1000)", "(0,1000)", "(350,650)", "(750,250)"]
    assert reader.retries == 3


def test_more_rows_than_were_asked_for_are_not_delivered(server, warm):
    reader = warm()
    server.faults.plan("data", Rows(150))
    assert reader.table.fetch("", 0, 100)["i"].to_pylist() == list(range(100))
    assert reader.retries == 1


def test_what_was_received_is_kept_and_progress_renews_patience(server, warm, pauses):
    reader = warm(limit=1)
    server.faults.plan("data", *(Rows(100) for _ in range(9)))
    assert rows(reader) == list(range(1000))
    assert reader.retries == len(pauses) == 9


def test_short_streams_without_end_are_an_error(server, warm):
    server.faults.always("data", Rows(0))
    with pytest.raises(
        ReaderError, match=r"rows 0 to 1000 of demo.numbers failed after 3 retries: ShortStream"
    ):
        rows(warm(limit=3))
    assert server.requests["data"] == 4


@pytest.mark.parametrize("operation", ["table", "tunnel", "session"])
@pytest.mark.parametrize("fault", [BUSY, Fail(500, "InternalServerError", "x"), FULL, Refuse()], ids=str)
def test_planning_survives_what_passes(server, quick, operation, fault):
    server.faults.plan(operation, fault, fault)
    reader = quick()
    assert reader.create_shards() == {NAME: 1000}
    assert reader.retries == 2


@pytest.mark.parametrize(
    "fault",
    [
        BUSY,
        Fail(502, "", "bad gateway", html=True),
        Fail(408, "RequestTimeOut", "late"),
        Fail(308, "SlotReassignment", "elsewhere"),
        FULL,
        Fail(400, "DataUnderReplication", "try again later"),
        Refuse(),
        Cut(after=100),
        Cut(after=100, clean=True),
        Cut(after=3),
    ],
    ids=str,
)
def test_reading_survives_what_passes(server, warm, fault):
    reader = warm()
    server.faults.plan("data", fault, fault)
    assert rows(reader) == list(range(1000))
    assert reader.retries == 2


def test_a_full_quota_gets_more_patience_but_not_for_ever(server, warm, pauses):
    server.faults.always("data", FULL)
    with pytest.raises(ReaderError, match=r"failed after 8 retries.*flow quota"):
        rows(warm(limit=2))
    assert len(pauses) == 8


def test_a_service_that_is_away_fails_once_and_is_not_waited_for_again(server, warm, pauses):
    server.faults.always("data", BUSY)
    reader = warm(limit=3)
    for _ in range(3):
        with pytest.raises(ReaderError):
            rows(reader)
    assert len(pauses) == 3
    server.faults.always("data", None)
    assert rows(reader) == list(range(1000))
    server.faults.plan("data", BUSY)
    assert reader.table.fetch("", 0, 5).num_rows == 5  # and has its patience back


def test_retries_are_logged_with_what_and_why(server, warm, caplog):
    server.faults.plan("data", BUSY)
    with caplog.at_level(logging.WARNING, "edl_torch"):
        rows(warm())
    assert "reading rows 0 to 1000 of demo.numbers: retry 1 of 8" in caplog.text
    assert "busy" in caplog.text


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fail(403, "NoPermission", "you have no privilege"), "no privilege"),
        (Fail(400, "InvalidArgument", "bad"), "bad"),
        (Fail(401, "Unauthorized", "who are you"), "who are you"),
    ],
)
def test_what_does_not_pass_is_not_tried_again(server, warm, fault, message):
    server.faults.always("data", fault)
    with pytest.raises(ReaderError, match=f"rows 0 to 1000 of demo.numbers failed: .*{message}"):
        rows(warm())
    assert server.requests["data"] == 1


def test_a_wrong_key_is_told_at_once(server, quick, pauses):
    with pytest.raises(ReaderError, match="signature does not match") as caught:
        quick(access_id=server.access_id, access_key="not-the-key").create_shards()
    assert "not-the-key" not in str(caught.value)
    assert not pauses


def test_a_table_written_to_meanwhile_is_an_error_that_names_it(server, warm):
    reader = warm()
    server.tables["numbers"].touch()
    with pytest.raises(SourceChanged, match=r"the table demo.numbers was written to since.*TableModified"):
        rows(reader)
    assert reader.retries == 0


def test_a_partition_written_to_meanwhile_is_named_and_the_others_are_read(server, quick):
    parts = {"ds=1": {"i": [1]}, "ds=2": {"i": [2]}}
    table = server.add_table("days", {"i": "bigint"}, partition_keys={"ds": "string"}, partitions=parts)
    reader = quick("days")
    reader.create_shards()
    table.touch("ds=2")
    assert rows(reader, 0, 1, "demo.days/ds=1") == [1]
    with pytest.raises(SourceChanged, match=r"demo.days/ds=2 was written"):
        rows(reader, 0, 1, "demo.days/ds=2")


@pytest.mark.parametrize("end", ["expire", "forget"])
def test_a_session_of_yesterday_is_renewed(server, warm, end):
    reader = warm()
    rows(reader, 0, 10)
    getattr(server.sessions, end)()
    assert reader.table.fetch("", 0, 1000)["i"].to_pylist() == list(range(1000))
    assert server.requests["session"] == 2


@pytest.mark.parametrize("end", ["expire", "forget"])
def test_a_session_of_yesterday_is_not_renewed_over_other_rows(server, warm, end):
    reader = warm()
    server.tables["numbers"].touch()  # as many rows: only the time tells
    getattr(server.sessions, end)()
    with pytest.raises(SourceChanged, match=r"demo.numbers was written to since.*last changed at"):
        rows(reader)


def test_a_session_carried_over_finds_out_too(server, warm):
    reader = warm()
    server.sessions.expire()
    copy = warm()
    copy.table.__setstate__(reader.table.__getstate__())
    assert copy.table.fetch("", 0, 1000).num_rows == 1000
    assert server.requests["session"] == 3  # the first, the copy's own, the new one


def test_a_silent_stream_is_given_up_and_read_again(server, quick):
    reader = quick(timeout_s=0.2, limit=100)  # on a busy machine other answers may be late as well
    reader.create_shards()
    hold = Hold(after=2000)
    server.faults.plan("data", hold)
    assert rows(reader) == list(range(1000))
    assert reader.retries >= 1
    assert hold.reached.is_set()
    assert not hold.go.is_set()


def test_a_dead_tunnel_address_is_asked_for_anew(server, warm):
    reader = warm()
    assert server.requests["tunnel"] == 1
    server.faults.plan("data", Refuse())
    assert rows(reader) == list(range(1000))
    assert server.requests["tunnel"] == 2


@pytest.mark.timeout(30)
def test_the_retries_of_pyodps_are_off(server):
    """Its own would sleep for two minutes; ours are the only ones."""
    table = ODPSDataReader("numbers", retries=Retries(1, first_s=0.01)).table
    for operation in ("session", "data"):
        server.faults.always(operation, BUSY)
        with pytest.raises(ReaderError, match=r"demo.numbers failed after 1 retries"):
            table.fetch("", 0, 10)
        assert server.requests[operation] == 2
        server.faults.always(operation, None)
        assert table.fetch("", 0, 10).num_rows == 10
        server.asked.clear()


def test_the_process_keeps_no_client_of_another(server, warm):
    reader = warm()
    rows(reader, 0, 5)
    inherited = reader.table._client
    pid = os.fork()
    if pid == 0:
        ok = rows(reader, 5, 10) == [5, 6, 7, 8, 9] and reader.table._client is not inherited
        os._exit(0 if ok else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert reader.table._client is inherited


class WrittenMeanwhile:
    """A client before whose new session the table is written to, between two of our requests."""

    def __init__(self, client, table):
        self.client, self.table = client, table

    def download(self, partition, download_id=None):
        if download_id is None:
            self.table.touch()
        return self.client.download(partition, download_id)

    def __getattr__(self, name):
        return getattr(self.client, name)


def test_a_session_is_not_renewed_over_rows_written_while_it_was_made(server, warm):
    reader = warm()
    rows(reader, 0, 10)
    server.sessions.expire()
    reader.table._client = WrittenMeanwhile(reader.table._client, server.tables["numbers"])
    with pytest.raises(SourceChanged, match=r"demo.numbers was written to since.*last changed at"):
        reader.table.fetch("", 0, 1000)
