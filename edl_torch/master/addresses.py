"""Addresses that a master may listen on: free ones, and open to other machines only behind locks."""

from __future__ import annotations

import contextlib
import errno
import logging
import socket

from edl_torch.errors import InvalidArgument, MasterStartError
from edl_torch.rpc.credentials import ServerCredentials
from edl_torch.system.address import HostPort, parse_address

log = logging.getLogger("edl_torch.master")

_HINTS = {
    errno.EADDRINUSE: ": another process has this port; stop it, or take another one (port 0 picks one)",
    errno.EADDRNOTAVAIL: ": no interface of this machine has this address",
    errno.EACCES: ": ports below 1024 need privileges; take a higher one",
}


def checked_address(text: str, *, insecure: bool, credentials: ServerCredentials) -> HostPort:
    """Return the address to listen on. Raises MasterStartError for a wrong one, or one too open.

    Warns of one that is open and may be, as it is `insecure`.
    """
    address, open_how = _looked_up(text, insecure=insecure, credentials=credentials)
    if open_how:
        log.warning("listening on %s though %s (--insecure)", text, open_how)
    return address


def check_address(text: str, *, insecure: bool, credentials: ServerCredentials) -> None:
    """Raise MasterStartError unless a master may listen there, and could now."""
    check_free(_looked_up(text, insecure=insecure, credentials=credentials)[0])


def _looked_up(text: str, *, insecure: bool, credentials: ServerCredentials) -> tuple[HostPort, str]:
    """Return the address, and how it is open to others; '' where it is not."""
    try:
        address = parse_address(text)
        found = address.resolve()
    except InvalidArgument as exc:
        raise MasterStartError(f"cannot listen: {exc}") from exc
    except OSError as exc:
        raise MasterStartError(f"cannot listen on {text}: host {address.host!r} is unknown: {exc}") from exc
    exposed = sorted(str(ip) for ip in found if not ip.is_loopback)
    if not exposed or credentials.closed:
        return address, ""
    open_how = _exposure(credentials)
    if not insecure:
        raise MasterStartError(
            f"{text} can be reached from other machines ({', '.join(exposed)}), and {open_how}: give "
            "--tls-cert, --tls-key and --token-file (or --tls-client-ca), listen on 127.0.0.1, or pass "
            "--insecure if the network is your own"
        )
    return address, open_how


def _exposure(credentials: ServerCredentials) -> str:
    if credentials.encrypted:
        return "whoever reaches it may use it"
    if credentials.token is not None:
        return "whoever listens there can read the token"
    return "whoever reaches it may use it, unencrypted"


def check_free(address: HostPort) -> None:
    """Raise MasterStartError with the system's own reason when the address cannot be bound."""
    for family, kind, protocol, _, where in socket.getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM
    ):
        with contextlib.closing(socket.socket(family, kind, protocol)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(where)
                probe.listen(1)
            except OSError as exc:
                hint = _HINTS.get(exc.errno or 0, "")
                raise MasterStartError(f"cannot listen on {address}: {exc.strerror}{hint}") from exc
