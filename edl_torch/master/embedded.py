"""Embedded master, in the trainer's own process: no server, no socket, no thread.

One lock around a dispatcher. Sessions never expire: they live in the process that would have to notice. It
must not import grpc, so that a single-machine job never does.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, TypeVar, TypeVarTuple

from edl_torch.core.calls import LeaseAnswer, LeaseCall, Listener, MasterApi, ReportCall, Request, StatusCall
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.core.status import MasterStatus
from edl_torch.errors import EdlError, ServiceClosed
from edl_torch.system.termination import cut_off, is_own

A = TypeVar("A")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

LOOK_AGAIN_S = 1.0  # a waiting call looks at least so often, and so stays known as waiting


class LocalMaster(MasterApi):
    """`MasterApi` over a dispatcher of its own, or over a given one. Safe for many threads.

    `clock` tells the dispatcher the time; waiting for leases is measured in real time.
    """

    in_process = True
    report_delay_s = 0.1  # a report costs as much as all else of a batch; nobody sees that it waits

    def __init__(
        self,
        worker_id: str | None = None,
        *,
        dispatcher: Dispatcher | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.worker_id = "local" if worker_id is None else str(worker_id)
        self._dispatcher = dispatcher or Dispatcher(ledger_id=uuid.uuid4().hex)
        self._clock = clock
        self._lock = threading.RLock()  # a condition's own `with` runs Python, where Ctrl-C may come
        self._changed = threading.Condition(self._lock)
        self._version = self._dispatcher.version
        self._listeners: dict[str, Listener] = {}
        self._closed = False
        self._deciding = False  # a decision is under way, or was cut off
        self._pid = os.getpid()
        self._dispatcher.history.set_wall(clock(), time.time())

    def apply(self, action: Callable[[Dispatcher, *Ts, float], T], *arguments: *Ts) -> T:
        """Let the dispatcher act, with all reported that sessions have kept back. Raises ServiceClosed."""
        self._check_process()
        self._ask_all()
        return self._decide(action, *arguments)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ServiceClosed(
                "an embedded master cannot be used in a forked child, which has a copy that nobody sees: "
                "several processes need a master of their own, `edl-torch master`"
            )

    def _ask_all(self) -> None:
        """Let sessions report what they have kept back. Without the lock: they call back into this master."""
        for listener in list(self._listeners.values()):
            listener.tell()

    def _decide(self, action: Callable[[Dispatcher, *Ts, float], T], *arguments: *Ts) -> T:
        """Let the dispatcher act at the present time, and wake the calls that wait."""
        with self._lock:
            if self._closed:
                raise ServiceClosed("the embedded master was closed: make another LocalMaster")
            if self._deciding:
                raise ServiceClosed(cut_off("a change of the embedded master"))
            self._deciding = True
            try:
                answer = action(self._dispatcher, *arguments, self._clock())
            except EdlError as exc:
                if is_own(exc):
                    self._decided()
                raise
            self._decided()
            return answer

    def _decided(self) -> None:
        version = self._dispatcher.version
        if version != self._version:
            self._version = version
            self._changed.notify_all()
            self._dispatcher.epoch_ends(self._clock())
        self._deciding = False

    def call(self, request: Request[A], wait_s: float = 0.0) -> A:
        """As `MasterApi.call`."""
        answer: Any
        if isinstance(request, ReportCall):  # its answer is of the session's own leases: nobody is asked
            self._check_process()
            answer = self._decide(Dispatcher.report, request)
        elif isinstance(request, LeaseCall):
            answer = self._wait_for_lease(request, wait_s) if wait_s else None
            if answer is None:
                answer = self.apply(Dispatcher.lease, request)
            if answer.nothing_yet:
                self._call_back(request)
        elif isinstance(request, StatusCall):
            answer = self.apply(self._observe, request, time.time())
        else:
            answer = self.apply(Dispatcher.call, request)
        return answer  # type: ignore[no-any-return]  # the class of the request says what it is

    def attend(self, session: str, member: int, listener: Listener) -> None:
        """Remember whom to call back. That happens in the thread of the session that waits.

        Returns None: the liveness of a session in this process is never in doubt.
        """
        with self._lock:
            self._listeners[session] = listener
        self.apply(lambda dispatcher, now: dispatcher.members.stream_opened(session, now))

    def _wait_for_lease(self, call: LeaseCall, wait_s: float) -> LeaseAnswer | None:
        deadline = time.monotonic() + wait_s
        self.apply(Dispatcher.heard, call)
        while (left := deadline - time.monotonic()) > 0:
            version = self._version
            answer = self.apply(Dispatcher.poll, call)
            if answer is not None:
                return answer
            self._call_back(call)
            with self._lock:
                self._changed.wait_for(
                    lambda: self._closed or self._version != version,  # noqa: B023  waited for here
                    min(left, LOOK_AGAIN_S),
                )
        return None

    def _call_back(self, call: LeaseCall) -> None:
        with self._lock:
            now = self._clock()
            wanted = [
                listener
                for session in self._dispatcher.asked_back(call.dataset, now)
                if (listener := self._listeners.get(session)) is not None
            ]
        for listener in wanted:  # outside the lock: it will call back into this master
            listener.wanted(call.dataset)

    def _observe(self, dispatcher: Dispatcher, call: StatusCall, wall: float, now: float) -> MasterStatus:
        for session, listener in self._listeners.items():  # there are no heartbeats that tell it
            member = dispatcher.members.get(session)
            if member is not None:
                member.measures = listener.measures
        dispatcher.history.set_wall(now, wall)
        return dispatcher.observe(call, now)

    @property
    def last_event(self) -> int:
        """Number of the last event of the status; takes no lock."""
        return self._dispatcher.history.latest

    def leave(self, session: str, member: int) -> None:
        """End the session. After `close` this does nothing."""
        with contextlib.suppress(ServiceClosed):
            self.apply(Dispatcher.leave, session, member)
        with self._lock:
            self._listeners.pop(session, None)

    def close(self) -> None:
        """Wake every waiting call; later ones raise ServiceClosed."""
        if os.getpid() == self._pid:
            self._ask_all()
        with self._lock:
            self._closed = True
            self._changed.notify_all()

    def __repr__(self) -> str:
        state = "closed " if self._closed else ""
        return f"<LocalMaster {state}worker={self.worker_id!r} {self._dispatcher!r}>"
