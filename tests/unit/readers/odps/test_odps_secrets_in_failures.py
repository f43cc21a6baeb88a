"""Whatever fails, and whatever the service says about it: nothing that is shown has the key or the token."""

from __future__ import annotations

import logging
import pickle
import traceback

import numpy as np
import pytest
from maxcompute import Corrupt, Cut, Fail, MaxComputeServer, Refuse, Rows

from edl_torch.cli.main import main
from edl_torch.errors import EdlError, InvalidArgument, ReaderError, SourceChanged
from edl_torch.readers.odps.client import Retries
from edl_torch.readers.odps.reader import ODPSDataReader, ODPSReader

KEY = "marker-of-the-secret-key/+="
TOKEN = "marker-of-the-token/+="
MARKER = "marker-of-the"
SAID = f"signed with {KEY} and {TOKEN}"
OPERATIONS = ("table", "tunnel", "session", "partitions", "data")
ANSWERS = (
    Fail(400, "InvalidArgument", SAID),
    Fail(401, "ODPS-0410042", SAID),
    Fail(403, "NoPermission", SAID),
    Fail(404, "NoSuchDownload", SAID),
    Fail(412, "TableModified", SAID),
    Fail(429, "FlowExceeded", SAID),
    Fail(500, "InternalServerError", SAID),
    Fail(502, "", SAID, html=True),
    Fail(200, "", SAID, html=True),  # as a proxy that wants a login answers
    Refuse(),
)
STREAMS = (
    Cut(after=50),
    Cut(after=50, clean=True),
    Corrupt(20),
    Rows(0),
)
CASES = [
    *((operation, fault) for operation in OPERATIONS for fault in ANSWERS),
    *(("data", fault) for fault in STREAMS),
]


@pytest.fixture
def server(monkeypatch):
    """Two partitions. The keys are in no variable: readers get them as arguments."""
    with MaxComputeServer(access_key=KEY, sts_token=TOKEN) as running:
        for name in ("ODPS_ACCESS_ID", "ODPS_ACCESS_KEY", "ODPS_STS_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("ODPS_PROJECT", running.project)
        monkeypatch.setenv("ODPS_ENDPOINT", running.endpoint)
        parts = {"ds=1": {"i": list(range(100))}, "ds=2": {"i": []}}
        running.add_table("t", {"i": "bigint"}, partition_keys={"ds": "string"}, partitions=parts)
        yield running


def keys(server):
    return {"access_id": server.access_id, "access_key": KEY, "sts_token": TOKEN}


def make(server, **options):
    return ODPSDataReader("t", **keys(server), retries=Retries(1, first_s=0.0), **options)


def read_all(reader):
    reader.create_shards()
    return reader.read_batch("demo.t/ds=1", np.arange(100))


def shown(error):
    """All that a traceback, a log or a worker's message may show of an error, and its chain."""
    yield from traceback.format_exception(error)
    while error is not None:
        yield from (str(error), repr(error), repr(error.args))
        error = error.__cause__ or error.__context__


def pickled(error):
    """What pickles of an error may have. pyodps installs picklers of errors that take causes along."""
    while error is not None:
        try:
            yield pickle.dumps((type(error).__name__, error.args, vars(error)))
        except (TypeError, AttributeError, pickle.PicklingError):
            yield repr(vars(error)).encode()
        error = error.__cause__ or error.__context__


def assert_clean(*texts):
    for text in texts:
        assert MARKER not in text, text


@pytest.mark.parametrize(("operation", "fault"), CASES)
def test_no_failure_shows_them(server, operation, fault, caplog, capfd):
    server.faults.always(operation, fault)
    reader = make(server)
    with (
        caplog.at_level(logging.INFO),
        caplog.at_level(logging.DEBUG, "edl_torch"),
        pytest.raises(EdlError) as caught,
    ):
        read_all(reader)
    printed = capfd.readouterr()
    assert_clean(
        *shown(caught.value), repr(reader), repr(vars(reader.table)), caplog.text, printed.out, printed.err
    )
    for data in (pickle.dumps(reader), pickle.dumps(caught.value), *pickled(caught.value)):
        assert MARKER.encode() not in data
    if getattr(fault, "message", "") == SAID and not fault.html:
        assert "signed with <secret> and <secret>" in str(caught.value)


@pytest.mark.parametrize("status", [429, 500])
def test_no_failure_on_the_way_to_a_new_session_shows_them(server, status):
    reader = make(server)
    reader.create_shards()
    server.sessions.expire()
    server.faults.always("session", Fail(status, "FlowExceeded", SAID))
    with pytest.raises(ReaderError) as caught:
        reader.read_batch("demo.t/ds=1", np.arange(100))
    assert_clean(*shown(caught.value))


@pytest.mark.parametrize(("fault", "error"), [(Fail(412, "TableModified", SAID), SourceChanged)])
def test_no_failure_in_a_child_process_shows_them(server, fault, error):
    old = ODPSReader(None, server.access_id, KEY, None, "t", options={"sts_token": TOKEN, "retries": 0})
    server.faults.always("data", fault)
    with pytest.raises(error) as caught:
        list(old.to_iterator(1, 0, 10, num_processes=1))
    assert_clean(*shown(caught.value), repr(old))


@pytest.mark.parametrize("command", ["check", "convert", "master"])
@pytest.mark.parametrize("operation", ["table", "session", "data"])
def test_no_command_shows_them(server, command, operation, monkeypatch, tmp_path, capfd):
    """With keys in the environment, as a command has them."""
    for name, value in {**keys(server), "project": server.project}.items():
        monkeypatch.setenv(f"ODPS_{name.upper()}", value)
    server.faults.always(operation, Fail(403, "NoPermission", SAID))
    options = {
        "check": ["odps://demo/tables/t", "--workers=0", "--sample", str(tmp_path / "sheet.png"), "--json"],
        "convert": ["odps://demo/tables/t", str(tmp_path / "out.recordio")],
        "master": ["--training_data=odps://demo/tables/t", f"--state={tmp_path}/state", "--addr=127.0.0.1:x"],
    }
    assert main([command, *options[command]]) != 0
    printed = capfd.readouterr()
    assert_clean(printed.out, printed.err)
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or MARKER.encode() not in path.read_bytes()
    assert "Traceback" not in printed.err


def test_the_page_of_a_proxy_is_told_as_what_it_is(server):
    for operation in OPERATIONS[:3]:
        server.faults.always(operation, Fail(200, "", "please log in", html=True))
        with pytest.raises(ReaderError, match=r"not one of MaxCompute .*is there a proxy") as caught:
            make(server).create_shards()
        assert "please log in" not in str(caught.value)
        server.faults.always(operation, None)


def test_what_is_not_secret_stays_in_the_chain(server):
    server.faults.always("data", Fail(403, "NoPermission", "no privilege"))
    with pytest.raises(ReaderError) as caught:
        make(server).read_batch("demo.t/ds=1", np.arange(100))
    assert type(caught.value.__cause__).__name__ == "NoPermission"


@pytest.mark.parametrize(
    "address",
    [
        "odps://p/tables/t?accessKey={}",
        "odps://p/tables/t/ds=1?access_id=x&access_key={}",
        "odps://p/tables/t/?token={},ds=1",
        "odps://id:{}@p/tables/t",
    ],
)
def test_an_address_with_keys_is_refused_without_repeating_it(address):
    with pytest.raises(InvalidArgument, match="holds no keys") as caught:
        ODPSDataReader(address.format(KEY), endpoint="http://127.0.0.1:1/api")
    assert_clean(*shown(caught.value))
