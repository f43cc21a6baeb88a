"""Each limit at its edge: exactly as much passes, one more is refused by name and changes nothing."""

from __future__ import annotations

import dataclasses
import json

import grpc
import pytest
from door_kit import FIRST, MasterThread, digest, lease, register, report
from fences import Onlooker

from edl_torch.core.calls import NEW_PASS, Acknowledgement, ConfirmCall, Failure, RestoreCall
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.core.limits import MESSAGE_BYTES, Limits
from edl_torch.core.persistence import dump
from edl_torch.core.token import Token
from edl_torch.elasticdl import wire
from edl_torch.elasticdl.wire import TaskResult
from edl_torch.errors import InvalidArgument, LimitExceeded, TokenError
from edl_torch.rpc import edl_torch_pb2 as pb
from edl_torch.shard import Source

SMALL = Limits(
    datasets=2,
    sessions=2,
    sources=3,
    name_bytes=8,
    source_name_bytes=6,
    leases_per_call=3,
    entries_per_call=4,
    token_slices=4,
    quarantine=2,
    reason_chars=5,
)
BAD = [0, 0, 0, "", 0, "a rea…"]  # of a record in quarantine, as tokens have it
BAD_BYTES = len('[0,0,0,"",0,"a rea\\u2026"],')


def limited():
    return Dispatcher(ledger_id=FIRST.ledger, limits=SMALL)


def unchanged(dispatcher, call, match):
    """The call is refused, and the state is what it was."""
    before = digest(dispatcher)
    with pytest.raises(LimitExceeded, match=match):
        call()
    assert digest(dispatcher) == before


# In the core ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "most", "what"),
    [
        ("session", "é" * 4, "bytes of session"),
        ("worker_id", "w" * 8, "bytes of worker_id"),
        ("name", "n" * 8, "bytes of dataset"),
    ],
)
def test_names(field, most, what):
    dispatcher = limited()
    unchanged(
        dispatcher,
        lambda: dispatcher.register(register(**{field: most + "x"}), 0.0),
        f"9 {what}: .* 8 at most",
    )
    dispatcher.register(register(**{field: most}), 0.0)


def test_names_of_sources():
    dispatcher = limited()
    long = (Source(name="", count=1), Source(name="s" * 7, count=1))
    unchanged(
        dispatcher, lambda: dispatcher.register(register(sources=long), 0.0), "7 bytes of a source's name"
    )
    dispatcher.register(register(sources=(Source(name="s" * 6, count=1),)), 0.0)


def test_sources():
    dispatcher = limited()
    many = tuple(Source(name=str(number), count=1) for number in range(4))
    unchanged(dispatcher, lambda: dispatcher.register(register(sources=many), 0.0), "4 sources of a dataset")
    dispatcher.register(register(sources=many[:3]), 0.0)


def test_datasets():
    dispatcher = limited()
    dispatcher.register(register(name="a"), 0.0)
    dispatcher.register(register(name="b"), 0.0)
    unchanged(dispatcher, lambda: dispatcher.register(register(name="c"), 0.0), "3 datasets")
    dispatcher.register(register(name="b"), 0.0)


def test_trainers():
    dispatcher = limited()
    dispatcher.register(register("a"), 0.0)
    dispatcher.register(register("b"), 0.0)
    unchanged(dispatcher, lambda: dispatcher.register(register("c"), 0.0), "3 trainers")
    dispatcher.register(register("a", name="other"), 0.0)
    dispatcher.leave("a", 1)
    dispatcher.register(register("c"), 0.0)


def test_leases_of_one_call():
    dispatcher = limited()
    dispatcher.register(register(size=100), 0.0)
    unchanged(dispatcher, lambda: dispatcher.lease(lease(1, count=4), 0.0), "4 leases a call")
    assert len(dispatcher.lease(lease(1, count=3), 0.0).grants) == 3


def quarantined(dispatcher, positions, request=1):
    return dispatcher.report(
        report(
            request,
            failures=tuple(Failure(task=1, attempt=1, position=p, reason="a reason") for p in positions),
        ),
        0.0,
    )


def test_quarantine_and_a_repeated_report_of_the_last_record_that_fits():
    dispatcher = limited()
    dispatcher.register(register(max_bad_records=10), 0.0)
    dispatcher.lease(lease(1), 0.0)
    unchanged(dispatcher, lambda: quarantined(dispatcher, (0, 1, 2)), "3 records of 'd' in quarantine")
    quarantined(dispatcher, (0, 1))
    quarantined(dispatcher, (0, 1))  # its answer was lost on the way: nothing is new
    unchanged(dispatcher, lambda: quarantined(dispatcher, (2,), 2), "3 records of 'd' in quarantine")
    (one, two) = dispatcher.find_ledger("d").quarantine
    assert (one.reason, two.reason) == ("a rea…", "a rea…")


