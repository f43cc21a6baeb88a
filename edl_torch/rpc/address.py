"""Addresses of masters: `host:port`, `name:port` or `[ipv6]:port`.

It must not import grpc, so that a trainer without a master never does.
"""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

from edl_torch.errors import InvalidArgument

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True)
class HostPort:
    """Address of a master. `host` has no brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def resolve(self) -> frozenset[Address]:
        """Return the IP addresses of the host. Raises OSError (socket.gaierror) when there are none."""
        found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        return frozenset(plain_ip(str(row[4][0])) for row in found)


def parse_address(text: str, *, least_port: int = 0) -> HostPort:
    """Read `host:port`. Raises InvalidArgument that says what is wrong with `text`."""
    host, colon, port = text.strip().rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host or (":" in host and not bracketed):
        raise InvalidArgument(f"address {text!r} is not host:port; an example: 127.0.0.1:50001")
    host = host[1:-1] if bracketed else host
    if not host or any(c.isspace() or c in "/[]" for c in host):
        raise InvalidArgument(f"address {text!r}: {host!r} is not a host name or an IP address")
    if not (port.isascii() and port.isdigit() and least_port <= int(port) < 1 << 16):
        raise InvalidArgument(
            f"address {text!r}: the port must be a number from {least_port} to 65535, not {port!r}"
        )
    return HostPort(host, int(port))


def is_loopback_name(host: str) -> bool:
    """Return whether a host means this machine by its very name, on every machine."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def plain_ip(text: str) -> Address:
    """Return an IP address without scope; an IPv4 address that is written as IPv6 becomes what it means."""
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address
