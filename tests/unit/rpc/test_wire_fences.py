"""Every request of the wire carries its trainer's fence, or stands here with the reason why it does not."""

from __future__ import annotations

import dataclasses

import pytest

from edl_torch.core.calls import Fence, FencedCall
from edl_torch.rpc import edl_torch_pb2 as pb

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

METHODS = {method.name: method for method in pb.DESCRIPTOR.services_by_name["Master"].methods}


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
