"""Servicer of the master's grpc calls: converts a call, hands it to the host, converts the answer.

It must not touch the dispatcher but through the host, nor answer but through `durably`: an answer must not
leave before the journal has what it says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from edl_torch.errors import EdlError, InvalidArgument
from edl_torch.master.host import MasterHost
from edl_torch.rpc import convert
from edl_torch.rpc import edl_torch_pb2 as pb
from edl_torch.rpc.status import to_status

SERVICE = convert.SERVICE.full_name

Context = grpc.aio.ServicerContext[Any, Any]
Handler = Callable[[Any, Context], Awaitable[Any]]


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
    """Methods of `service Master`, on the host's event loop: `answers` has them by name."""

    def __init__(self, host: MasterHost) -> None:
        self._host = host
        self._limits = host.dispatcher.limits
        answers: dict[str, Handler] = {
            "Attend": self._attend,
            "Heartbeat": self._heartbeat,
            "Leave": self._leave,
            **{route.method: partial(self._answer, route) for route in convert.ROUTES.values()},
        }
        self.answers = {name: self._guarded(answer) for name, answer in answers.items()}

    def add_to(self, server: grpc.aio.Server) -> None:
        handlers: dict[str, Any] = {}
        for method in convert.SERVICE.methods:
            stream, unary = grpc.unary_stream_rpc_method_handler, grpc.unary_unary_rpc_method_handler
            handlers[method.name] = (stream if method.server_streaming else unary)(
                self.answers[method.name],
                request_deserializer=reader(GetMessageClass(method.input_type)),
                response_serializer=GetMessageClass(method.output_type).SerializeToString,
            )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    def _guarded(self, answer: Handler) -> Handler:
        """Turn errors of ours into statuses; any other error is a bug, logged by grpc with its traceback.

        So a message that cannot be read must not raise in grpc: a stranger could fill the log with it.
        """

        async def guard(request: Any, context: Context) -> Any:
            try:
                if isinstance(request, Unreadable):
                    raise InvalidArgument(f"not a message of this call: {request.why}")
                return await self._host.durably(answer(request, context))
            except EdlError as error:
                code, details, metadata = to_status(error)
                await context.abort(code, details, metadata)

        return guard

    async def _answer(self, route: convert.Route, request: Any, context: Context) -> Any:
        self._check_parts(request)
        wait_s = request.wait_s if isinstance(request, pb.LeaseRequest) else 0.0
        return route.answer.to_wire(await self._host.call(route.request.from_wire(request), wait_s))

    def _check_parts(self, request: Any) -> None:
        """Refuse a message of too many parts before any of them is looked at."""
        if isinstance(request, pb.ReportRequest):
            parts = len(request.failures) + len(request.acknowledgements) + len(request.give_backs)
            self._limits.check_entries("outcomes", parts)
        elif isinstance(request, pb.ConfirmRequest):
            self._limits.check_entries("leases", len(request.leases))
        elif isinstance(request, pb.RegisterRequest):
            mixed = sum(len(c.sources) for c in request.registration.components.components)
            self._limits.check_sources(len(request.registration.sources.sources) + mixed)

    async def _attend(self, request: pb.AttendRequest, context: Context) -> None:
        # A coroutine that writes, not a generator: its `finally` runs at once when the stream breaks.
        with self._host.attending(request.session) as stream:
            await self._host.committed()
            members = self._host.dispatcher.members
            attending = pb.Attending(
                ledger=self._host.dispatcher.ledger_id,
                lease_timeout_s=members.lease_timeout_s,
                grace_s=members.grace_s,
                progress_timeout_s=members.progress_timeout_s,
            )
            while not stream.ended:
                await context.write(pb.AttendEvent(attending=attending))
                until = asyncio.get_running_loop().time() + members.heartbeat_s
                while (dataset := await stream.next(until)) is not None:
                    await context.write(pb.AttendEvent(wanted=pb.Wanted(dataset=dataset)))

    async def _heartbeat(self, request: pb.HeartbeatRequest, context: Context) -> pb.HeartbeatResponse:
        progress = request.progress if request.HasField("progress") else None
        measures = convert.MEASURES.from_wire(request.measures) if request.HasField("measures") else None
        self._host.apply(
            lambda dispatcher, now: dispatcher.heartbeat(
                request.session, request.member, now, progress, measures
            )
        )
        return pb.HeartbeatResponse()

    async def _leave(self, request: pb.LeaveRequest, context: Context) -> pb.LeaveResponse:
        self._host.leave(request.session, request.member)
        return pb.LeaveResponse()
