"""The master over grpc, as a trainer sees it: every call is repeated until the master answers.

Carries calls and answers; it must not know what they mean. Used in the trainer's process only, never in a
forked child.

What keeps a session alive is a stream that stands as long as the process does, and heartbeats. The master
sets the rhythm: it asks on the stream, and each time is answered with a heartbeat. So one thread does both;
it does not depend on the training loop, and must not know leases: what the master wants, and how stream and
heartbeats stand, goes to a `Listener`.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import grpc

from edl_torch.client.environment import default_worker_id
from edl_torch.client.grpc.channel import FollowingChannel, MasterChannel, build_channel
from edl_torch.client.liveness import suspended_clock
from edl_torch.core.calls import ConfirmCall, Listener, MasterApi, Request
from edl_torch.errors import EdlError, InvalidArgument, MasterUnavailable, ServiceClosed, SessionLost
from edl_torch.rpc import convert
from edl_torch.rpc import edl_torch_pb2 as pb
from edl_torch.rpc.convert import ROUTES, MasterStub
from edl_torch.rpc.credentials import Credentials
from edl_torch.rpc.status import AnotherAnswers, NoTrust, from_status, is_masters_own
from edl_torch.system.address import HostPort
from edl_torch.system.backoff import backoff
from edl_torch.system.processes import ForkGuard
from edl_torch.trainer.liveness import FIRST_S, WaitLogSchedule

__all__ = ["MasterClient", "build_channel"]

log = logging.getLogger("edl_torch.client")

A = TypeVar("A")  # the answer

BEAT_LIMIT_S = 5.0
BEAT_LIMIT_PART = 1 / 3  # of the shorter timeout, if that is less: one that is lost leaves time for others
JOIN_S = 2.0


class Heartbeat:
    """Keeps a session alive from `start()` to `close()`."""

    def __init__(
        self,
        stub: MasterStub,
        session: str,
        listener: Listener,
        *,
        guard: ForkGuard,
        clock: Callable[[], float] = suspended_clock,
    ) -> None:
        self.listener = listener
        self.clock = clock
        self._stub = stub
        self._session = session
        self._guard = guard
        self._lock = threading.Lock()
        self._stream: Any = None
        self._stop = threading.Event()
        self._events: Iterator[pb.AttendEvent] | None = None  # of the first stream, until the thread has it
        self._thread = threading.Thread(target=self._attend, name=f"edl-attend-{session[:8]}", daemon=True)

    def start(self) -> None:
        """Open the stream, and hear in the background what it says."""
        # Not in the thread: with the first stream grpc starts a thread of its own. Since 3.12 Python refuses
        # one to a program that ends, and grpc would wait for it for ever.
        with suppress(ValueError):  # the channel is closed: the thread sees that too
            self._events = self._open()
        self._thread.start()

    def close(self) -> None:
        """End the thread. The master hears the stream break, unless the session has left before."""
        self._stop.set()
        with self._lock:
            if self._stream is not None:
                self._stream.cancel()
        if self._thread is not threading.current_thread():
            self._thread.join(JOIN_S)

    def _attend(self) -> None:
        pauses = backoff()
        while not self._stop.is_set():
            asked_at = self.clock()
            try:
                events, self._events = self._events or self._open(), None
                for event in events:
                    if event.HasField("attending"):
                        self._stands(event.attending, asked_at)
                        pauses = backoff()
                    elif event.HasField("wanted"):
                        self.listener.wanted(event.wanted.dataset)
            except (grpc.RpcError, ValueError) as error:  # ValueError: the channel is closed
                log.debug("stream of session %s ended: %s", self._session, error)
            except Exception:  # the top of a thread: a failing callback must not end the session
                log.exception("stream of session %s failed; it is opened again", self._session)
            self.listener.broke()
            self._stop.wait(next(pauses))

    def _open(self) -> Iterator[pb.AttendEvent]:
        with self._lock:
            if self._stop.is_set():
                return iter(())
            # Waits inside grpc for a master that is away: older releases only then make a new connection.
            self._stream = self._stub.Attend(pb.AttendRequest(session=self._session), wait_for_ready=True)
            stream: Iterator[pb.AttendEvent] = self._stream
        return stream

    def _stands(self, attending: pb.Attending, asked_at: float) -> None:
        """Note that the stream, asked for at `asked_at`, stands, and answer with a heartbeat."""
        lease_timeout_s, progress_timeout_s = attending.lease_timeout_s, attending.progress_timeout_s
        if not self.listener.standing:
            self._guard.refresh()
            self.listener.stood(
                asked_at, lease_timeout_s=lease_timeout_s, progress_timeout_s=progress_timeout_s
            )
        shorter_s = min(lease_timeout_s, progress_timeout_s or lease_timeout_s)
        self._beat(min(BEAT_LIMIT_S, BEAT_LIMIT_PART * shorter_s))

    def _beat(self, timeout_s: float) -> None:
        asked_at = self.clock()
        request = pb.HeartbeatRequest(
            session=self._session,
            member=self.listener.member,
            progress=self.listener.progress,
            measures=convert.MEASURES.to_wire(self.listener.measures),
        )
        try:
            self._stub.Heartbeat(request, timeout=timeout_s)
        except grpc.RpcError as error:
            cause = from_status(error, "")
            log.debug("heartbeat of session %s: %s", self._session, cause)
            if isinstance(cause, SessionLost):
                self.listener.doubt()
        except ValueError:
            log.debug("heartbeat of session %s: the channel is closed", self._session)
        else:
            self.listener.answered(asked_at)

    def __repr__(self) -> str:
        state = "closed" if self._stop.is_set() else "attending" if self.listener.standing else "connecting"
        return f"<Heartbeat {self._session} {state}>"


# Calls that are repeated ------------------------------------------------------------------------------

ATTEMPT_S = 10.0  # of one attempt of a call, beside the time that it may wait at the master
LEAST_ATTEMPT_S = 0.05


class Reaches(Protocol):
    """A channel, as far as a `Caller` asks it where it leads to."""

    @property
    def address(self) -> HostPort: ...

    def explain(self, timeout_s: float) -> str: ...


class Caller:
    """Calls to the master over `channel`. `close()` ends those that wait; they raise ServiceClosed.

    The channel's `explain` gets some seconds, and raises where it is certain that the master will never let
    us in, or says what is wrong. It is asked while no call was answered yet: a master that did answer, and
    ends connections, is only away. For the same reason TLS that fails is an error at once before the first
    answer, and waited out after it. Whatever else answers at the address is always waited out: another
    program may have the port until the master is back.
    """

    def __init__(
        self,
        channel: Reaches,
        master_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not master_timeout_s >= 0:
            raise InvalidArgument(f"master_timeout_s must be 0 or more, not {master_timeout_s}")
        self._channel = channel
        self.timeout_s = master_timeout_s
        self._process = os.getpid()
        self._closing = threading.Event()
        self._answered = False
        self._warned = False
        self._clock = clock

    def call(
        self, rpc: Callable[..., A], request: Any, *, wait_s: float = 0.0, attempt_s: float = ATTEMPT_S
    ) -> A:
        """Repeat for `master_timeout_s`, with pauses of at most a second; then raise MasterUnavailable."""
        began = self._clock()
        give_up_at = began + self.timeout_s
        known = ""  # what is wrong with the address
        first = ""  # in words: an error would hold this frame, and with it the loop's iterator, as garbage
        pauses = backoff()
        silence = WaitLogSchedule()
        waits = False  # inside grpc: every other attempt, for only the others can say who answers instead
        while True:
            now = self._clock()
            left_s = give_up_at - now
            timeout_s = wait_s + max(LEAST_ATTEMPT_S, min(attempt_s, left_s))
            if first and now - began < FIRST_S:  # it waits inside grpc: not beyond the time to say so
                timeout_s = min(timeout_s, FIRST_S - (now - began))
            try:
                answer = self.attempt(rpc, request, timeout_s, wait_for_ready=waits)
                self._answered, self._warned = True, False
                return answer
            except (MasterUnavailable, NoTrust) as error:
                if not self._answered and isinstance(error, NoTrust):
                    raise
                if not first:
                    known = "" if self._answered else self._channel.explain(left_s)
                    first = f"{known}: {error}" if known else str(error)
                waits = not waits
                pause_s = next(pauses)
                now = self._clock()
                if now + pause_s >= give_up_at:
                    raise self.unavailable(first, error) from error
                self._tell(error)
                if silence.is_due(now - began):
                    known = self._channel.explain(left_s) if known else ""
                    self.say_waiting(now - began, f"{known}: {error}" if known else str(error))
            self.pause(pause_s)

    def say_waiting(self, waited_s: float, why: str) -> None:
        unknown = "" if self._answered else " No master has answered there so far: is the address right?"
        log.warning(
            "no answer from the master at %s for %.0f s: %s; waiting for up to %g s (master_timeout_s).%s",
            *(self._channel.address, waited_s, why, self.timeout_s, unknown),
        )

    def _tell(self, error: EdlError) -> None:
        if isinstance(error, AnotherAnswers | NoTrust) and not self._warned:
            self._warned = True
            log.warning("%s; waiting for the master for up to %g s", error, self.timeout_s)
        else:
            log.debug("%s; trying again", error)

    def attempt(
        self, rpc: Callable[..., A], request: Any, timeout_s: float, *, wait_for_ready: bool = False
    ) -> A:
        """Call once. Without `wait_for_ready` it fails fast, and can say why. With it, it waits inside grpc:
        older releases make a new connection only while a call waits for it."""
        self.check_usable()
        try:
            return rpc(request, timeout=timeout_s, wait_for_ready=wait_for_ready)
        except grpc.RpcError as error:
            self.check_usable()
            # What the master itself says is said once: grpc's error has nothing but the same text, twice.
            raise from_status(error, str(self._channel.address)) from (
                None if is_masters_own(error) else error
            )
        except ValueError:  # grpc's word for a channel that was closed meanwhile
            self.check_usable()
            raise

    def pause(self, seconds: float) -> None:
        """Wait, but not after `close`."""
        self._closing.wait(seconds)

    @property
    def is_closed(self) -> bool:
        return self._closing.is_set()

    @property
    def is_usable(self) -> bool:
        """Whether calls can be made: not after `close`, and not in a forked child."""
        return not self.is_closed and self._is_ours

    @property
    def _is_ours(self) -> bool:
        return os.getpid() == self._process

    def check_usable(self) -> None:
        """Raise ServiceClosed or EdlError where no call can be made."""
        if self.is_closed:
            raise ServiceClosed(f"the client of the master at {self._channel.address} was closed")
        if not self._is_ours:
            raise EdlError(
                "a MasterClient cannot be used in a forked child: make one there, or ask the parent"
            )

    def unavailable(self, first: str, last: EdlError | None = None) -> MasterUnavailable:
        """What to raise in the end: what was said at first, and the last error."""
        other = isinstance(last, AnotherAnswers | NoTrust) and str(last) != first
        return MasterUnavailable(
            f"no answer from the master at {self._channel.address} within {self.timeout_s:g} s: "
            f"is it running, and is the address right? At first: {first}"
            + (f". In the end: {last}" if other else "")
        )

    def close(self) -> None:
        """No more calls."""
        self._closing.set()

    def __repr__(self) -> str:
        return f"<Caller {'closed ' if self.is_closed else ''}{self._channel.address}>"


# The client -------------------------------------------------------------------------------------------

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
        self._caller = Caller(self._channel, master_timeout_s)
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
        with self._lock:  # `close` ends those that have begun
            self._caller.check_usable()
            heartbeat = self._heartbeats.get(session)
            if heartbeat is None:
                self._heartbeats[session] = heartbeat = Heartbeat(
                    self._stub, session, listener, guard=self._guard
                )
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
