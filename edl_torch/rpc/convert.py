"""Conversion of calls and answers to protobuf messages and back, derived from their definitions.

A `Wire` pairs a dataclass with a message of the `.proto`. From the types of the one and the fields of the
other it writes the source of two functions, as `dataclasses` does: every lease and report passes through.

| a field of the dataclass | the message |
| --- | --- |
| number, text, switch, `IntEnum` | has a field of that name and kind |
| `Enum` | has its value |
| dataclass | has a message of that name; where it has none, the dataclass's fields are its own |
| `tuple[X, ...]` and `dict[X, Y]` | repeats the field, and has a map |
| `tuple[X, Y]` | has so many fields, in this order |
| `X \\| None` | leaves the field out for None; what is repeated stands in a message of its own |

A text that is no member of an `Enum` here, because the other side is newer, is read as the field's default;
where it has none, what it belongs to is left out. A number that is none is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cached_property
from itertools import count
from typing import Any, Generic, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from edl_torch.core import calls, status
from edl_torch.core.quarantine import QuarantinedRecord
from edl_torch.core.status import Departed, Event, Measures, padded, trimmed
from edl_torch.errors import EdlError, InvalidArgument
from edl_torch.rpc import edl_torch_pb2 as pb
from edl_torch.shard import MixtureSegment

V = TypeVar("V")
M = TypeVar("M", bound=Message)

# For people: nothing that is in a token may spoil what they see.
_SHOWN = (status.MasterStatus, status.DatasetStatus, QuarantinedRecord, Event, Departed)
_MOST = (1 << 63) - 1


class Wire(Generic[V, M]):
    """How values of a dataclass travel as messages of one kind. The functions are made at first use.

    With `field` a value, of whatever type, is that field of the message.
    """

    def __init__(self, kind: type[V], message: type[M], field: str = "") -> None:
        self.kind = kind
        self.message = message
        self._field = field and message.DESCRIPTOR.fields_by_name[field]

    @cached_property
    def to_wire(self) -> Callable[[V], M]:
        """Function of a value. It raises InvalidArgument for what the message cannot hold: a text that is not
        Unicode, a number beyond 64 bits."""
        _NAMES["new_" + self.message.__name__] = self.message
        if self._field:
            there = f"m.{self._field.name}"
            lines = _setting(self.kind, self._field, "v", there, shown=self.kind in _SHOWN)
        else:
            lines = _writing(self.kind, self.message.DESCRIPTOR, "v", "m")
        return self._function("v", [f"m = new_{self.message.__name__}()", *lines, "return m"], self._unfit)

    @cached_property
    def from_wire(self) -> Callable[[M], V]:
        """Function of a message. An unknown member of an enum raises InvalidArgument in a call, and EdlError
        in an answer: the master is newer."""
        is_call = self.message.__name__.endswith("Request")
        if self._field:
            read = _getting(self.kind, self._field, f"m.{self._field.name}")
        else:
            read = _reading(self.kind, self.message.DESCRIPTOR, "m")
        return self._function("m", [f"return {read}"], self._unfit if is_call else _too_new)

    def _function(
        self, argument: str, lines: list[str], error: Callable[[Exception], EdlError]
    ) -> Callable[[Any], Any]:
        """Compile a function. An error that it meets becomes this one."""
        body = "".join(f"  {line}\n" for line in lines)
        end = " except (TypeError, ValueError) as exc:\n  raise error(exc) from exc\n"
        names = _NAMES | {"error": error}
        exec(f"def convert({argument}):\n try:\n{body}{end}", names)
        made: Callable[[Any], Any] = names["convert"]
        return made

    def _unfit(self, exc: Exception) -> EdlError:
        return InvalidArgument(f"{self.kind.__name__} does not fit the wire format: {exc}")


def _too_new(exc: Exception) -> EdlError:
    return EdlError(
        f"the master answers with {exc}, which this edl_torch does not know: it is older than the master, "
        f"upgrade it"
    )


class _Members(dict[Any, Enum]):
    """Members of an enum by what stands for them on the wire."""

    def __missing__(self, value: object) -> Enum:
        raise ValueError(f"{type(next(iter(self.values()))).__name__} {value}")


def _fit(value: Any) -> Any:
    """Return a number or a text, or what of it fits into a message."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    return min(value, _MOST)


