"""The grpc channel of a trainer, and its options."""

from __future__ import annotations

import ipaddress
from typing import Any

import grpc

from edl_torch.rpc.address import HostPort, parse_address

MESSAGE_BYTES = 64 << 20

_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_retries", 0),  # calls are repeated by the client, with their request numbers
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),  # one connection a client: its break means that client
)


class MasterChannel:
    """A grpc channel that knows its address. Answers everything that a `grpc.Channel` does."""

    def __init__(self, channel: grpc.Channel, address: HostPort) -> None:
        self.address = address
        self._channel = channel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def __repr__(self) -> str:
        return f"<MasterChannel {self.address}>"


def build_channel(address: str) -> MasterChannel:
    """A channel to the master at `host:port`; connects at its first call.

    Raises InvalidArgument for anything but `host:port` with a port of 1 or more.
    """
    where = parse_address(address, least_port=1)
    return MasterChannel(grpc.insecure_channel(str(where), options=channel_options(where)), where)


def channel_options(address: HostPort) -> list[tuple[str, int]]:
    """The options for a master at `address`: this machine is never reached through a proxy."""
    if _is_loopback(address.host):
        return [*_OPTIONS, ("grpc.enable_http_proxy", 0)]
    return list(_OPTIONS)


def _is_loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
