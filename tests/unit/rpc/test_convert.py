"""Every call and answer survives the wire unchanged."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from enum import Enum
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edl_torch.core import calls
from edl_torch.core.quarantine import QuarantinedRecord
from edl_torch.core.status import (
    BUCKETS,
    DatasetStatus,
    EventKind,
    Histogram,
    MasterStatus,
    Measures,
    TrainerState,
)
from edl_torch.errors import EdlError, InvalidArgument
from edl_torch.rpc import convert
from edl_torch.rpc import edl_torch_pb2 as pb
from edl_torch.shard import TaskType

REGISTER = convert.ROUTES[calls.RegisterCall]
LEASE = convert.ROUTES[calls.LeaseCall]
REPORT = convert.ROUTES[calls.ReportCall]
PROGRESS = convert.ROUTES[calls.ProgressCall]
STATUS = convert.ROUTES[calls.StatusCall]

ROUTES = convert.ROUTES.values()
WIRES = {
    **{f"{route.method} call": route.request for route in ROUTES},
    **{f"{route.method} answer": route.answer for route in ROUTES},
    "measures": convert.MEASURES,
}
INT = st.integers(-(1 << 63), (1 << 63) - 1)
PLAIN = {
    int: INT,
    str: st.text(st.characters(exclude_categories=("Cs",)), max_size=20),
    bool: st.booleans(),
    float: st.floats(0, 1e9),
    NoneType: st.none(),
    Histogram: st.builds(
        Histogram,
        counts=st.lists(INT, min_size=BUCKETS, max_size=BUCKETS).map(tuple),
        sum_s=st.floats(0, 1e9),
    ),
}


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of a type of ours."""
    if kind in PLAIN:
        return PLAIN[kind]
    if dataclasses.is_dataclass(kind):
        return st.builds(kind, **{name: values(hint) for name, hint in get_type_hints(kind).items()})
    if isinstance(kind, type) and issubclass(kind, Enum):
        return st.sampled_from(kind)
    origin, parts = get_origin(kind), get_args(kind)
    if origin is tuple and parts[-1] is Ellipsis:
        return st.lists(values(parts[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, parts))
    if origin in (dict, Mapping):
        return st.dictionaries(*map(values, parts), max_size=3)
    return st.one_of(*map(values, parts))


@pytest.mark.parametrize("name", WIRES)
@given(data=st.data())
def test_value_is_the_same_after_the_wire(name, data):
    wire = WIRES[name]
    value = data.draw(values(wire.kind))
    message = wire.to_wire(value)
    assert wire.from_wire(type(message).FromString(message.SerializeToString())) == value


@pytest.mark.parametrize(("ours", "wire"), [(calls.PassState, pb.PassState), (TaskType, pb.TaskType)])
def test_members_have_the_numbers_of_the_wire(ours, wire):
    assert {member.name: int(member) for member in ours} == dict(wire.items())


@pytest.mark.parametrize(
    ("message", "from_wire"),
    [
        (pb.LeaseResponse(state=99), LEASE.answer.from_wire),
        (
            pb.RegisterResponse(spec=pb.DatasetSpec(task_type=99)),
            REGISTER.answer.from_wire,
        ),
        (
            pb.StatusResponse(datasets=[pb.DatasetStatus(task_type=99)]),
            STATUS.answer.from_wire,
        ),
    ],
)
def test_word_of_a_newer_master_is_named_as_such(message, from_wire):
    with pytest.raises(EdlError, match=r"(PassState|TaskType) 99.*older than the master"):
        from_wire(message)


def pairs(kind: Any, message: Any) -> Iterator[tuple[Any, Any]]:
    """Each dataclass below one, with the message that has its fields."""
    yield kind, message
    for name, hint in get_type_hints(kind).items():
        field = message.fields_by_name.get(name)
        for of in (hint, *get_args(hint), *(part for one in get_args(hint) for part in get_args(one))):
            if field is not None and dataclasses.is_dataclass(of):
                there = field.message_type
                wraps = not set(get_type_hints(of)) & set(there.fields_by_name)  # what may be None
                yield from pairs(of, there.fields[0].message_type if wraps else there)


IN_ONE_FIELD = (pb.ProgressResponse, pb.SetWeightsResponse)
PAIRS = {
    value.__name__: (value, message)
    for wire in WIRES.values()
    if dataclasses.is_dataclass(wire.kind) and wire.message not in IN_ONE_FIELD
    for value, message in pairs(wire.kind, wire.message.DESCRIPTOR)
}


@pytest.mark.parametrize(("value", "message"), PAIRS.values(), ids=PAIRS)
def test_no_field_was_forgotten_in_the_proto(value, message):
    there = set(message.fields_by_name)
    hints = get_type_hints(value)
    inline = {name for name in hints if name not in there and dataclasses.is_dataclass(hints[name])}
    fields = hints.keys() - inline | {name for one in inline for name in get_type_hints(hints[one])}
    assert fields == there - {"wait_s"}


def optional_fields(value):
    hints = get_type_hints(value)
    return {field.name for field in dataclasses.fields(value) if type(None) in get_args(hints[field.name])}


@pytest.mark.parametrize(("value", "message"), PAIRS.values(), ids=PAIRS)
def test_what_may_be_none_can_be_left_out_of_the_message(value, message):
    absent = {field.name: field.has_presence for field in message.fields}
    parts = {field.name for field in message.fields if field.message_type}  # always have presence
    assert {name for name in absent if absent[name]} - parts == optional_fields(value) - parts
    assert all(absent[name] for name in optional_fields(value))


def report(**fields):
    fence = calls.Fence(ledger="l", lineage=1, member=1)
    return calls.ReportCall(**{"session": "s", "dataset": "d", "fence": fence, "request": 1} | fields)


@pytest.mark.parametrize(
    "call",
    [
        report(request=1 << 63),
        report(session="\udcff"),
        report(session=7),
        report(fence=calls.Fence(lineage="one")),
    ],
    ids=["beyond 64 bits", "no Unicode", "no text", "no number"],
)
def test_what_does_not_fit_the_wire_is_an_invalid_argument(call):
    with pytest.raises(InvalidArgument, match="ReportCall does not fit the wire format"):
        REPORT.request.to_wire(call)


def test_unknown_task_type_is_an_invalid_argument():
    message = pb.RegisterRequest(registration=pb.Registration(name="d", task_type=77))
    with pytest.raises(InvalidArgument, match="77"):
        REGISTER.request.from_wire(message)


def test_empty_buckets_at_the_end_cost_nothing_on_the_wire():
    some = Histogram(counts=(0, 3) + (0,) * (BUCKETS - 2), sum_s=1.0)
    assert convert.MEASURES.to_wire(Measures(waited=some)).waited.counts == [0, 3]
    assert not pb.HeartbeatRequest(member=1).HasField("measures")


def test_empty_message_is_a_call_with_nothing_in_it():
    call = REGISTER.request.from_wire(pb.RegisterRequest())
    assert call.registration == calls.Registration(name="")


def test_texts_of_a_newer_master_are_left_out_or_read_as_the_default():
    events = [pb.Event(number=1, kind="eclipse"), pb.Event(number=2, kind="joined")]
    message = pb.StatusResponse(events=events, trainers=[pb.TrainerStatus(session="s", state="asleep")])
    status = STATUS.answer.from_wire(message)
    assert [(event.number, event.kind) for event in status.events] == [(2, EventKind.JOINED)]
    assert [trainer.state for trainer in status.trainers] == [TrainerState.LIVE]


def test_nothing_in_a_status_is_too_large_or_no_text_for_the_wire():
    bad = QuarantinedRecord(epoch=1 << 70, shard=0, position=0, name="\udcff", index=0, reason="")
    status = MasterStatus(
        ledger="",
        durable=True,
        datasets=(),
        trainers=(),
        suspended={"\udcff": "x"},
        event_counts={"joined": 1},
    )
    assert STATUS.answer.from_wire(STATUS.answer.to_wire(status)).suspended == {"\\udcff": "x"}
    dataset = DatasetStatus(
        **dict.fromkeys(("dataset", "ledger"), "d"),
        **dict.fromkeys(
            ("lineage", "epoch", "num_epochs", "size", "shards", "shards_left", "todo", "leased"), 0
        ),
        **dict.fromkeys(("leases", "acknowledged", "quarantined", "dropped", "trainers"), 0),
        task_type=TaskType.TRAINING,
        finished=False,
        quarantine=(bad,),
    )
    (shown,) = PROGRESS.answer.from_wire(PROGRESS.answer.to_wire(dataset)).quarantine
    assert (shown.epoch, shown.name) == ((1 << 63) - 1, "\\udcff")