def test_the_same_record_twice_in_one_report_counts_once():
    dispatcher = limited()
    dispatcher.register(register(max_bad_records=10), 0.0)
    dispatcher.lease(lease(1), 0.0)
    quarantined(dispatcher, (3, 3, 3, 2))
    assert len(dispatcher.find_ledger("d").quarantine) == 2


def test_quarantine_and_slices_of_a_token():
    dispatcher = limited()
    dispatcher.register(register(size=100, max_bad_records=10), 0.0)
    dispatcher.lease(lease(1, count=3), 0.0)
    quarantined(dispatcher, (0, 2))
    begun = json.loads(dispatcher.token("d"))
    assert (len(begun["open"]), len(begun["quarantine"])) == (4, 2)
    bad = begun["quarantine"][0]
    for more, match in (
        ({"quarantine": [bad] * 3}, "quarantine"),
        ({"crumbs": [begun["open"][0]]}, "5 slices"),
    ):
        text = json.dumps(begun | more)
        unchanged(dispatcher, lambda text=text: dispatcher.go_back("d", text), match)
    dispatcher.go_back("d", json.dumps(begun))


def test_bytes_that_quarantine_takes_in_a_token():
    limits = dataclasses.replace(SMALL, quarantine=10, quarantine_bytes=2 * BAD_BYTES)
    dispatcher = Dispatcher(ledger_id=FIRST.ledger, limits=limits)
    dispatcher.register(register(max_bad_records=10), 0.0)
    dispatcher.lease(lease(1), 0.0)
    unchanged(dispatcher, lambda: quarantined(dispatcher, (0, 1, 2)), f"{3 * BAD_BYTES} bytes of a token for")
    quarantined(dispatcher, (0, 1))
    quarantined(dispatcher, (0, 1))  # its answer was lost on the way: nothing is new
    unchanged(dispatcher, lambda: quarantined(dispatcher, (2,), 2), f"{3 * BAD_BYTES} bytes of a token for")
    begun = json.loads(dispatcher.token("d"))
    assert begun["quarantine"] == [BAD, [*BAD[:2], 1, "", 1, "a rea…"]]
    for bad in ([*begun["quarantine"], BAD], [[*BAD[:5], "a rea……"], begun["quarantine"][1]]):
        text = json.dumps(begun | {"quarantine": bad}, ensure_ascii=False)
        unchanged(dispatcher, lambda text=text: dispatcher.go_back("d", text), "bytes of a token for records")
    dispatcher.go_back("d", json.dumps(begun))
    dispatcher.go_back("d", None)  # and what was there takes no room any more
    dispatcher.lease(lease(3, lineage=3), 0.0)
    failure = Failure(task=2, attempt=1, position=3, reason="a reason")
    dispatcher.report(report(3, failures=(failure,), lineage=3), 0.0)
    assert len(dispatcher.find_ledger("d").quarantine) == 1


def test_bytes_of_a_token():
    free = Dispatcher(ledger_id=FIRST.ledger)
    free.register(register(), 0.0)
    token = free.token("d")
    for most, fits in ((len(token), True), (len(token) - 1, False)):
        dispatcher = Dispatcher(ledger_id=FIRST.ledger, limits=dataclasses.replace(SMALL, token_bytes=most))
        dispatcher.register(register(), 0.0)
        if fits:
            assert dispatcher.go_back("d", dispatcher.token("d")) == 2
        else:
            unchanged(dispatcher, lambda d=dispatcher: d.token("d"), f"{most + 1} bytes of a token")
            unchanged(dispatcher, lambda d=dispatcher: d.go_back("d", token), f"{most + 1} bytes of a token")


def test_limits_of_a_master_have_room_for_real_jobs():
    limits = Limits()
    spec = tuple(Source(name=f"train/{number:07}.tar", count=1) for number in range(100_000))
    limits.check_register(register(sources=spec), datasets=1, sessions=10_000)
    limits.check_entries("leases", 64 * 64)


# Numbers that would not fit -------------------------------------------------------------------------------


