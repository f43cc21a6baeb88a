"""A channel to a master that may come back at another address, as one does that a cluster starts again.

Calls go to where the master was seen last. A call or stream that fails raises a doubt; then one thread asks
where the master is, until a call is answered or there is a new address. It must not know who is asked.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import grpc

from edl_torch.client.grpc.channel import MasterChannel, build_channel
from edl_torch.errors import EdlError
from edl_torch.rpc.credentials import Credentials
from edl_torch.rpc.status import is_masters_own
from edl_torch.system.address import HostPort
from edl_torch.system.forks import ForkGuard

log = logging.getLogger("edl_torch.client")

LOOK_EVERY_S = 0.5
JOIN_S = 2.0


class FollowingChannel:
    """Takes the place of a `MasterChannel`.

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
        """The channel to that address."""
        return self._channel

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
            self._look()
            self._closed.wait(self._look_every_s)

    def _look(self) -> None:
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
