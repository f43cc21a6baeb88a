"""What keeps one session alive: a stream that stands as long as the process does, and heartbeats.

The master sets the rhythm: it asks on the stream, and each time is answered with a heartbeat. So one thread
does both; it does not depend on the training loop, and must not know leases: what the master wants, and how
stream and heartbeats stand, goes to a `Listener`.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Protocol

import grpc

from edl_torch.client.liveness import suspended_clock
from edl_torch.core.master_api import Listener
from edl_torch.errors import SessionLost
from edl_torch.rpc import convert
from edl_torch.rpc import edl_torch_pb2 as pb
from edl_torch.rpc.status import from_status
from edl_torch.system.forks import ForkGuard

log = logging.getLogger("edl_torch.client")

BEAT_LIMIT_S = 5.0
BEAT_LIMIT_PART = 1 / 3  # of the shorter timeout, if that is less: one that is lost leaves time for others
JOIN_S = 2.0


class HeartbeatStub(Protocol):
    """The two calls of the grpc stub that keep a session alive."""

    Attend: Callable[..., Any]
    Heartbeat: Callable[..., Any]


def backoff(longest_s: float = 1.0) -> Iterator[float]:
    """Endless jittered pauses in seconds: short at first, then at most `longest_s`."""
    jitter = random.Random()  # its own: the user's random numbers stay as they were
    pause = 0.05
    while True:
        yield jitter.uniform(0.5, 1.0) * pause
        pause = min(longest_s, 2 * pause)


class Heartbeat:
    """Keeps a session alive from `start()` to `close()`."""

    def __init__(
        self,
        stub: HeartbeatStub,
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

    @property
    def attending(self) -> bool:
        """Whether the stream stands."""
        return self.listener.standing

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
        state = "closed" if self._stop.is_set() else "attending" if self.attending else "connecting"
        return f"<Heartbeat {self._session} {state}>"