def test_records_per_shard_that_no_answer_could_carry_make_no_dataset():
    dispatcher = Dispatcher(ledger_id=FIRST.ledger)
    before = digest(dispatcher)
    for call in (
        register(batch_size=1 << 61, records_per_shard=None),
        register(records_per_shard=(1 << 62) + 1),
    ):
        with pytest.raises(InvalidArgument, match=r"2\*\*62 is the most"):
            dispatcher.register(call, 0.0)
    assert digest(dispatcher) == before
    dispatcher.register(register(records_per_shard=1 << 62), 0.0)


@pytest.mark.parametrize("value", [(1 << 62) + 1, 1 << 63, 10**4000, -1, True, 1.5, "1", None])
@pytest.mark.parametrize("field", ["acknowledged", "dropped", "cursor"])
def test_token_with_a_number_that_is_none_changes_nothing(field, value):
    dispatcher = Dispatcher(ledger_id=FIRST.ledger)
    dispatcher.register(register(), 0.0)
    begun = json.loads(dispatcher.token("d"))
    begun[field] = [value, 0, 0] if field == "cursor" else value
    before = digest(dispatcher)
    with pytest.raises(TokenError):
        dispatcher.go_back("d", json.dumps(begun))
    assert digest(dispatcher) == before


@pytest.mark.parametrize(
    "text", ["[" * 200_000, '{"a":' * 200_000, "1" * 10_000, "NaN", '"\ud800"', "\0", ""]
)
def test_text_that_is_no_token(text):
    with pytest.raises(TokenError):
        Token.decode(text)


# Over the wire --------------------------------------------------------------------------------------------


@pytest.fixture
def small(start):
    return start(dispatcher=limited())


def refused(master, call, match):
    before = master.digest
    with pytest.raises(LimitExceeded, match=match):
        call()
    assert master.digest == before


def test_limits_over_the_wire(small):
    client = small.client()
    many = tuple(Source(name=str(number), count=1) for number in range(4))
    refused(small, lambda: client.call(register(name="n" * 9)), "9 bytes of dataset")
    refused(small, lambda: client.call(register(sources=many)), "4 sources")
    client.call(register(sources=many[:3]))
    client.call(register("t", name="e"))
    refused(small, lambda: client.call(register("u")), "3 trainers")
    refused(small, lambda: client.call(register(name="f")), "3 datasets")


def heard(small, call, match):
    """Refused; the session was heard, nothing else has changed."""
    rows = small.on_loop(lambda: small.dispatcher.token("d"))
    with pytest.raises(LimitExceeded, match=match):
        call()
    assert small.on_loop(lambda: small.dispatcher.token("d")) == rows


def test_parts_of_one_call_over_the_wire(small):
    client = small.client()
    client.call(register(size=100, max_bad_records=9))
    heard(small, lambda: client.call(lease(1, count=4)), "4 leases a call")
    assert len(client.call(lease(1, count=3)).grants) == 3
    done = Acknowledgement(task=1, attempt=1, upto=1)
    bad = [Failure(task=1, attempt=1, position=p, reason="x") for p in (1, 2, 3)]
    heard(small, lambda: client.call(report(1, acknowledgements=(done,) * 5)), "5 outcomes in one call")
    heard(small, lambda: client.call(report(1, failures=tuple(bad))), "3 records of 'd' in quarantine")
    assert client.call(report(1, acknowledgements=(done,) * 2, failures=tuple(bad[:2]))).stale == ()
    held = (1, 1)
    call = ConfirmCall(session="s", dataset="d", fence=FIRST, leases=(held,) * 5)
    heard(small, lambda: client.call(call), "5 leases in one call")
    assert client.call(dataclasses.replace(call, leases=(held,) * 4)).void == ()


def test_a_full_quarantine_goes_through_a_token_and_back_over_the_wire(start):
    """With what takes most room in a token: long names and reasons that are not ASCII."""
    master: MasterThread = start()
    client = master.client()
    described = {
        "sources": (Source(name="é" * 2048, count=10_000),),
        "records_per_shard": 10_000,
        "max_bad_records": 10_000,
        "batch_size": 10_000,
    }
    client.call(register(**described))
    client.call(lease(1))
    done = fill(client, 0, 100)
    done = fill(client, done, 1)
    one = Onlooker(client, "d")
    token = one.snapshot()
    assert MESSAGE_BYTES // 2 - 20_000 < len(token) < MESSAGE_BYTES // 2 + 1_000
    assert one.restore(token) == 2
    assert one.snapshot() == token
    client.call(register(name="e", **described))
    assert Onlooker(client, "e").restore(token) == 2
    one, other = client.status().datasets  # together larger than any message
    assert one.quarantined == other.quarantined == len(one.quarantine) == done
    assert other.quarantine == ()


