"""The grpc channel of a trainer: to an address, or to a master that may come back at another one.

It must not know who is asked for the new address, nor what is called.
"""

from __future__ import annotations

import functools
import logging
import socket
import ssl
import threading
from collections.abc import Callable
from enum import Enum
from typing import Any

import grpc

from edl_torch.core.limits import MESSAGE_BYTES
from edl_torch.errors import AccessDenied, EdlError, InvalidArgument
from edl_torch.rpc.credentials import METADATA_KEY, Credentials
from edl_torch.rpc.status import is_masters_own
from edl_torch.system.address import HostPort, is_loopback_name, parse_address
from edl_torch.system.processes import ForkGuard

log = logging.getLogger("edl_torch.client")

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
    """A grpc channel that knows its address. Answers everything that a `grpc.Channel` does.

    It puts its token on every call: an interceptor of grpc would cost more.
    """

    def __init__(self, channel: grpc.Channel, address: HostPort, credentials: Credentials) -> None:
        self.address = address
        self.credentials = credentials
        self._channel = channel

    def __getattr__(self, name: str) -> Any:
        made, token = getattr(self._channel, name), self.credentials.token
        if token is None or name not in _KINDS_OF_CALLS:
            return made
        entry = (METADATA_KEY, token.header)
        return lambda *arguments, **options: _Carrier(made(*arguments, **options), entry)

    def explain(self, timeout_s: float) -> str:
        """Raise AccessDenied where the master will never take this channel's connections; see `explain`."""
        return explain(self.address, self.credentials, timeout_s)

    def __repr__(self) -> str:
        return f"<MasterChannel {self.address}>"


class _Carrier:
    """One call of a stub, with an entry of metadata added to the caller's own."""

    def __init__(self, call: Any, entry: tuple[str, str]) -> None:
        self._call = call
        self._entry = entry

    def __call__(self, request: Any, **options: Any) -> Any:
        return self._carry(self._call, request, **options)

    def __getattr__(self, name: str) -> Any:  # with_call, future
        return functools.partial(self._carry, getattr(self._call, name))

    def _carry(self, call: Any, request: Any, **options: Any) -> Any:
        options["metadata"] = (*(options.get("metadata") or ()), self._entry)
        return call(request, **options)


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
    return MasterChannel(channel, where, given)


def channel_options(address: HostPort) -> list[tuple[str, int]]:
    """The options for a master at `address`: this machine is never reached through a proxy."""
    if is_loopback_name(address.host):
        return [*_OPTIONS, ("grpc.enable_http_proxy", 0)]
    return list(_OPTIONS)


# A master that moves, as one does that a cluster starts again -------------------------------------------

LOOK_EVERY_S = 0.5
JOIN_S = 2.0


class FollowingChannel:
    """Takes the place of a `MasterChannel`.

    Calls go to where the master was seen last. A call or stream that fails raises a doubt; then one thread
    asks where the master is, until a call is answered or there is a new address.
    `find()` returns the master's `host:port`; an EdlError means that nobody knows it now.
    `credentials` are as those of `build_channel`.
    """

    def __init__(
        self,
        find: Callable[[], str],
        credentials: Credentials | None = None,
        *,
        look_every_s: float = LOOK_EVERY_S,
    ) -> None:
        self._find = find
        self._credentials = credentials
        self._look_every_s = look_every_s
        self._closed = threading.Event()
        self._doubt = threading.Event()
        self._text = find()
        self._channel = build_channel(self._text, credentials)
        self._guard = ForkGuard(self._channel.address)
        self._thread = threading.Thread(target=self._follow, name="edl-follow", daemon=True)
        self._thread.start()

    @property
    def address(self) -> HostPort:
        """Where the master was seen last."""
        return self._channel.address

    @property
    def current(self) -> MasterChannel:
        return self._channel

    def explain(self, timeout_s: float) -> str:
        """As `MasterChannel.explain`, of the address where the master was seen last."""
        return self._channel.explain(timeout_s)

    def unary_unary(self, *arguments: Any, **options: Any) -> FollowingCall:
        """As a grpc channel's."""
        return FollowingCall(self, lambda channel: channel.unary_unary(*arguments, **options))

    def unary_stream(self, *arguments: Any, **options: Any) -> FollowingStream:
        """As a grpc channel's."""
        return FollowingStream(self, lambda channel: channel.unary_stream(*arguments, **options))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def doubt(self) -> None:
        """Note that a call failed: the master may have moved."""
        self._guard.refresh()
        self._doubt.set()

    def trust(self) -> None:
        """Note that the master answered."""
        self._doubt.clear()

    def close(self) -> None:
        """End the thread and the connection."""
        self._closed.set()
        self._doubt.set()
        if self._thread is not threading.current_thread():
            self._thread.join(JOIN_S)
        self._channel.close()
        self._guard.release()

    def _follow(self) -> None:
        while not self._closed.is_set():
            self._doubt.wait()
            self._find_again()
            self._closed.wait(self._look_every_s)

    def _find_again(self) -> None:
        try:
            found = self._find()
            if found != self._text and not self._closed.is_set():
                self._move(found)
        except EdlError as error:
            log.debug("nobody knows where the master is: %s", error)
        except Exception:  # the top of a thread: whom we ask may fail in ways of its own
            log.exception("cannot ask where the master is; asking again")

    def _move(self, found: str) -> None:
        channel = build_channel(found, self._credentials)
        guard = ForkGuard(channel.address)
        log.info("the master moved from %s to %s", self._text, found)
        old_channel, old_guard = self._channel, self._guard
        self._channel, self._guard, self._text = channel, guard, found
        self._doubt.clear()
        old_channel.close()  # its calls end, and are repeated here
        old_guard.release()

    def __repr__(self) -> str:
        return f"<FollowingChannel {self._text}{' in doubt' if self._doubt.is_set() else ''}>"


