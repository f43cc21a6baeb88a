"""Every call and answer survives the wire unchanged."""

from __future__ import annotations

import dataclasses
from typing import get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edl_torch.core import calls
from edl_torch.core.quarantine import QuarantinedRecord
from edl_torch.core.status import (
    BUCKETS,
    DatasetStatus,
    Departed,
    Event,
    EventKind,
    Histogram,
    MasterStatus,
    Measures,
    Picture,
    TrainerState,
    TrainerStatus,
)
from edl_torch.errors import EdlError, InvalidArgument
from edl_torch.rpc import convert
from edl_torch.rpc import edl_torch_pb2 as pb
from edl_torch.shard import DatasetSpec, Slice, Source, TaskType

CONFIRM = convert.ROUTES[calls.ConfirmCall]
REGISTER = convert.ROUTES[calls.RegisterCall]
LEASE = convert.ROUTES[calls.LeaseCall]
REPORT = convert.ROUTES[calls.ReportCall]
SNAPSHOT = convert.ROUTES[calls.SnapshotCall]
PROGRESS = convert.ROUTES[calls.ProgressCall]
RESTORE = convert.ROUTES[calls.RestoreCall]
STATUS = convert.ROUTES[calls.StatusCall]

INT = st.integers(-(1 << 63), (1 << 63) - 1)
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
FLAG = st.booleans()
TASK_TYPES = st.sampled_from(TaskType)


def many(strategy):
    return st.lists(strategy, max_size=4).map(tuple)


SOURCES = many(st.builds(Source, name=TEXT, start=INT, count=INT))
REGISTRATIONS = st.builds(
    calls.Registration,
    name=TEXT,
    sources=st.none() | SOURCES,
    records_per_shard=st.none() | INT,
    seed=st.none() | INT,
    shuffle=st.none() | FLAG,
    shuffle_shards=st.none() | FLAG,
    shuffle_in_shard=st.none() | FLAG,
    task_type=st.none() | TASK_TYPES,
    num_epochs=st.none() | INT,
    epoch_barrier=st.none() | FLAG,
    max_bad_records=st.none() | INT,
    shuffle_window=st.none() | INT,
    fingerprint=st.none() | TEXT,
)
SPECS = st.builds(
    DatasetSpec,
    name=TEXT,
    sources=SOURCES,
    records_per_shard=INT,
    seed=INT,
    shuffle=FLAG,
    shuffle_shards=FLAG,
    shuffle_in_shard=st.none() | FLAG,
    task_type=TASK_TYPES,
    num_epochs=INT,
    epoch_barrier=FLAG,
    max_bad_records=INT,
    shuffle_window=st.integers(1, 2**62),
    fingerprint=TEXT,
)
HISTOGRAMS = st.builds(
    Histogram,
    counts=st.lists(INT, min_size=BUCKETS, max_size=BUCKETS).map(tuple),
    sum_s=st.floats(0, 1e9),
)
MEASURES = st.builds(
    Measures,
    batches=INT,
    records=INT,
    waited=HISTOGRAMS,
    stepped=HISTOGRAMS,
    waited_for_ranks_s=st.floats(0, 1e9),
    timed=INT,
    read_s=st.floats(0, 1e9),
    transform_s=st.floats(0, 1e9),
)
GRANTS = st.builds(
    calls.Grant,
    task=INT,
    attempt=INT,
    bundle=INT,
    slice=st.builds(Slice, epoch=INT, shard=INT, skip=INT, limit=INT),
)
FENCES = st.builds(calls.Fence, ledger=TEXT, lineage=INT, member=INT)
FENCED = {"session": TEXT, "dataset": TEXT, "fence": FENCES}
REPORTS = st.builds(
    calls.ReportCall,
    **FENCED,
    request=INT,
    failures=many(st.builds(calls.Failure, task=INT, attempt=INT, position=INT, reason=TEXT)),
    acknowledgements=many(st.builds(calls.Acknowledgement, task=INT, attempt=INT, upto=INT)),
    give_backs=many(st.builds(calls.GiveBack, task=INT, attempt=INT, start=INT, remainder=FLAG)),
)
BAD_RECORDS = st.builds(
    QuarantinedRecord, epoch=INT, shard=INT, position=INT, name=TEXT, index=INT, reason=TEXT
)
CELLS = many(INT)
PICTURES = st.builds(
    Picture, epoch=INT, **dict.fromkeys(("waiting", "lent", "done", "returned", "quarantined"), CELLS)
)
SECONDS = st.floats(0, 1e9)
EVENTS = st.builds(
    Event,
    number=INT,
    at=SECONDS,
    kind=st.sampled_from(EventKind),
    dataset=TEXT,
    worker_id=TEXT,
    count=INT,
    slices=INT,
    records=INT,
    text=TEXT,
)
DEPARTED = st.builds(
    Departed,
    session=TEXT,
    worker_id=TEXT,
    at=SECONDS,
    died=FLAG,
    why=TEXT,
    trained=INT,
    slices=INT,
    records=INT,
)
STATUSES = st.builds(
    MasterStatus,
    ledger=TEXT,
    durable=FLAG,
    datasets=many(
        st.builds(
            DatasetStatus,
            dataset=TEXT,
            ledger=TEXT,
            task_type=TASK_TYPES,
            quarantine=many(BAD_RECORDS),
            failure=TEXT,
            finished=FLAG,
            **dict.fromkeys(
                (
                    *("epoch", "num_epochs", "size", "shards", "shards_left", "todo", "leased", "leases"),
                    *("acknowledged", "quarantined", "dropped", "trainers", "lineage"),
                    *("returned_slices", "returned_records", "given_back", "checkpoints", "restores"),
                ),
                INT,
            ),
            rate=SECONDS,
            picture=st.none() | PICTURES,
        )
    ),
    trainers=many(
        st.builds(
            TrainerStatus,
            session=TEXT,
            worker_id=TEXT,
            datasets=many(TEXT),
            leased=INT,
            idle_s=st.floats(0, 1e9),
            since_progress_s=st.floats(0, 1e9),
            measures=st.none() | MEASURES,
            state=st.sampled_from(TrainerState),
            pace=SECONDS,
            slow=FLAG,
            trained=INT,
            leases=INT,
            oldest_lease_s=SECONDS,
        )
    ),
    time=SECONDS,
    started_at=SECONDS,
    events=many(EVENTS),
    departed=many(DEPARTED),
    event_counts=st.dictionaries(TEXT, INT, max_size=3),
)

