"""Conversion of calls and answers to protobuf messages and back.

A message has the fields of its dataclass, by name: tables that are made once say how each goes there and
comes back. It also checks what protobuf cannot express (enum members, missing parts). Every lease and report
passes through here, so those are written and read attribute by attribute: by name that takes three times as
long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import IntEnum
from operator import attrgetter
from types import UnionType
from typing import Any, Generic, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.message import Message

from edl_torch.core import calls
from edl_torch.core.events import Departed, Event, EventKind
from edl_torch.core.measures import Histogram, Measures, padded, trimmed
from edl_torch.core.picture import Picture
from edl_torch.errors import EdlError, InvalidArgument
from edl_torch.rpc import edl_torch_pb2 as pb
from edl_torch.shard import DatasetSpec, Slice, Source, TaskType

A = TypeVar("A")
B = TypeVar("B")
E = TypeVar("E")
M = TypeVar("M", bound=Message)

Convert = Callable[[Any], Any]

_STATE_FROM_WIRE = {int(state): state for state in calls.PassState}
_MOST = (1 << 63) - 1


def checked(convert: Callable[[A], B], value: A) -> B:
    """Convert a value; what the other side cannot express raises InvalidArgument.

    Such are a text that is not Unicode, a number beyond 64 bits, an unknown member of an enum.
    """
    try:
        return convert(value)
    except (TypeError, ValueError, KeyError) as exc:
        raise InvalidArgument(f"{type(value).__name__} does not fit the wire format: {exc}") from exc


def _member(members: Mapping[int, E], number: int) -> E:
    """Return a member of an enum in an answer; a newer master may have one that is not known here."""
    try:
        return members[number]
    except KeyError:
        kind = type(next(iter(members.values()))).__name__
        raise EdlError(
            f"the master answers with {kind} {number}, which this edl_torch does not know: it is older than "
            "the master, upgrade it"
        ) from None


def taker(*names: str) -> Callable[[object], dict[str, Any]]:
    """Return a function that takes these attributes of a value, a call or a message, by name."""
    get = attrgetter(*names)
    return lambda value: dict(zip(names, get(value), strict=True))


# By a table ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Field:
    """How one field goes to the wire, and comes back. `absent`: it may be None, and is not set then."""

    to_wire: Convert
    from_wire: Convert
    absent: bool = False


class Codec(Generic[A, M]):
    """How a dataclass travels as a message; `special` are the fields that the types do not explain.

    A fence travels as its three parts. With `fits` texts and numbers for people are made to fit: nothing that
    is in a token may spoil the status.
    """

    known: dict[type, Codec[Any, Any]] = {}  # noqa: RUF012  those made so far, by the type of the values

    def __init__(self, kind: type[A], message: type[M], /, *, fits: bool = False, **special: Field) -> None:
        self._kind, self._message = kind, message
        hints = get_type_hints(kind)
        self._fence = hints.pop("fence", None) is not None
        names = [field.name for field in fields(kind) if field.name in hints]  # type: ignore[arg-type]
        self._fields = {name: special.get(name) or _field_of(hints[name], fits=fits) for name in names}
        Codec.known.setdefault(kind, self)

    def write(self, value: A) -> M:
        """Return the value as a message."""
        given = _take_fence(value.fence) if self._fence else {}  # type: ignore[attr-defined]
        for name, field in self._fields.items():
            part = getattr(value, name)
            if part is not None or not field.absent:
                given[name] = field.to_wire(part)
        return self._message(**given)

    def read(self, message: M) -> A:
        """Return the value of a message."""
        given: dict[str, Any] = {"fence": calls.Fence(**_take_fence(message))} if self._fence else {}
        for name, field in self._fields.items():
            if not field.absent or message.HasField(name):
                given[name] = field.from_wire(getattr(message, name))
            else:
                given[name] = None
        return self._kind(**given)


_take_fence = taker("ledger", "lineage", "member")


def _field_of(hint: Any, *, fits: bool) -> Field:
    if get_origin(hint) is UnionType:  # X | None
        inner = _field_of(get_args(hint)[0], fits=fits)
        return Field(inner.to_wire, inner.from_wire, absent=True)
    if get_origin(hint) is dict:
        return Field(lambda parts: {_fit(name): _fit(part) for name, part in parts.items()}, dict)
    if get_origin(hint) is tuple:
        one = _field_of(get_args(hint)[0], fits=fits)
        if one.to_wire is _same:
            return Field(_same, tuple)
        return Field(
            lambda parts: list(map(one.to_wire, parts)), lambda parts: tuple(map(one.from_wire, parts))
        )
    if hint in Codec.known:
        return Field(Codec.known[hint].write, Codec.known[hint].read)
    if issubclass(hint, IntEnum):
        members = {int(member): member for member in hint}
        return Field(int, lambda number: _member(members, number))
    return Field(_fit if fits and hint in (str, int) else _same, _same)


def _same(value: Any) -> Any:
    return value


def _fit(value: Any) -> Any:
    """What people see, where it would not fit otherwise."""
    if type(value) is int:
        return min(value, _MOST)
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


_SOURCE = Codec(Source, pb.Source)
_REGISTRATION = Codec(
    calls.Registration,
    pb.Registration,
    sources=Field(
        lambda sources: pb.SourceList(sources=map(_SOURCE.write, sources)),
        lambda given: tuple(map(_SOURCE.read, given.sources)),
        absent=True,
    ),
    task_type=Field(int, TaskType, absent=True),  # of a caller: an unknown one is his mistake
)
_SPEC = Codec(DatasetSpec, pb.DatasetSpec)
_REGISTER = Codec(calls.RegisterCall, pb.RegisterRequest)
_REGISTERED = Codec(calls.RegisterAnswer, pb.RegisterResponse)
register_call_to_wire, register_call_from_wire = _REGISTER.write, _REGISTER.read
register_answer_to_wire, register_answer_from_wire = _REGISTERED.write, _REGISTERED.read

_CONFIRM = Codec(
    calls.ConfirmCall,
    pb.ConfirmRequest,
    leases=Field(
        lambda leases: [pb.LeaseId(task=task, attempt=attempt) for task, attempt in leases],
        lambda leases: tuple([(held.task, held.attempt) for held in leases]),
    ),
)
_CONFIRMED = Codec(calls.ConfirmAnswer, pb.ConfirmResponse)
confirm_call_to_wire, confirm_call_from_wire = _CONFIRM.write, _CONFIRM.read
confirm_answer_to_wire, confirm_answer_from_wire = _CONFIRMED.write, _CONFIRMED.read

_RESTORE = Codec(calls.RestoreCall, pb.RestoreRequest)
restore_call_to_wire, restore_call_from_wire = _RESTORE.write, _RESTORE.read
snapshot_call_to_wire = Codec(calls.FencedCall, pb.SnapshotRequest).write
progress_call_to_wire = Codec(calls.FencedCall, pb.ProgressRequest).write
fenced_call_from_wire: Callable[[pb.SnapshotRequest | pb.ProgressRequest], calls.FencedCall]
fenced_call_from_wire = Codec(calls.FencedCall, pb.ProgressRequest).read  # type: ignore[assignment]

_HISTOGRAM = Codec(Histogram, pb.Histogram, counts=Field(trimmed, lambda counts: padded(counts[:])))
_MEASURES = Codec(Measures, pb.Measures)
measures_to_wire, measures_from_wire = _MEASURES.write, _MEASURES.read

_PICTURE = Codec(Picture, pb.Picture)
_QUARANTINED = Codec(calls.QuarantinedRecord, pb.QuarantinedRecord, fits=True)
_DATASET = Codec(calls.DatasetStatus, pb.DatasetStatus, fits=True)
dataset_status_to_wire, dataset_status_from_wire = _DATASET.write, _DATASET.read

_KINDS = {kind.value: kind for kind in EventKind}
_TRAINER_STATES = {state.value: state for state in calls.TrainerState}
_EVENT = Codec(Event, pb.Event, fits=True, kind=Field(attrgetter("value"), _KINDS.__getitem__))
_DEPARTED = Codec(Departed, pb.Departed, fits=True)
_TRAINER = Codec(
    calls.TrainerStatus,
    pb.TrainerStatus,
    state=Field(attrgetter("value"), lambda state: _TRAINER_STATES.get(state, calls.TrainerState.LIVE)),
)
_STATUS = Codec(
    calls.MasterStatus,
    pb.StatusResponse,
    events=Field(  # those of kinds that a newer master has are left out
        lambda events: list(map(_EVENT.write, events)),
        lambda events: tuple([_EVENT.read(event) for event in events if event.kind in _KINDS]),
    ),
)
status_to_wire, status_from_wire = _STATUS.write, _STATUS.read


# Attribute by attribute: leases ---------------------------------------------------------------------


def lease_call_to_wire(value: calls.LeaseCall, wait_s: float = 0.0) -> pb.LeaseRequest:
    return pb.LeaseRequest(
        session=value.session,
        dataset=value.dataset,
        ledger=value.fence.ledger,
        lineage=value.fence.lineage,
        member=value.fence.member,
        asked=value.asked,
        reported=value.reported,
        request=value.request,
        epoch=value.epoch,
        count=value.count,
        drained=value.drained,
        ahead=value.ahead,
        wait_s=wait_s,
    )


def lease_call_from_wire(message: pb.LeaseRequest) -> calls.LeaseCall:
    return calls.LeaseCall(
        session=message.session,
        dataset=message.dataset,
        fence=calls.Fence(ledger=message.ledger, lineage=message.lineage, member=message.member),
        asked=message.asked,
        reported=message.reported,
        request=message.request,
        epoch=message.epoch,
        count=message.count,
        drained=message.drained,
        ahead=message.ahead,
    )


def lease_answer_to_wire(value: calls.LeaseAnswer) -> pb.LeaseResponse:
    message = pb.LeaseResponse(request=value.request, epoch=value.epoch, state=int(value.state))  # type: ignore[arg-type]
    add = message.grants.add
    for grant in value.grants:
        _fill_grant(add(), grant)
    return message


def _fill_grant(message: pb.Grant, grant: calls.Grant) -> None:
    # One by one, where they will travel: by keywords, and then copied, they would cost twice as much.
    cut = grant.slice
    message.task = grant.task
    message.attempt = grant.attempt
    message.epoch = cut.epoch
    message.shard = cut.shard
    message.skip = cut.skip
    message.limit = cut.limit
    message.bundle = grant.bundle


def lease_answer_from_wire(message: pb.LeaseResponse) -> calls.LeaseAnswer:
    return calls.LeaseAnswer(
        request=message.request,
        epoch=message.epoch,
        state=_member(_STATE_FROM_WIRE, message.state),
        grants=tuple([_grant_from_wire(grant) for grant in message.grants]),
    )


def _grant_from_wire(grant: pb.Grant) -> calls.Grant:
    cut = Slice(epoch=grant.epoch, shard=grant.shard, skip=grant.skip, limit=grant.limit)
    return calls.Grant(task=grant.task, attempt=grant.attempt, slice=cut, bundle=grant.bundle)


# Report -----------------------------------------------------------------------------------------------


def report_call_to_wire(value: calls.ReportCall) -> pb.ReportRequest:
    return pb.ReportRequest(
        session=value.session,
        dataset=value.dataset,
        ledger=value.fence.ledger,
        lineage=value.fence.lineage,
        member=value.fence.member,
        asked=value.asked,
        reported=value.reported,
        request=value.request,
        failures=[
            pb.Failure(task=f.task, attempt=f.attempt, position=f.position, reason=f.reason)
            for f in value.failures
        ],
        acknowledgements=[
            pb.Acknowledgement(task=a.task, attempt=a.attempt, upto=a.upto) for a in value.acknowledgements
        ],
        give_backs=[
            pb.GiveBack(task=g.task, attempt=g.attempt, start=g.start, remainder=g.remainder)
            for g in value.give_backs
        ],
    )


def report_call_from_wire(message: pb.ReportRequest) -> calls.ReportCall:
    # Parts are copied into a list, [:], before they are gone through: the end of an iteration over protobuf's
    # own container is an exception, which costs more than the one part that most calls have.
    return calls.ReportCall(
        session=message.session,
        dataset=message.dataset,
        fence=calls.Fence(ledger=message.ledger, lineage=message.lineage, member=message.member),
        asked=message.asked,
        reported=message.reported,
        request=message.request,
        failures=tuple(
            [
                calls.Failure(task=f.task, attempt=f.attempt, position=f.position, reason=f.reason)
                for f in message.failures[:]
            ]
        ),
        acknowledgements=tuple(
            [
                calls.Acknowledgement(task=a.task, attempt=a.attempt, upto=a.upto)
                for a in message.acknowledgements[:]
            ]
        ),
        give_backs=tuple(
            [
                calls.GiveBack(task=g.task, attempt=g.attempt, start=g.start, remainder=g.remainder)
                for g in message.give_backs[:]
            ]
        ),
    )


def report_answer_to_wire(value: calls.ReportAnswer) -> pb.ReportResponse:
    message = pb.ReportResponse(request=value.request)
    if value.stale:
        message.stale.extend(value.stale)
    message.wanted = value.wanted
    return message


def report_answer_from_wire(message: pb.ReportResponse) -> calls.ReportAnswer:
    return calls.ReportAnswer(request=message.request, stale=tuple(message.stale), wanted=message.wanted)