class FollowingCall:
    """One method of a stub, made anew for each channel."""

    def __init__(self, channel: FollowingChannel, make: Callable[[MasterChannel], Any]) -> None:
        self._channel = channel
        self._make = make
        self._made: tuple[MasterChannel, Any] | None = None

    def __call__(self, request: Any, **options: Any) -> Any:
        try:
            answer = self._call(request, **options)
        except grpc.RpcError as error:
            if is_masters_own(error):
                self._channel.trust()
            else:
                self._channel.doubt()
            raise
        self._channel.trust()
        return answer

    def _call(self, request: Any, **options: Any) -> Any:
        channel, method = self._current()
        try:
            return method(request, **options)
        except ValueError:  # grpc's word for a channel that was closed meanwhile
            if channel is self._channel.current:
                raise
            return self._current()[1](request, **options)

    def _current(self) -> tuple[MasterChannel, Any]:
        channel, made = self._channel.current, self._made
        if made is None or made[0] is not channel:
            made = self._made = (channel, self._make(channel))
        return made


class FollowingStream(FollowingCall):
    """A method that streams: the end of a stream counts as a failed call; so does opening another one."""

    _has_ended = False

    def __call__(self, request: Any, **options: Any) -> Any:
        stream = self._call(request, **options)
        if self._has_ended:  # it may wait for a master that is there no more, and nobody else may call
            self._channel.doubt()
        stream.add_done_callback(self._end)
        return stream

    def _end(self, _: Any) -> None:
        self._has_ended = True
        self._channel.doubt()


# Why a master ends our connections, where grpc only says that it did ----------------------------------

LOOKS = 2  # a master that stops ends a connection once, and is then not there
_LONGEST_S = 1.0


class TlsAnswer(Enum):
    """What a server answers a caller that begins TLS without a certificate of its own."""

    NO_TLS = "nothing, or no TLS"
    WELCOME = "TLS, and the connection stays"
    CLOSED = "TLS, and the connection is ended"


def explain(address: HostPort, credentials: Credentials, timeout_s: float) -> str:
    """Raise AccessDenied where it is certain that the master will never take this caller's connections.

    Takes up to `timeout_s`, and as long as it takes to look up the name. Returns what is wrong and may become
    right, such as a name that a cluster has not made yet; "" where the master may just be away.
    """
    try:
        socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as exc:
        return f"the name {address.host!r} does not resolve here ({exc})"
    timeout_s = max(0.05, min(timeout_s, _LONGEST_S) / LOOKS)
    if not credentials.tls:
        if begin_tls(address, timeout_s) is not TlsAnswer.NO_TLS:
            raise AccessDenied(
                f"the master at {address} speaks TLS: give the authority that signed its certificate, "
                f"EDL_MASTER_TLS_CA=PATH (or EDL_MASTER_TLS=1 for those of the system)"
            )
    elif all(begin_tls(address, timeout_s) is TlsAnswer.CLOSED for _ in range(LOOKS)):
        fault = "the one given is another, or has expired" if credentials.cert else "none was given"
        raise AccessDenied(
            f"the master at {address} wants callers with a certificate that its --tls-client-ca has signed, "
            f"and {fault}: EDL_MASTER_TLS_CERT=PATH and EDL_MASTER_TLS_KEY=PATH"
        )
    return ""


def begin_tls(address: HostPort, timeout_s: float) -> TlsAnswer:
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
        return TlsAnswer.NO_TLS


def _first_word(encrypted: ssl.SSLSocket) -> TlsAnswer:
    """The master speaks first in HTTP/2: its settings, or the end."""
    try:
        return TlsAnswer.WELCOME if encrypted.recv(1) else TlsAnswer.CLOSED
    except TimeoutError:
        return TlsAnswer.WELCOME
    except OSError:
        return TlsAnswer.CLOSED
