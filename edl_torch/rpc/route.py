"""By which of its addresses the other machines of a job know this one.

Asks the system's routes, and sends nothing. It must not know what listens there.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import closing

from edl_torch.rpc.address import Address, is_loopback_name, plain_ip

ELSEWHERE = "192.0.2.1"  # for documentation (RFC 5737): beyond every network of one's own

Source = Callable[[str, int], Address]


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
