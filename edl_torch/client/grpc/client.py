"""The master over grpc, as a trainer sees it: every call is repeated until the master answers.

Carries calls and answers; it must not know what they mean. Used in the trainer's process only, never in a
forked child.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from edl_torch.client.environment import default_worker_id
from edl_torch.client.grpc.calling import Caller
from edl_torch.client.grpc.channel import FollowingChannel, MasterChannel, build_channel
from edl_torch.client.grpc.heartbeat import Heartbeat
from edl_torch.core.calls import ConfirmCall, Request
from edl_torch.core.master_api import Listener, MasterApi
from edl_torch.errors import EdlError
from edl_torch.rpc import edl_torch_pb2 as pb
from edl_torch.rpc.convert import ROUTES, MasterStub
from edl_torch.rpc.credentials import Credentials
from edl_torch.system.forks import ForkGuard
from edl_torch.trainer.liveness import WaitLogSchedule

__all__ = ["MasterClient", "build_channel"]

log = logging.getLogger("edl_torch.client")

A = TypeVar("A")

LEAVE_S = 2.0
LOOK_S = 0.2  # how soon a wait for the stream notices `close`


class MasterClient(MasterApi):
    """A master over grpc. Takes an address, or a channel (of `build_channel`, or one that
    follows a master) that it then owns.

    A call that finds no master is repeated, with pauses of at most a second, for `master_timeout_s`; then it
    raises MasterUnavailable. `credentials` are for a master that asks for some; default: those of the
    environment. `close()` ends calls that wait; they raise ServiceClosed.
    """

    def __init__(
        self,
        master: str | MasterChannel | FollowingChannel,
        worker_id: str | int | None = None,
        *,
        master_timeout_s: float = 600.0,
        credentials: Credentials | None = None,
    ) -> None:
        self.worker_id = default_worker_id() if worker_id is None else str(worker_id)
        self._channel = build_channel(master, credentials) if isinstance(master, str) else master
        self._caller = Caller(str(self._channel.address), master_timeout_s, self._channel.explain)
        self._stub = MasterStub(self._channel)
        self._routes = {kind: (route, self._stub.methods[route.method]) for kind, route in ROUTES.items()}
        self._guard = ForkGuard(self._channel.address)
        self._lock = threading.Lock()
        self._heartbeats: dict[str, Heartbeat] = {}
        atexit.register(self.close)

    @property
    def address(self) -> str:
        """Host and port of the master."""
        return str(self._channel.address)

    def call(self, request: Request[A], wait_s: float = 0.0) -> A:
        """As `MasterApi.call`: repeated until the master answers."""
        route, rpc = self._routes[type(request)]
        message = route.request.to_wire(request)
        if wait_s:
            message.wait_s = wait_s
        if isinstance(request, ConfirmCall):  # without the stream the master would take the leases soon
            self._await_stream(request.session)
        answer: A = route.answer.from_wire(self._caller.call(rpc, message, wait_s=wait_s))
        return answer

    def _await_stream(self, session: str) -> None:
        with self._lock:
            heartbeat = self._heartbeats.get(session)
        if heartbeat is None:
            return
        began, silence = time.monotonic(), WaitLogSchedule()
        while not heartbeat.listener.wait_standing(min(LOOK_S, self._caller.timeout_s)):
            self._caller.check_usable()
            waited_s = time.monotonic() - began
            if waited_s >= self._caller.timeout_s:
                raise self._caller.unavailable("the session's stream did not stand")
            if silence.is_due(waited_s):
                self._caller.say_waiting(waited_s, "the session's stream does not stand")

    # Liveness -------------------------------------------------------------------------------------------

    def attend(self, session: str, member: int, listener: Listener) -> Callable[[], float]:
        """Keep the session alive, in a thread of its own, until `leave` or `close`."""
        self._caller.check_usable()
        with self._lock:
            heartbeat = self._heartbeats.get(session)
            if heartbeat is not None:
                return heartbeat.clock
            heartbeat = Heartbeat(self._stub, session, listener, guard=self._guard)
            self._heartbeats[session] = heartbeat
        heartbeat.start()
        return heartbeat.clock

    def leave(self, session: str, member: int) -> None:
        """Say goodbye, without insisting: a master that does not hear it will notice."""
        if not self._caller.is_usable:
            return
        try:
            self._caller.attempt(self._stub.Leave, pb.LeaveRequest(session=session, member=member), LEAVE_S)
        except EdlError as error:
            log.debug("session %s could not say goodbye: %s", session, error)
        with self._lock:
            heartbeat = self._heartbeats.pop(session, None)
        if heartbeat is not None:
            heartbeat.close()

    def close(self) -> None:
        """End all threads and the connection. In a forked child, which shares them, nothing is touched."""
        if not self._caller.is_usable:
            return
        self._caller.close()
        atexit.unregister(self.close)
        with self._lock:
            heartbeats = list(self._heartbeats.values())
            self._heartbeats.clear()
        for heartbeat in heartbeats:
            heartbeat.close()
        self._channel.close()
        self._guard.release()

    def __enter__(self) -> MasterClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed " if self._caller.is_closed else ""
        return f"<MasterClient {state}{self.address} worker={self.worker_id!r}>"
