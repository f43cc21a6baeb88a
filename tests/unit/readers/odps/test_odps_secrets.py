"""Nobody sees the access key or the token: in texts, errors, pickles, journal, status; whatever fails."""

from __future__ import annotations

import copy
import io
import logging
import multiprocessing
import pickle
import traceback
from multiprocessing import reduction
from multiprocessing.context import set_spawning_popen

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


@pytest.fixture
def server(monkeypatch):
    """A table, and one of partitions. The keys are in no variable: readers get them as arguments."""
    with MaxComputeServer(access_key=KEY, sts_token=TOKEN) as running:
        for name in ("ODPS_ACCESS_ID", "ODPS_ACCESS_KEY", "ODPS_STS_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("ODPS_PROJECT", running.project)
        monkeypatch.setenv("ODPS_ENDPOINT", running.endpoint)
        running.add_table("t", {"i": "bigint"}, {"i": list(range(100))})
        parts = {"ds=1": {"i": list(range(100))}, "ds=2": {"i": []}}
        running.add_table("p", {"i": "bigint"}, partition_keys={"ds": "string"}, partitions=parts)
        yield running


def keys(server):
    return {"access_id": server.access_id, "access_key": KEY, "sts_token": TOKEN}


@pytest.fixture
def in_environment(server, monkeypatch):
    for name, value in keys(server).items():
        monkeypatch.setenv(f"ODPS_{name.upper()}", value)


@pytest.fixture
def reader(server):
    return ODPSDataReader("t", **keys(server), retries=Retries(2, first_s=0.001))


def assert_clean(*texts):
    for text in texts:
        assert MARKER not in text, text


def texts(thing):
    yield from (repr(thing), str(thing), f"{thing}", format(thing))
    for value in getattr(thing, "__dict__", {}).values():
        yield repr(value)
        yield str(vars(value)) if hasattr(value, "__dict__") else str(value)


def test_no_text_of_a_reader_shows_them(reader, server):
    reader.create_shards()
    reader.read_record("demo.t", 3)
    old = ODPSReader(None, server.access_id, KEY, None, "t", options={"sts_token": TOKEN})
    for thing in (reader, reader.table, reader.table.config, reader.table.config.credentials(), old):
        for text in texts(thing):
            assert_clean(text)


def test_a_stored_pickle_has_no_keys_and_says_so_when_used(reader):
    reader.create_shards()
    reader.read_record("demo.t", 0)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        data = pickle.dumps(reader, protocol)
        assert MARKER.encode() not in data
    copied = pickle.loads(data)
    assert copied.create_shards() == {"demo.t": 100}
    with pytest.raises(
        InvalidArgument, match=r"no access key for MaxCompute.*ODPS_ACCESS_ID and ODPS_ACCESS_KEY"
    ):
        copied.read_record("demo.t", 0)


@pytest.mark.usefixtures("in_environment")
def test_keys_of_the_environment_are_found_there_and_not_kept(reader):
    own = ODPSDataReader("t")
    for each in (own, pickle.loads(pickle.dumps(reader))):
        assert each.read_record("demo.t", 7) == {"i": 7}
    assert own.table.config.access_key.reveal() is None


def test_a_key_stays_with_its_id(server, monkeypatch):
    monkeypatch.setenv("ODPS_ACCESS_ID", "somebody-else")
    monkeypatch.setenv("ODPS_ACCESS_KEY", "another-key")
    monkeypatch.setenv("MAXCOMPUTE_AK", server.access_id)
    monkeypatch.setenv("MAXCOMPUTE_SK", KEY)
    found = ODPSDataReader("t", access_id=server.access_id).table.config.credentials()
    assert found.access_key.reveal() == KEY
    assert ODPSDataReader("t").table.config.credentials().access_id == "somebody-else"


def test_a_copy_in_memory_keeps_them(reader):
    assert copy.deepcopy(reader).read_record("demo.t", 1) == {"i": 1}
    assert copy.copy(reader.table.config).access_key.reveal() == KEY


def test_only_a_pickle_for_a_child_has_them(reader):
    sink = io.BytesIO()
    set_spawning_popen(object())
    try:
        reduction.dump(reader, sink)
    finally:
        set_spawning_popen(None)
    assert KEY.encode() in sink.getvalue()


def read_one(reader, pipe):
    pipe.send((reader.read_record("demo.t", 5), repr(reader)))


@pytest.mark.parametrize("method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.long)])
def test_children_of_every_start_method_have_them(reader, method):
    reader.create_shards()
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    child = context.Process(target=read_one, args=(reader, theirs))
    child.start()
    theirs.close()
    assert ours.poll(60)
    record, shown = ours.recv()
    child.join(60)
    assert record == {"i": 5}
    assert_clean(shown)


def test_no_log_has_them_even_at_debug(reader, server, caplog):
    with caplog.at_level(logging.DEBUG):
        reader.create_shards()
        server.faults.plan("data", Fail(), Fail(429, "FlowExceeded", "slow down"))
        reader.read_batch("demo.t", np.arange(10))
    assert "retry 2" in caplog.text
    assert "headers before signing" in caplog.text  # pyodps talks
    assert_clean(caplog.text)


def test_no_trace_of_an_error_has_them(server):
    wrong = ODPSDataReader("t", access_id=server.access_id, access_key="wrong-secret-key", sts_token=TOKEN)
    with pytest.raises(ReaderError) as caught:
        wrong.create_shards()
    text = "".join(traceback.format_exception(caught.value))
    assert "wrong-secret-key" not in text
    assert_clean(text)


def test_half_a_pair_is_refused_without_repeating_it():
    with pytest.raises(InvalidArgument) as caught:
        ODPSDataReader("t", access_key=KEY, project="p", endpoint="http://127.0.0.1:1")
    assert_clean(str(caught.value))


# Whatever fails ---------------------------------------------------------------------------------------------


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


def make(server, **options):
    return ODPSDataReader("p", **keys(server), retries=Retries(1, first_s=0.0), **options)


def read_all(reader):
    reader.create_shards()
    return reader.read_batch("demo.p/ds=1", np.arange(100))


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
        reader.read_batch("demo.p/ds=1", np.arange(100))
    assert_clean(*shown(caught.value))


def test_no_failure_in_a_thread_shows_them(server):
    old = ODPSReader(None, server.access_id, KEY, None, "p", options={"sts_token": TOKEN, "retries": 0})
    server.faults.always("data", Fail(412, "TableModified", SAID))
    with pytest.raises(SourceChanged) as caught:
        list(old.to_iterator(1, 0, 10, num_processes=1))
    assert_clean(*shown(caught.value), repr(old))


@pytest.mark.parametrize("command", ["check", "convert", "master"])
@pytest.mark.parametrize("operation", ["table", "session", "data"])
@pytest.mark.usefixtures("in_environment")
def test_no_command_shows_them(server, command, operation, tmp_path, capfd):
    server.faults.always(operation, Fail(403, "NoPermission", SAID))
    options = {
        "check": ["odps://demo/tables/p", "--workers=0", "--sample", str(tmp_path / "sheet.png"), "--json"],
        "convert": ["odps://demo/tables/p", str(tmp_path / "out.recordio")],
        "master": ["--training_data=odps://demo/tables/p", f"--state={tmp_path}/state", "--addr=127.0.0.1:x"],
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
        make(server).read_batch("demo.p/ds=1", np.arange(100))
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
