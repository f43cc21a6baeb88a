"""Hostile calls, drawn by Hypothesis, against a master in which an honest trainer works."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import subprocess
import sys
from pathlib import Path

import grpc
import hostile
import pytest
from audited_master import Seeded
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edl_torch.core import persistence
from edl_torch.core.calls import (
    NEW_PASS,
    Acknowledgement,
    Failure,
    Fence,
    GiveBack,
    LeaseCall,
    PassState,
    RegisterCall,
    Registration,
    ReportCall,
)
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.core.token import Token
from edl_torch.errors import EdlError, InvalidArgument, TokenError, TooManyBadRecords
from edl_torch.rpc import edl_torch_pb2 as pb
from edl_torch.shard import Source

QUICK = settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


class Drawn:
    """Choices of Hypothesis."""

    def __init__(self, data):
        self._data = data

    def below(self, stop):
        return self._data.draw(st.integers(0, stop - 1))

    def raw(self):
        return self._data.draw(st.binary(max_size=40))


@QUICK
@given(data=st.data(), moves=st.integers(1, 25))
def test_books_of_an_honest_trainer_stay_exact(data, moves):
    asyncio.run(hostile.attack(Drawn(data), moves))


def test_books_stay_exact_for_forty_seeds():
    """Hypothesis draws small numbers; these are even."""
    for seed in range(40):
        print("seed", seed)
        asyncio.run(hostile.attack(Seeded(seed), 25))


@pytest.fixture(scope="module")
def exposed():
    """A real server, with an honest trainer's dataset in it."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "door"))
    from door_kit import MasterThread, lease, register

    master = MasterThread()
    client = master.client()
    client.call(register("honest", worker_id="w"))
    client.call(lease(1, "honest"))
    with grpc.insecure_channel(master.address) as channel:
        yield master, channel
    master.close()


@QUICK
@given(method=st.sampled_from(sorted(hostile.METHODS)), raw=st.binary(max_size=200))
def test_random_bytes_over_the_wire_are_refused_or_mean_nothing(exposed, method, raw):
    master, channel = exposed
    before = master.digest
    call = channel.unary_stream(f"/edl_torch.v1.Master/{method}")(raw, timeout=10)
    try:
        next(call)
    except grpc.RpcError as error:
        assert "edl-error" in dict(error.trailing_metadata()), error  # noqa: PT017  a refusal, not a failure
    call.cancel()
    assert method in ("Attend", "Status") or master.digest == before


@QUICK
@given(data=st.data())
def test_damaged_token_is_refused_as_one_or_is_a_position(data):
    dispatcher = begun()
    token = json.loads(dispatcher.token("d"))
    for _ in range(data.draw(st.integers(1, 3))):
        token = hostile.damaged(token, Drawn(data))
    text = json.dumps(token)
    before = persistence.dump(dispatcher)
    try:
        dispatcher.go_back("d", text)
    except EdlError:
        assert persistence.dump(dispatcher) == before
    else:
        goes_on(dispatcher)


@QUICK
@given(
    text=st.one_of(st.text(), st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps))
)
def test_any_text_is_a_token_or_a_token_error(text):
    with pytest.raises(TokenError):
        Token.decode(text)


@QUICK
@given(data=st.data())
def test_damaged_rows_of_a_journal_are_refused_or_make_a_dispatcher(data):
    """What `DurableState` takes for damage, and nothing else."""
    rows = [[list(key), row] for key, row in persistence.dump(begun()).items()]
    for _ in range(data.draw(st.integers(1, 3))):
        rows = hostile.damaged(json.loads(json.dumps(rows)), Drawn(data))
    hostile_rows = as_rows(rows)
    with contextlib.suppress(LookupError, TypeError, ValueError, EdlError):
        persistence.load(hostile_rows, ledger_id="x", now=0.0)


def as_rows(rows):
    """As `Journal.read` makes them; what it could not is no row."""
    made = {}
    for item in rows if isinstance(rows, list) else []:
        try:
            (key, row) = item
            made[tuple(key)] = tuple(row)
        except (TypeError, ValueError):
            continue
    return made


def fenced(dispatcher, session, lineage=1):
    number = dispatcher.members.get(session).number
    return {"session": session, "dataset": "d", "fence": Fence(ledger="x", lineage=lineage, member=number)}


