"""Addresses, `host:port`, `name:port` or `[ipv6]:port`, and the one by which other machines know this one.

Resolves names and asks the system's routes; it sends nothing, and must not know what listens there.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

from edl_torch.errors import InvalidArgument

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
ELSEWHERE = "192.0.2.1"  # for documentation (RFC 5737): beyond every network of one's own
Source = Callable[[str, int], Address]  # of packets to (host, port)


@dataclass(frozen=True, slots=True)
class HostPort:
    """Where something listens. `host` has no brackets."""

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


def address_towards(host: str, port: int, source: Source | None = None) -> Address:
    """This machine's address on its way to the job's meeting place, which may be on it. Raises OSError."""
    source = source or _source
    found = source(host, port)
    if not found.is_loopback or is_loopback_name(host):
        return found
    # The meeting place's own machine, which /etc/hosts often calls 127.0.1.1: what do others know it by?
    try:
        return source(ELSEWHERE, port)
    except OSError:  # there are no others
        return found


def _source(host: str, port: int) -> Address:
    """The address from which this machine would speak to that one."""
    row = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with closing(socket.socket(row[0], row[1], row[2])) as probe:
        probe.connect(row[4])
        return plain_ip(str(probe.getsockname()[0]))