ROUND_TRIPS = {
    "confirm call": (
        st.builds(
            calls.ConfirmCall,
            **FENCED,
            leases=many(st.tuples(INT, INT)),
        ),
        CONFIRM.request,
    ),
    "confirm answer": (
        st.builds(calls.ConfirmAnswer, void=many(INT)),
        CONFIRM.answer,
    ),
    "register call": (
        st.builds(
            calls.RegisterCall, session=TEXT, worker_id=TEXT, batch_size=INT, registration=REGISTRATIONS
        ),
        REGISTER.request,
    ),
    "register answer": (
        st.builds(calls.RegisterAnswer, spec=SPECS, fence=FENCES, epoch=INT),
        REGISTER.answer,
    ),
    "lease call": (
        st.builds(
            calls.LeaseCall,
            **FENCED,
            request=INT,
            epoch=INT,
            count=INT,
            drained=FLAG,
            ahead=FLAG,
        ),
        LEASE.request,
    ),
    "lease answer": (
        st.builds(
            calls.LeaseAnswer,
            request=INT,
            epoch=INT,
            state=st.sampled_from(calls.PassState),
            grants=many(GRANTS),
        ),
        LEASE.answer,
    ),
    "report call": (REPORTS, REPORT.request),
    "report answer": (
        st.builds(calls.ReportAnswer, request=INT, stale=many(INT), wanted=FLAG),
        REPORT.answer,
    ),
    "snapshot call": (
        st.builds(calls.SnapshotCall, **FENCED),
        SNAPSHOT.request,
    ),
    "progress call": (
        st.builds(calls.ProgressCall, **FENCED),
        PROGRESS.request,
    ),
    "restore call": (
        st.builds(calls.RestoreCall, **FENCED, request=INT, token=st.none() | TEXT),
        RESTORE.request,
    ),
    "measures": (MEASURES, convert.MEASURES),
    "status": (STATUSES, STATUS.answer),
}


@pytest.mark.parametrize("kind", ROUND_TRIPS)
@given(data=st.data())
def test_value_is_the_same_after_the_wire(kind, data):
    strategy, wire = ROUND_TRIPS[kind]
    value = data.draw(strategy)
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


PAIRS = [
    (Source, pb.Source),
    (DatasetSpec, pb.DatasetSpec),
    (calls.Registration, pb.Registration),
    (calls.RegisterCall, pb.RegisterRequest),
    (calls.RegisterAnswer, pb.RegisterResponse),
    (calls.LeaseCall, pb.LeaseRequest),
    (calls.LeaseAnswer, pb.LeaseResponse),
    (calls.ConfirmCall, pb.ConfirmRequest),
    (calls.ConfirmAnswer, pb.ConfirmResponse),
    (calls.ReportCall, pb.ReportRequest),
    (calls.SnapshotCall, pb.SnapshotRequest),
    (calls.ProgressCall, pb.ProgressRequest),
    (calls.RestoreCall, pb.RestoreRequest),
    (calls.ReportAnswer, pb.ReportResponse),
    (calls.Acknowledgement, pb.Acknowledgement),
    (calls.Failure, pb.Failure),
    (calls.GiveBack, pb.GiveBack),
    (QuarantinedRecord, pb.QuarantinedRecord),
    (DatasetStatus, pb.DatasetStatus),
    (TrainerStatus, pb.TrainerStatus),
    (MasterStatus, pb.StatusResponse),
    (Picture, pb.Picture),
    (Event, pb.Event),
    (Departed, pb.Departed),
    (Histogram, pb.Histogram),
    (Measures, pb.Measures),
]


@pytest.mark.parametrize(("value", "message"), PAIRS)
def test_no_field_was_forgotten_in_the_proto(value, message):
    names = {field.name for field in message.DESCRIPTOR.fields}
    fields = {field.name for field in dataclasses.fields(value)}
    if "fence" in fields:
        fields = fields - {"fence"} | {field.name for field in dataclasses.fields(calls.Fence)}
    assert fields == names - {"wait_s"}


def optional_fields(value):
    hints = get_type_hints(value)
    return {field.name for field in dataclasses.fields(value) if type(None) in get_args(hints[field.name])}


@pytest.mark.parametrize(("value", "message"), PAIRS)
def test_what_may_be_none_can_be_left_out_of_the_message(value, message):
    absent = {field.name: field.has_presence for field in message.DESCRIPTOR.fields}
    parts = {field.name for field in message.DESCRIPTOR.fields if field.message_type}  # always have presence
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