def begun():
    """A dispatcher with everything in it that a token or a row can speak of."""
    dispatcher = Dispatcher(ledger_id="x")
    registration = Registration(
        name="d", sources=(Source(name="a", count=30),), records_per_shard=6, max_bad_records=9, num_epochs=3
    )
    for session in ("s", "t"):
        dispatcher.register(
            RegisterCall(session=session, worker_id="w", batch_size=6, registration=registration), 0.0
        )
        call = LeaseCall(**fenced(dispatcher, session), request=1, epoch=NEW_PASS, count=2)
        grants = dispatcher.lease(call, 0.0).grants
        first, second = (grant.task for grant in grants)
        dispatcher.report(
            ReportCall(
                **fenced(dispatcher, session),
                request=1,
                failures=(Failure(task=first, attempt=1, position=1, reason="bad"),),
                give_backs=(
                    GiveBack(task=first, attempt=1, start=5, remainder=True),
                    GiveBack(task=second, attempt=1, start=3),
                ),
            ),
            0.0,
        )
    return dispatcher


def goes_on(dispatcher):
    """From a token that was taken a trainer comes to the end, and can save and restore on its way."""
    again = dispatcher.token("d")
    lineage = dispatcher.go_back("d", again)
    assert dispatcher.token("d") == again
    for request in range(1, 100):
        call = LeaseCall(
            **fenced(dispatcher, "t", lineage), request=request, epoch=NEW_PASS, count=9, drained=True
        )
        try:
            answer = dispatcher.lease(call, 0.0)
        except TooManyBadRecords:
            return
        done = [Acknowledgement(task=g.task, attempt=g.attempt, upto=g.slice.stop) for g in answer.grants]
        report = ReportCall(**fenced(dispatcher, "t", lineage), request=request, acknowledgements=tuple(done))
        dispatcher.report(report, 0.0)
        Token.decode(dispatcher.token("d"))
        status = dispatcher.dataset_status("d")
        if answer.state is PassState.FINISHED:
            assert status.acknowledged + status.quarantined + status.dropped == 3 * 30
            return
    raise AssertionError(f"it never ends: {status}")


CRASHES = {  # what `fuzz.py state` has found, as base64
    "a token with counts at the end of all numbers was taken": "oy41NTU1NTWz1NTU1NTU1F1B1NX/urq6urqC",
    "a batch size in a journal that is no float": "bGwz/////wgyJf8IJc2bj2yyYGxsXA==",
}


@pytest.mark.parametrize("found", CRASHES.values(), ids=[name.replace(" ", "_") for name in CRASHES])
def test_what_the_fuzzer_has_found_stays_mended(found):
    pytest.importorskip("atheris", reason="make fuzz installs atheris")
    import fuzz

    fuzz.decode(base64.b64decode(found))


@pytest.mark.parametrize(
    ("count", "value"), [("acknowledged", 2**62), ("dropped", 2**62 - 1), ("dropped", 1)]
)
def test_a_token_with_more_outcomes_than_records_is_refused(count, value):
    dispatcher = begun()
    token = json.loads(dispatcher.token("d")) | {count: value}
    before = persistence.dump(dispatcher)
    with pytest.raises(TokenError, match="records lie before the cursor"):
        dispatcher.go_back("d", json.dumps(token))
    assert persistence.dump(dispatcher) == before


@pytest.mark.parametrize("batch_size", [0, -1, 2**62 + 1, 10**400])
def test_a_batch_size_that_no_dataset_could_fill_is_refused(batch_size):
    rows = persistence.dump(begun()) | {("member", "d", "s"): (batch_size,)}
    with pytest.raises(InvalidArgument, match="batch_size must be 1 or more, and"):
        persistence.load(rows, ledger_id="x", now=0.0)
    call = RegisterCall(
        session="u", worker_id="w", batch_size=batch_size, registration=Registration(name="d")
    )
    with pytest.raises(InvalidArgument, match="batch_size must be 1 or more, and"):
        begun().call(call, 0.0)


def test_nothing_of_a_request_is_evaluated_unpickled_or_used_as_a_path(tmp_path):
    """A master with a journal, in a process that writes down what it opens, imports, compiles and starts."""
    script = Path(__file__).with_name("audited_master.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "state")], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stderr.splitlines())) < 6000  # one line a call, whatever it says
    told = json.loads(done.stdout)
    assert told["calls"] > 500
    assert told["probe"] == ["open"], "the audit hook must see what it is there for"
    assert told["events"] == []


def test_the_fuzz_targets_run(tmp_path):
    """A moment of each where atheris is installed; `make fuzz` runs them for as long as you like."""
    pytest.importorskip("atheris", reason="make fuzz installs atheris")
    for target in ("calls", "state"):
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("fuzz.py")), target, "-runs=40", "-seed=1"],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr[-2000:]


def test_every_method_is_attacked():
    assert sorted(hostile.METHODS) == sorted(
        m.name for s in pb.DESCRIPTOR.services_by_name.values() for m in s.methods
    )