# Names in the source: dataclasses and enums are added as they are met.
_NAMES: dict[str, Any] = {"fit": _fit, "trimmed": trimmed, "padded": padded}
_numbers = count()


def _variable() -> str:
    return f"x{next(_numbers)}"


def _named(value: Any, name: str) -> str:
    _NAMES[name] = value
    return name


def _members(kind: type[Enum]) -> str:
    return _named(_Members({member.value: member for member in kind}), f"{kind.__name__}_members")


def _is_text(kind: Any) -> bool:
    """Whether it is an enum whose values are texts."""
    return isinstance(kind, type) and issubclass(kind, Enum) and not issubclass(kind, int)


def _parts(kind: Any) -> Iterator[tuple[str, Any, bool, Any]]:
    """Name of each field, its type without None, whether it may be None, and its default."""
    hints = get_type_hints(kind)
    for field in fields(kind):
        types = get_args(hints[field.name])
        optional = type(None) in types
        yield field.name, types[0] if optional else hints[field.name], optional, field.default


# Writing ----------------------------------------------------------------------------------------------


def _writing(kind: Any, message: Any, value: str, into: str) -> Iterator[str]:
    """Lines that set the fields of the message `into`: one by one, where they will travel.

    By keywords, and then copied, they would cost twice as much.
    """
    for name, of, optional, _ in _parts(kind):
        given = f"{value}.{name}"
        if name not in message.fields_by_name:  # a dataclass whose fields are the message's own
            yield f"{(inner := _variable())} = {given}"
            yield from _writing(of, message, inner, into)
            continue
        lines = _setting(of, message.fields_by_name[name], given, f"{into}.{name}", shown=kind in _SHOWN)
        if optional:
            yield f"if {given} is not None:"
            lines = (f" {line}" for line in lines)
        yield from lines


def _setting(of: Any, field: Any, given: str, there: str, *, shown: bool) -> Iterator[str]:
    """Lines that set one field."""
    if get_origin(of) is tuple:
        item = get_args(of)[0]
        if field.has_presence:
            yield f"{there}.SetInParent()"  # it may be empty
            (field,) = field.message_type.fields
            there = f"{there}.{field.name}"
        if field.message_type is None:
            trim = "trimmed" if field.containing_type is pb.Histogram.DESCRIPTOR else ""
            yield f"if {given}: {there}.extend({trim}({given}))"
            return
        one, to, add = _variable(), _variable(), _variable()
        yield f"if {given}:"
        yield f" {add} = {there}.add"
        yield f" for {one} in {given}:"
        yield f"  {to} = {add}()"
        if get_origin(item) is tuple:
            yield f"  {_fields_of(to, field.message_type)} = {one}"
        else:
            yield from (f"  {line}" for line in _writing(item, field.message_type, one, to))
    elif get_origin(of) is dict:
        yield f"{there}.update({{fit(k): fit(n) for k, n in {given}.items()}})"
    elif is_dataclass(of):
        one, to = _variable(), _variable()
        yield f"{one}, {to} = {given}, {there}"
        yield f"{to}.SetInParent()"
        yield from _writing(of, field.message_type, one, to)
    elif issubclass(of, Enum):
        yield f"{there} = {given}.value"
    else:
        yield f"{there} = fit({given})" if shown and of in (int, str) else f"{there} = {given}"


def _fields_of(value: str, message: Any) -> str:
    return ", ".join(f"{value}.{field.name}" for field in message.fields)


# Reading ----------------------------------------------------------------------------------------------


