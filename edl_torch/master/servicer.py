"""Servicer of the master's grpc calls: converts a call, hands it to the host, converts the answer.

It must not touch the dispatcher but through the host, nor answer but through `durably`: an answer must not
leave before the journal has what it says.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf import message_factory
from google.protobuf.message import DecodeError

from edl_torch.core import calls
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.errors import EdlError, InvalidArgument
from edl_torch.master.host import MasterHost
from edl_torch.rpc import convert
from edl_torch.rpc import edl_torch_pb2 as pb
from edl_torch.rpc.status import to_status

_SERVICE = pb.DESCRIPTOR.services_by_name["Master"]
SERVICE = _SERVICE.full_name

Q = TypeVar("Q")
R = TypeVar("R")
Context = grpc.aio.ServicerContext[Any, Any]
Handler = Callable[["MasterServicer", Q, Context], Awaitable[R]]


def guarded(handler: Handler[Q, R]) -> Handler[Q, R]:
    """Turn errors of ours into statuses; any other error is a bug and is logged by grpc with its traceback.

    So a message that cannot be read must not raise in grpc: a stranger could fill the log with it.
    """

    @functools.wraps(handler)
    async def guard(self: MasterServicer, request: Q, context: Context) -> R:
        try:
            if isinstance(request, Unreadable):
                raise InvalidArgument(f"not a message of this call: {request.why}")
            return await self._host.durably(handler(self, request, context))
        except EdlError as error:
            code, details, metadata = to_status(error)
            await context.abort(code, details, metadata)

    return guard


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Bytes that are no message, in place of one."""

    why: str


def reader(kind: Any) -> Callable[[bytes], Any]:
    """Return a function that reads messages of this kind."""
    read = kind.FromString

    def read_or_say_why(raw: bytes) -> Any:
        try:
            return read(raw)
        except DecodeError as exc:
            return Unreadable(str(exc))

    return read_or_say_why


class MasterServicer:
    """Methods of `service Master`, on the host's event loop."""

    def __init__(self, host: MasterHost) -> None:
        self._host = host
        self._limits = host.dispatcher.limits

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add the methods to this server."""
        handlers = {method.name: self._handler(method) for method in _SERVICE.methods}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    def _handler(self, method: Any) -> Any:
        make = (
            grpc.unary_stream_rpc_method_handler
            if method.server_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        return make(
            getattr(self, method.name),
            request_deserializer=reader(message_factory.GetMessageClass(method.input_type)),
            response_serializer=message_factory.GetMessageClass(method.output_type).SerializeToString,
        )

    @guarded
    async def Register(self, request: pb.RegisterRequest, context: Context) -> pb.RegisterResponse:
        self._limits.check_sources(len(request.registration.sources.sources))
        answer = self._host.register(convert.REGISTER.from_wire(request))
        return convert.REGISTERED.to_wire(answer)

    @guarded
    async def Attend(self, request: pb.AttendRequest, context: Context) -> None:
        # A coroutine that writes, not a generator: its `finally` runs at once when the stream breaks.
        with self._host.attending(request.session) as stream:
            await self._host.committed()
            asks = pb.AttendEvent(attending=_attending(self._host.dispatcher))
            while not stream.ended:
                await context.write(asks)
                until = asyncio.get_running_loop().time() + self._host.dispatcher.members.heartbeat_s
                while (dataset := await stream.next(until)) is not None:
                    await context.write(pb.AttendEvent(wanted=pb.Wanted(dataset=dataset)))

    @guarded
    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Context) -> pb.HeartbeatResponse:
        progress = request.progress if request.HasField("progress") else None
        measures = convert.MEASURES.from_wire(request.measures) if request.HasField("measures") else None
        self._host.apply(
            lambda dispatcher, now: dispatcher.heartbeat(
                request.session, request.member, now, progress, measures
            )
        )
        return pb.HeartbeatResponse()

    @guarded
    async def Lease(self, request: pb.LeaseRequest, context: Context) -> pb.LeaseResponse:
        answer = await self._host.lease(convert.LEASE.from_wire(request), request.wait_s)
        return convert.LEASED.to_wire(answer)

    @guarded
    async def Report(self, request: pb.ReportRequest, context: Context) -> pb.ReportResponse:
        parts = len(request.failures) + len(request.acknowledgements) + len(request.give_backs)
        self._limits.check_entries("outcomes", parts)
        call = convert.REPORT.from_wire(request)
        return convert.REPORTED.to_wire(self._host.apply(lambda d, now: d.report(call, now)))

    @guarded
    async def Confirm(self, request: pb.ConfirmRequest, context: Context) -> pb.ConfirmResponse:
        self._limits.check_entries("leases", len(request.leases))
        call = convert.CONFIRM.from_wire(request)
        return convert.CONFIRMED.to_wire(self._host.apply(lambda d, now: d.confirm(call, now)))

    @guarded
    async def Snapshot(self, request: pb.SnapshotRequest, context: Context) -> pb.SnapshotResponse:
        call = convert.SNAPSHOT.from_wire(request)
        return pb.SnapshotResponse(token=self._host.apply(lambda d, now: d.snapshot(call, now)))

    @guarded
    async def Restore(self, request: pb.RestoreRequest, context: Context) -> pb.RestoreResponse:
        call = convert.RESTORE.from_wire(request)
        return pb.RestoreResponse(lineage=self._host.restore(call))

    @guarded
    async def Progress(self, request: pb.ProgressRequest, context: Context) -> pb.ProgressResponse:
        call = convert.PROGRESS.from_wire(request)
        found = self._host.apply(lambda d, now: d.progress(call, now))
        return pb.ProgressResponse(dataset=convert.DATASET_STATUS.to_wire(found))

    @guarded
    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusResponse:
        if not request.HasField("dataset"):
            return convert.STATUS.to_wire(self._host.status())
        return convert.STATUS.to_wire(self._host.apply(lambda d, now: _status_of(d, request.dataset, now)))

    @guarded
    async def Leave(self, request: pb.LeaveRequest, context: Context) -> pb.LeaveResponse:
        self._host.leave(request.session, request.member)
        return pb.LeaveResponse()


def _attending(dispatcher: Dispatcher) -> pb.Attending:
    members = dispatcher.members
    return pb.Attending(
        ledger=dispatcher.ledger_id,
        lease_timeout_s=members.lease_timeout_s,
        grace_s=members.grace_s,
        progress_timeout_s=members.progress_timeout_s,
    )


def _status_of(dispatcher: Dispatcher, dataset: str, now: float) -> calls.MasterStatus:
    found = dispatcher.dataset_status(dataset, now)
    return calls.MasterStatus(
        ledger=dispatcher.ledger_id, durable=dispatcher.durable, datasets=(found,), trainers=()
    )
