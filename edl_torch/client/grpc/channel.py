"""The grpc channel of a trainer, and its options."""

from __future__ import annotations

import functools
import socket
import ssl
from collections.abc import Callable
from enum import Enum
from typing import Any

import grpc

from edl_torch.core.limits import MESSAGE_BYTES
from edl_torch.errors import AccessDenied, InvalidArgument
from edl_torch.rpc.credentials import METADATA_KEY, AccessToken, Credentials
from edl_torch.system.address import HostPort, is_loopback_name, parse_address

_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # of a ping by grpc for itself, which keepalive waits for
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_retries", 0),  # calls are repeated by the client, with their request numbers
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),  # one connection a client: its break means that client
)


_KINDS_OF_CALLS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


class MasterChannel:
    """A grpc channel that knows its address. Answers everything that a `grpc.Channel` does."""

    def __init__(
        self, channel: grpc.Channel | _WithToken, address: HostPort, credentials: Credentials
    ) -> None:
        self.address = address
        self.credentials = credentials
        self._channel = channel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def explain(self, timeout_s: float) -> None:
        """Raise AccessDenied where the master will never take this channel's connections."""
        explain(self.address, self.credentials, timeout_s)

    def __repr__(self) -> str:
        return f"<MasterChannel {self.address}>"


def build_channel(address: str, credentials: Credentials | None = None) -> MasterChannel:
    """A channel to the master at `host:port`; connects at its first call.

    Without `credentials` those that the environment names are used (`Credentials.from_env`). Raises
    InvalidArgument for anything but `host:port` with a port of 1 or more, for files that cannot be used, and
    for a token that would cross a network in the clear.
    """
    where = parse_address(address, least_port=1)
    given = Credentials.from_env() if credentials is None else credentials
    if given.token is not None and not (given.tls or given.insecure or is_loopback_name(where.host)):
        raise InvalidArgument(
            f"whoever listens on the way to {where} could read the token: use TLS (EDL_MASTER_TLS_CA=PATH "
            "or EDL_MASTER_TLS=1), or EDL_MASTER_INSECURE=1 if the network is your own"
        )
    options: list[tuple[str, int | str]] = [*channel_options(where)]
    if given.name is not None:
        options.append(("grpc.ssl_target_name_override", given.name))
    tls = given.channel_credentials()
    channel = (
        grpc.insecure_channel(str(where), options=options)
        if tls is None
        else grpc.secure_channel(str(where), tls, options=options)
    )
    return MasterChannel(channel if given.token is None else _WithToken(channel, given.token), where, given)


class _WithToken:
    """A channel that puts the token on every call; an interceptor of grpc would cost more."""

    def __init__(self, channel: grpc.Channel, token: AccessToken) -> None:
        self._channel = channel
        self._entry = (METADATA_KEY, token.header)

    def __getattr__(self, name: str) -> Any:
        made = getattr(self._channel, name)
        return functools.partial(self._make, made) if name in _KINDS_OF_CALLS else made

    def _make(self, make: Callable[..., Any], *arguments: Any, **options: Any) -> _Carrier:
        return _Carrier(make(*arguments, **options), self._entry)


class _Carrier:
    """One call of a stub, with an entry of metadata added to the caller's own."""

    def __init__(self, call: Any, entry: tuple[str, str]) -> None:
        self._call = call
        self._entry = entry

    def __call__(self, request: Any, **options: Any) -> Any:
        return self._call(request, **self._with_entry(options))

    def with_call(self, request: Any, **options: Any) -> Any:
        """As grpc has it."""
        return self._call.with_call(request, **self._with_entry(options))

    def future(self, request: Any, **options: Any) -> Any:
        """As grpc has it."""
        return self._call.future(request, **self._with_entry(options))

    def _with_entry(self, options: dict[str, Any]) -> dict[str, Any]:
        options["metadata"] = (*(options.get("metadata") or ()), self._entry)
        return options


def channel_options(address: HostPort) -> list[tuple[str, int]]:
    """The options for a master at `address`: this machine is never reached through a proxy."""
    if is_loopback_name(address.host):
        return [*_OPTIONS, ("grpc.enable_http_proxy", 0)]
    return list(_OPTIONS)


# Why a master ends our connections, where grpc only says that it did ----------------------------------

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