def _reading(kind: Any, message: Any, value: str) -> str:
    """Expression that makes a dataclass of a message."""
    made = []
    for name, of, optional, default in _parts(kind):
        field, there = message.fields_by_name.get(name), f"{value}.{name}"
        if field is None:
            read = _reading(of, message, value)
        elif _is_text(of) and default is not MISSING:
            read = f"{_members(of)}.get({there}, {_named(default, f'default_{of.__name__}')})"
        else:
            read = _getting(of, field, there)
        made.append(
            f"{name}={read} if {value}.HasField({name!r}) else None" if optional else f"{name}={read}"
        )
    return f"{_named(kind, kind.__name__)}({', '.join(made)})"


def _getting(of: Any, field: Any, there: str) -> str:
    """Expression that makes a value of one field."""
    if get_origin(of) is tuple:
        item = get_args(of)[0]
        if field.has_presence:
            (field,) = field.message_type.fields
            there = f"{there}.{field.name}"
        # The items are copied into a list, [:], before they are gone through: the end of an iteration over
        # protobuf's own container is an exception, which costs more than the one item that most calls have.
        if field.message_type is None:
            return f"{'padded' if field.containing_type is pb.Histogram.DESCRIPTOR else 'tuple'}({there}[:])"
        # Most calls have no item in most of their fields: then nothing is gone through at all.
        some, one, known = _variable(), _variable(), ""
        if get_origin(item) is tuple:
            read = f"({_fields_of(one, field.message_type)})"
        else:
            read = _reading(item, field.message_type, one)
            for name, kind, _, default in _parts(item):
                if _is_text(kind) and default is MISSING:
                    known = f" if {one}.{name} in {_members(kind)}"
        return f"(tuple([{read} for {one} in {some}[:]{known}]) if ({some} := {there}) else ())"
    if get_origin(of) is dict:
        return f"dict({there})"
    if is_dataclass(of):
        return _reading(of, field.message_type, there)
    return f"{_members(of)}[{there}]" if issubclass(of, Enum) else there


# What travels -----------------------------------------------------------------------------------------

SERVICE = pb.DESCRIPTOR.services_by_name["Master"]
MEASURES = Wire(Measures, pb.Measures)


class Route:
    """Method of the service for one kind of call: `Lease` for a `LeaseCall`.

    `field` names the one field of the answer's message that has all of it; without, the message is it.
    """

    def __init__(self, call: type[calls.Request[Any]], answer: type, field: str = "") -> None:
        self.method = call.__name__.removesuffix("Call")
        method = SERVICE.methods_by_name[self.method]
        self.request: Wire[Any, Any] = Wire(call, GetMessageClass(method.input_type))
        self.answer: Wire[Any, Any] = Wire(answer, GetMessageClass(method.output_type), field)


ROUTES: dict[type[calls.Request[Any]], Route] = {
    route.request.kind: route
    for route in (
        Route(calls.RegisterCall, calls.RegisterAnswer),
        Route(calls.LeaseCall, calls.LeaseAnswer),
        Route(calls.ReportCall, calls.ReportAnswer),
        Route(calls.ConfirmCall, calls.ConfirmAnswer),
        Route(calls.SnapshotCall, str, "token"),
        Route(calls.RestoreCall, int, "lineage"),
        Route(calls.SetWeightsCall, MixtureSegment, "segment"),
        Route(calls.ProgressCall, status.DatasetStatus, "dataset"),
        Route(calls.StatusCall, status.MasterStatus),
    )
}


class MasterStub:
    """Methods of the service over a grpc channel: each takes a request, and by name the options of a call."""

    Attend: Callable[..., Iterator[pb.AttendEvent]]
    Heartbeat: Callable[..., pb.HeartbeatResponse]
    Leave: Callable[..., pb.LeaveResponse]

    def __init__(self, channel: Any) -> None:
        self.methods: dict[str, Callable[..., Any]] = {}
        for method in SERVICE.methods:
            make = channel.unary_stream if method.server_streaming else channel.unary_unary
            self.methods[method.name] = make(
                f"/{SERVICE.full_name}/{method.name}",
                request_serializer=GetMessageClass(method.input_type).SerializeToString,
                response_deserializer=GetMessageClass(method.output_type).FromString,
            )
        self.Attend = self.methods["Attend"]
        self.Heartbeat = self.methods["Heartbeat"]
        self.Leave = self.methods["Leave"]
