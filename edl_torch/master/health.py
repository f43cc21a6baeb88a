"""Health checks of orchestrators, `grpc.health.v1`: whether the master answers calls, and nothing else.

Open to everybody, so that probes need no secret: it must not keep anything for a caller.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2 as pb

from edl_torch.errors import InvalidArgument, MasterStartError
from edl_torch.system import descriptors
from edl_torch.system.address import HostPort, parse_address

SERVICE = "grpc.health.v1.Health"

MOST_WATCHERS = 64  # whoever watches needs no token, and each costs memory for as long as he likes

Context = grpc.aio.ServicerContext[Any, Any]
_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", 1024),
    ("grpc.max_concurrent_streams", 8),
)
_MOST_CALLS = 64  # at once, those that watch included
_GRACE_S = 1.0  # at the end, for telling those that watch


class Health:
    """Health service: SERVING until `stop()`, and never again after it.

    `services` are the full names that may be asked for, beside '' for the whole master.
    """

    def __init__(self, *services: str) -> None:
        self._services = frozenset((*services, ""))
        self._stopped = asyncio.Event()
        self._watchers = 0

    def add_to(self, server: grpc.aio.Server) -> None:
        wire = {
            "request_deserializer": pb.HealthCheckRequest.FromString,
            "response_serializer": pb.HealthCheckResponse.SerializeToString,
        }
        handlers = {
            "Check": grpc.unary_unary_rpc_method_handler(self.Check, **wire),
            "Watch": grpc.unary_stream_rpc_method_handler(self.Watch, **wire),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    def stop(self) -> None:
        """Answer NOT_SERVING from now on, and end all watches, so that none delays the master's end."""
        self._stopped.set()

    @property
    def serving(self) -> bool:
        return not self._stopped.is_set()

    async def Check(self, request: pb.HealthCheckRequest, context: Context) -> pb.HealthCheckResponse:
        """Answer with the state now."""
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service here")
        return _answer(self.serving)

    async def Watch(self, request: pb.HealthCheckRequest, context: Context) -> None:
        """Answer with the state now, and again when the master stops."""
        if self._watchers >= MOST_WATCHERS:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MOST_WATCHERS} watch already: ask by Check"
            )
        known = request.service in self._services
        serving = self.serving  # as told first: it may change while that is on its way
        self._watchers += 1
        try:
            await context.write(_answer(serving if known else None))
            await self._stopped.wait()
            if known and serving:
                await context.write(_answer(False))
        finally:
            self._watchers -= 1

    def __repr__(self) -> str:
        return f"<Health {'serving' if self.serving else 'stopped'}>"


def _answer(serving: bool | None) -> pb.HealthCheckResponse:
    """Return what to say; None of a service that is not known."""
    return pb.HealthCheckResponse(
        status="SERVICE_UNKNOWN" if serving is None else "SERVING" if serving else "NOT_SERVING"
    )


class HealthPort:
    """Server for one `Health`. `start` and `stop` run on one event loop."""

    def __init__(self, health: Health, address: str) -> None:
        try:
            self._wanted = parse_address(address)
        except InvalidArgument as exc:
            raise MasterStartError(f"cannot answer health checks: {exc}") from exc
        self._server = grpc.aio.server(
            options=(*_OPTIONS, *descriptors.bounded(descriptors.connections(MOST_WATCHERS))),
            maximum_concurrent_rpcs=_MOST_CALLS,
        )
        health.add_to(self._server)

    async def start(self) -> HostPort:
        """Bind and answer. Returns the address with its real port; raises MasterStartError."""
        try:
            port = self._server.add_insecure_port(str(self._wanted))
        except RuntimeError as exc:
            raise MasterStartError(
                f"cannot answer health checks on {self._wanted}: the port is in use, or the address is not "
                f"this machine's"
            ) from exc
        await self._server.start()
        return HostPort(self._wanted.host, port)

    async def stop(self) -> None:
        """Stop once all watches have ended, which `Health.stop` begins."""
        await self._server.stop(_GRACE_S)

    def __repr__(self) -> str:
        return f"<HealthPort {self._wanted}>"
