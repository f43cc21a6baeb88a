"""Why a master ends our connections, where grpc only says that it did.

Looks once at what answers at an address; sends nothing but the beginning of a TLS handshake. It must not know
calls, and decides nothing where it cannot be sure.
"""

from __future__ import annotations

import socket
import ssl
from enum import Enum

from edl_torch.errors import AccessDenied
from edl_torch.rpc.credentials import Credentials
from edl_torch.system.address import HostPort

LOOKS = 2  # a master that stops ends a connection once, and is then not there
_LONGEST_S = 1.0


class Answer(Enum):
    """What a server answers a caller that begins TLS without a certificate of its own."""

    NO_TLS = "nothing, or no TLS"
    WELCOME = "TLS, and the connection stays"
    CLOSED = "TLS, and the connection is ended"


def explain(address: HostPort, credentials: Credentials, timeout_s: float) -> None:
    """Raise AccessDenied where it is certain that the master will never take this caller's connections.

    Takes up to `timeout_s`. Returns where the master may just be away.
    """
    timeout_s = max(0.05, min(timeout_s, _LONGEST_S) / LOOKS)
    if not credentials.tls:
        if look(address, timeout_s) is not Answer.NO_TLS:
            raise AccessDenied(
                f"the master at {address} speaks TLS: give the authority that signed its certificate, "
                f"EDL_MASTER_TLS_CA=PATH (or EDL_MASTER_TLS=1 for those of the system)"
            )
    elif all(look(address, timeout_s) is Answer.CLOSED for _ in range(LOOKS)):
        fault = "the one given is another, or has expired" if credentials.cert else "none was given"
        raise AccessDenied(
            f"the master at {address} wants callers with a certificate that its --tls-client-ca has signed, "
            f"and {fault}: EDL_MASTER_TLS_CERT=PATH and EDL_MASTER_TLS_KEY=PATH"
        )


def look(address: HostPort, timeout_s: float) -> Answer:
    """Begin TLS at an address. The other's certificate does not matter: nothing is sent to it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((address.host, address.port), timeout_s) as plain,
            context.wrap_socket(plain) as encrypted,
        ):
            return _first_word(encrypted)
    except OSError:
        return Answer.NO_TLS


def _first_word(encrypted: ssl.SSLSocket) -> Answer:
    """The master speaks first in HTTP/2: its settings, or the end."""
    try:
        return Answer.WELCOME if encrypted.recv(1) else Answer.CLOSED
    except TimeoutError:
        return Answer.WELCOME
    except OSError:
        return Answer.CLOSED