def fill(client, position, step):
    """Put records into quarantine, so many a call, until no more are taken. Returns where that was."""

    def put(first):
        positions = range(first, first + step)
        failures = (Failure(task=1, attempt=1, position=p, reason="é" * 5_000) for p in positions)
        client.call(report(first + 1, failures=tuple(failures)))

    return next(first for first in range(position, 10_000, step) if not _taken(put, first))


def _taken(put, first):
    try:
        put(first)
    except LimitExceeded as refusal:
        if "bytes of a token for records of 'd'" not in str(refusal):
            raise
        return False
    return True


def test_streams_over_the_wire(small):
    with grpc.insecure_channel(small.address) as channel:
        attend = channel.unary_stream(
            "/edl_torch.v1.Master/Attend", pb.AttendRequest.SerializeToString, pb.AttendEvent.FromString
        )
        streams = [attend(pb.AttendRequest(session=session), timeout=20) for session in ("a", "b" * 8)]
        assert [next(stream).WhichOneof("event") for stream in streams] == ["attending"] * 2
        for session, words in (("c", "3 trainers' streams"), ("c" * 9, "9 bytes of session")):
            with pytest.raises(grpc.RpcError) as caught:
                next(attend(pb.AttendRequest(session=session), timeout=20))
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert words in caught.value.details()
        again = attend(pb.AttendRequest(session="a"), timeout=20)  # replaces the older one
        assert next(again).WhichOneof("event") == "attending"
        for stream in (*streams, again):
            stream.cancel()


def test_message_that_is_too_large_is_refused_by_both_sides(start):
    master = start()
    client = master.client(master_timeout_s=600)
    client.call(register())
    before = master.on_loop(lambda: dump(master.dispatcher))
    with pytest.raises(LimitExceeded, match=r"too large.*larger than max"):
        client.call(
            RestoreCall(session="s", dataset="d", fence=FIRST, request=1, token="x" * (MESSAGE_BYTES + 1))
        )
    with grpc.insecure_channel(master.address, options=[("grpc.max_send_message_length", -1)]) as channel:
        for size, words in ((MESSAGE_BYTES + 1, "larger than max"), (MESSAGE_BYTES, "bytes of a token")):
            head = _restore_up_to_the_token()
            length = size - len(head) - 4
            raw = head + _varint(length) + b"x" * length
            assert len(raw) == size
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary("/edl_torch.v1.Master/Restore")(raw, timeout=60)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert words in caught.value.details()
    assert master.on_loop(lambda: dump(master.dispatcher)) == before


def _restore_up_to_the_token():
    """What comes before the token's length: fields may stand in any order."""
    named = pb.RestoreRequest(
        session="s", dataset="d", **dataclasses.asdict(FIRST), request=1
    ).SerializeToString()
    return named + pb.RestoreRequest(token="").SerializeToString()[:-1]


def _varint(number):
    parts = []
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    return bytes([*parts, number])


def test_status_is_told_whatever_a_token_said(start):
    """Numbers and texts of a token may not fit the wire: who asks for the status must not suffer for it."""
    master: MasterThread = start()
    client = master.client()
    client.call(register(size=1 << 61, records_per_shard=1 << 61, num_epochs=2, max_bad_records=5))
    onlooker = Onlooker(client, "d")
    begun = json.loads(onlooker.snapshot())
    rest = [[0, 0, 1, (1 << 61) - 1], [1, 0, 0, 1 << 61]]
    bad = [0, 0, 0, "bad \ud800 name", 1 << 62, "why \udfff"]
    text = json.dumps(begun | {"open": rest, "cursor": [2, 0, 0], "quarantine": [bad]})
    assert onlooker.restore(text) == 2
    (status,) = client.status().datasets
    assert status.todo == (1 << 62) - 1
    (found,) = status.quarantine
    assert found.reason == "why \\udfff"
    assert (found.name, found.index) == ("", 0), "it is named as here, whatever the token calls it"
    assert client.call(lease(1, epoch=NEW_PASS, lineage=2)).epoch == 0


def test_words_of_an_elasticdl_worker_are_one_short_line_of_the_log(start, caplog):
    master = start()
    call = wire.RESULT.write(TaskResult(task_id=7, error="disk\n\x1b[2J" + "x" * 5000))
    with grpc.insecure_channel(master.address) as channel:
        channel.unary_unary("/proto.Master/report_task_result")(call, timeout=10)
    (told,) = (line for line in caplog.messages if "task=7 failed" in line)
    assert told.startswith("elasticdl task=7 failed: disk\\n\\x1b[2Jxxx")
    assert len(told) < 1100
