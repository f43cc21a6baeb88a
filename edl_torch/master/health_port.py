"""Health checks on an address of their own, without TLS: probes of Kubernetes have no certificates.

Nothing else is answered there.
"""

from __future__ import annotations

import grpc.aio

from edl_torch.errors import InvalidArgument, MasterStartError
from edl_torch.master.health import Health
from edl_torch.system.address import HostPort, parse_address

_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", 1024),
    ("grpc.max_concurrent_streams", 8),
)
_MOST_CALLS = 64  # at once, those that watch included
_GRACE_S = 1.0  # at the end, for telling those that watch


class HealthPort:
    """Server for one `Health`. `start` and `stop` run on one event loop."""

    def __init__(self, health: Health, address: str) -> None:
        try:
            self._wanted = parse_address(address)
        except InvalidArgument as exc:
            raise MasterStartError(f"cannot answer health checks: {exc}") from exc
        self._server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=_MOST_CALLS)
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
