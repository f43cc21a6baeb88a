"""What goes over the wire: stubs, errors as statuses, fences."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import grpc
import pytest
from grpc_errors import CallFailed
from make_stubs import GENERATED, ROOT, TOOLS, generate, tools_version

from edl_torch import errors
from edl_torch.core.calls import Fence, FencedCall
from edl_torch.elasticdl import elasticdl_pb2
from edl_torch.errors import EdlError, MasterUnavailable, StaleLease
from edl_torch.rpc import edl_torch_pb2
from edl_torch.rpc import edl_torch_pb2 as pb
from edl_torch.rpc.convert import ROUTES, MasterStub
from edl_torch.rpc.status import MESSAGE_BYTES, STATUS, AnotherAnswers, from_status, shorten, to_status

ALL = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, EdlError)]


@pytest.mark.parametrize("cls", ALL)
def test_every_error_comes_back_as_itself(cls):
    back = from_status(CallFailed(*to_status(cls("shard 7 of 'é' is gone"))), "h:1")
    assert type(back) is cls
    assert str(back) == "shard 7 of 'é' is gone"


def test_every_error_has_its_own_row():
    assert set(STATUS) == set(ALL)


def test_subclass_without_a_row_travels_as_its_parent():
    class VeryStale(StaleLease):
        pass

    assert type(from_status(CallFailed(*to_status(VeryStale("x"))), "h:1")) is StaleLease


@pytest.mark.parametrize(
    ("kind", "code", "details"),
    [
        (MasterUnavailable, "UNAVAILABLE", "gone"),
        (MasterUnavailable, "DEADLINE_EXCEEDED", "gone"),
        (MasterUnavailable, "CANCELLED", "gone"),
        (errors.LimitExceeded, "RESOURCE_EXHAUSTED", "Received message larger than max (5 vs. 4)"),
        # Of something else, which is no answer of the master.
        (AnotherAnswers, "RESOURCE_EXHAUSTED", "a quota of somebody else's"),
        (AnotherAnswers, "UNIMPLEMENTED", "Method not found!"),
        (AnotherAnswers, "UNKNOWN", "Received http2 header with status: 500"),
        (AnotherAnswers, "INTERNAL", "Exception deserializing response!"),
        (AnotherAnswers, "PERMISSION_DENIED", "RBAC: access denied"),
        (AnotherAnswers, "UNAUTHENTICATED", "who are you?"),
        (AnotherAnswers, "UNAVAILABLE", "Failed parsing HTTP/2 (Expected SETTINGS frame as the first frame)"),
        # A bug of the master's own: no end of data, and no waiting.
        (EdlError, "UNKNOWN", "Unexpected <class 'KeyError'>: 7"),
        (EdlError, "UNKNOWN", "Exception calling application: 'NoneType'"),
    ],
)
def test_a_status_without_a_class_is_told_by_its_code_and_words(kind, code, details):
    error = from_status(CallFailed(grpc.StatusCode[code], details), "h:1")
    assert type(error) is kind
    assert "h:1" in str(error)
    assert details in str(error)
    assert isinstance(error, MasterUnavailable) == (kind in (MasterUnavailable, AnotherAnswers))


def test_unknown_class_name_is_not_trusted():
    error = from_status(CallFailed(grpc.StatusCode.ABORTED, "x", (("edl-error", "SystemExit"),)), "h:1")
    assert type(error) is EdlError


@pytest.mark.parametrize("letter", ["a", "é", "語", "\udcff"])
def test_long_message_is_cut_in_the_middle_and_fits_a_header(letter):
    message = shorten("begin " + letter * 5000 + " end")
    assert message.startswith("begin")
    assert message.endswith("end")
    assert len(message.encode()) <= MESSAGE_BYTES + 10


# The stubs that are checked in are those of the proto -------------------------------------------------------


@pytest.mark.skipif(tools_version() != TOOLS, reason=f"needs grpcio-tools {TOOLS}")
def test_regenerating_changes_nothing(tmp_path):
    generate(tmp_path)
    for name in GENERATED:
        assert (tmp_path / name).read_text() == (ROOT / name).read_text()


@pytest.mark.skipif(tools_version() == TOOLS, reason="the right tools are installed")
def test_other_tools_are_refused(tmp_path):
    with pytest.raises(RuntimeError, match=TOOLS):
        generate(tmp_path)


@pytest.mark.parametrize("stubs", [edl_torch_pb2, elasticdl_pb2], ids=lambda stubs: stubs.__name__)
def test_stubs_know_every_message_of_the_proto(stubs):
    # A cheap stand-in where the tools are missing: names and numbers, read from the proto's text.
    text = (ROOT / stubs.DESCRIPTOR.name).read_text()
    declared = [line.split()[1] for line in text.splitlines() if line.startswith("message ")]
    assert sorted(stubs.DESCRIPTOR.message_types_by_name) == sorted(declared)


# The calls of the service, as its descriptor has them, over a channel ---------------------------------------


METHODS = {method.name: method for method in pb.DESCRIPTOR.services_by_name["Master"].methods}


class Made(NamedTuple):
    kind: str
    path: str
    write: Any
    read: Any


class Channel:
    """Notes what it is asked to make."""

    def unary_unary(self, path: str, request_serializer: Any, response_deserializer: Any) -> Made:
        return Made("unary_unary", path, request_serializer, response_deserializer)

    def unary_stream(self, path: str, request_serializer: Any, response_deserializer: Any) -> Made:
        return Made("unary_stream", path, request_serializer, response_deserializer)


def test_each_method_of_the_service_carries_a_call_or_keeps_a_session_alive() -> None:
    routes = [route.method for route in ROUTES.values()]
    assert sorted([*routes, "Attend", "Heartbeat", "Leave"]) == sorted(METHODS)
    assert set(MasterStub(Channel()).methods) == set(METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_each_call_has_its_path_and_its_messages(name: str) -> None:
    made = MasterStub(Channel()).methods[name]
    assert made.kind == ("unary_stream" if name == "Attend" else "unary_unary")
    assert made.path == f"/edl_torch.v1.Master/{name}"
    request = getattr(pb, METHODS[name].input_type.name)
    answer = getattr(pb, METHODS[name].output_type.name)
    assert request.FromString(made.write(request())) == request()
    assert type(made.read(answer().SerializeToString())) is answer


# Every request of the wire carries its trainer's fence ------------------------------------------------------


FENCE = {"session", "ledger", "lineage", "member"}

WITHOUT = {
    "Register": ({"ledger", "lineage", "member"}, "its answer is what gives the fence"),
    "Attend": (
        {"ledger", "lineage", "member"},
        "opens the stream of a session, whose random id no other ledger knows; it names no record, and a "
        "late one only ends the stream before it, which is opened again",
    ),
    "Heartbeat": (
        {"ledger", "lineage"},
        "says of a session that it lives, in all its datasets and whatever history one of them is in",
    ),
    "Leave": (
        {"ledger", "lineage"},
        "ends a session in all its datasets; after it the session says nothing more",
    ),
    "SetWeights": (
        {"session", "member"},
        "comes from a person too, who has no session; it replaces a segment that it names, and no other",
    ),
    "Status": (FENCE, "looks from outside: it changes nothing, and no trainer asks it about its own work"),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_request_names_session_ledger_lineage_and_member(name: str) -> None:
    missing = FENCE - {field.name for field in METHODS[name].input_type.fields}
    allowed, _ = WITHOUT.get(name, (set(), ""))
    assert missing == allowed


def test_the_list_of_exceptions_has_no_call_that_is_gone() -> None:
    assert set(WITHOUT) <= set(METHODS)


def test_a_fenced_call_has_the_same_fields() -> None:
    own = {field.name for field in dataclasses.fields(FencedCall)}
    assert own == {"session", "dataset", "fence", "asked", "reported"}
    assert own | {field.name for field in dataclasses.fields(Fence)} >= FENCE
