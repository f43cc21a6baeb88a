"""What lies between trainers and the master: latency, loss, repetition, and the port of a trainer over it.

The port repeats a call until it is answered, as the one over grpc does. It knows no meaning of a call.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sim_hub import Hub, Process, Task
from sim_master import SimMaster

from edl_torch.client.master_api import Listener
from edl_torch.core.calls import (
    ConfirmAnswer,
    ConfirmCall,
    DatasetStatus,
    FencedCall,
    LeaseAnswer,
    LeaseCall,
    MasterStatus,
    RegisterAnswer,
    RegisterCall,
    ReportAnswer,
    ReportCall,
    RestoreCall,
)
from edl_torch.errors import EdlError, MasterUnavailable, Unsupported

ATTEMPT_S = 10.0  # until a call that is lost is repeated
MASTER_TIMEOUT_S = 600.0
LOOK_S = 0.2
UNANSWERED: Any = object()


@dataclass(slots=True)
class Weather:
    """How likely it is that a message suffers: lost, repeated later, or late itself."""

    lose_call: float = 0.0
    lose_answer: float = 0.0
    repeat: float = 0.0
    late: float = 0.0

    @property
    def total(self) -> float:
        """Of all."""
        return self.lose_call + self.lose_answer + self.repeat + self.late


class Network:
    """One for all trainers."""

    def __init__(self, hub: Hub, chance: random.Random, weather: Weather) -> None:
        self.hub = hub
        self.weather = weather
        self.chance = chance
        self._random = chance.random

    def latency(self) -> float:
        """Of one message, in seconds."""
        return 0.001 + 0.004 * self._random()

    def send(self, reply: Reply, arrive: Callable[..., None], *arguments: Any) -> None:
        """A call leaves a trainer."""
        weather, fate = self.weather, self._random()
        if reply.port.cut:
            self.hub.after(ATTEMPT_S, reply.fail)
            return
        if fate < weather.total:
            if fate < weather.lose_call:
                self.hub.after(ATTEMPT_S, reply.fail)
                return
            fate -= weather.lose_call
            if fate < weather.lose_answer:
                reply.lost = True
            elif fate < weather.lose_answer + weather.repeat:  # a copy comes long after
                self.hub.after(self.chance.expovariate(0.1), arrive, Reply(reply.port), *arguments)
            else:  # it is late itself, and has been repeated by then
                self.hub.after(ATTEMPT_S, reply.fail)
                self.hub.after(self.chance.uniform(1.0, 3.0) * ATTEMPT_S, arrive, reply, *arguments)
                return
        self.hub.after(self.latency(), arrive, reply, *arguments)


class Reply:
    """Where the answer to one attempt of a call goes. Without a task nobody waits for it."""

    __slots__ = ("error", "lost", "number", "port", "task", "value")

    def __init__(self, port: SimPort, task: Task | None = None) -> None:
        self.port = port
        self.task = task
        self.number = 0 if task is None else task.wait_begins()
        self.lost = False
        self.value: Any = UNANSWERED
        self.error: EdlError | None = None

    def send(self, value: Any, error: EdlError | None) -> None:
        """The answer leaves the master."""
        if self.task is None:
            return
        if self.lost or self.port.cut:
            self.port.hub.after(ATTEMPT_S, self.fail)
        else:
            self.port.hub.after(self.port.network.latency(), self._arrive, value, error)

    def fail(self) -> None:
        """There is no answer."""
        if self.task is not None:
            self.task.wake(self.number)

    def _arrive(self, value: Any, error: EdlError | None) -> None:
        if self.task is not None and self.task.number == self.number:
            self.value, self.error = value, error
            self.task.wake(self.number)


class SimPort:
    """A `MasterApi` of one process, which calls whoever is the master at that time."""

    in_process = False
    keeps_ledger = True

    def __init__(self, process: Process, network: Network, master: SimMaster, worker_id: str) -> None:
        self.worker_id = worker_id
        self.hub = process.hub
        self.process = process
        self.network = network
        self.master = master
        self.cut = False  # nothing passes in either direction
        self.attendance: Heartbeat | None = None

    def _call(self, kind: str, call: Any, wait_s: float = 0.0) -> Any:
        give_up_at = self.hub.now + MASTER_TIMEOUT_S
        pause_s = 0.05
        while True:
            reply = Reply(self, self.hub.current())
            self.network.send(reply, self.master.receive, kind, call, wait_s)
            self.hub.park()
            if reply.error is not None:
                raise reply.error
            if reply.value is not UNANSWERED:
                return reply.value
            if self.hub.now + pause_s > give_up_at:
                raise MasterUnavailable(f"no answer to {kind} within {MASTER_TIMEOUT_S:g} s")
            self.hub.sleep(self.network.chance.uniform(0.5, 1.0) * pause_s)
            pause_s = min(1.0, 2 * pause_s)

    def register(self, call: RegisterCall) -> RegisterAnswer:
        """Join."""
        answer: RegisterAnswer = self._call("register", call)
        return answer

    def attend(self, session: str, member: int, listener: Listener) -> Callable[[], float]:
        """Keep the stream and the heartbeat."""
        self.attendance = Heartbeat(self, session, listener)
        return self.hub.clock

    def lease(self, call: LeaseCall, wait_s: float = 0.0) -> LeaseAnswer:
        """Ask for leases."""
        answer: LeaseAnswer = self._call("lease", call, wait_s)
        return answer

    def report(self, call: ReportCall) -> ReportAnswer:
        """Tell outcomes."""
        answer: ReportAnswer = self._call("report", call)
        return answer

    def confirm(self, call: ConfirmCall) -> ConfirmAnswer:
        """Present leases once the stream stands."""
        while self.attendance is not None and not self.attendance.listener.standing:
            self.hub.sleep(LOOK_S)
        answer: ConfirmAnswer = self._call("confirm", call)
        return answer

    def snapshot(self, call: FencedCall) -> str:
        """The token."""
        return str(self._call("snapshot", call))

    def restore(self, call: RestoreCall) -> int:
        """Back to a token."""
        return int(self._call("restore", call))

    def progress(self, call: FencedCall) -> DatasetStatus:
        """Progress, as a member."""
        answer: DatasetStatus = self._call("progress", call)
        return answer

    def dataset_status(self, dataset: str) -> DatasetStatus:
        """Progress, from outside."""
        answer: DatasetStatus = self._call("dataset_status", dataset)
        return answer

    def status(self) -> MasterStatus:
        """Nobody reads what it is asked for."""
        raise Unsupported("no status in the simulation")

    def leave(self, session: str, member: int) -> None:
        """Goodbye, without insisting."""
        reply = Reply(self, self.hub.current())
        self.network.send(reply, self.master.receive, "leave", (session, member), 0.0)
        self.hub.park()

    def close(self) -> None:
        """Nothing to free."""


class Heartbeat:
    """Plays the stream and the heartbeats of `client.grpc.heartbeat`, which speaks grpc."""

    def __init__(self, port: SimPort, session: str, listener: Listener) -> None:
        self.listener = listener
        self.session = session
        self._port = port
        self._open()
        self._beat_later()

    # The stream -----------------------------------------------------------------------------------------

    def _open(self) -> None:
        if self._port.process.dead:
            return
        port = self._port
        if port.cut or not port.master.up:
            self._open_later()
        else:
            asked_at = self._port.hub.now
            port.hub.after(port.network.latency(), port.master.attend, self, asked_at)

    def _open_later(self) -> None:
        pause_s = self._port.network.chance.uniform(0.1, 1.0)
        self._port.hub.after(pause_s, self._port.process.deliver, self._open)

    def stands(self, asked_at: float, lease_timeout_s: float, progress_timeout_s: float) -> None:
        """The master has the stream."""
        deliver = self._port.process.deliver
        self._port.hub.after(
            self._port.network.latency(), deliver, self._stands, asked_at, lease_timeout_s, progress_timeout_s
        )

    def _stands(self, asked_at: float, lease_timeout_s: float, progress_timeout_s: float) -> None:
        if self._port.master.stream_of(self.session) is self:
            self.listener.stood(
                asked_at, lease_timeout_s=lease_timeout_s, progress_timeout_s=progress_timeout_s
            )

    def breaks(self) -> None:
        """The stream broke; the process sees it when it runs."""
        self._port.hub.after(self._port.network.latency(), self._port.process.deliver, self._broke)

    def _broke(self) -> None:
        self.listener.broke()
        self._open_later()

    def wanted(self, dataset: str) -> None:
        """Another trainer waits."""
        if not self._port.cut:
            self._port.hub.after(
                self._port.network.latency(), self._port.process.deliver, self._heard, dataset
            )

    def _heard(self, dataset: str) -> None:
        try:
            self.listener.wanted(dataset)
        except EdlError as error:  # as the real one, which logs it
            self._port.master.model.note("callback", self.session, type(error).__name__)

    # The heartbeat --------------------------------------------------------------------------------------

    def _beat_later(self) -> None:
        every_s = self._port.master.shortest_timeout_s / 3
        self._port.hub.after(every_s, self._port.process.deliver, self._beat)

    def _beat(self) -> None:
        port = self._port
        if port.process.dead:
            return
        self._beat_later()
        if not port.cut:
            beat = (self._port.hub.now, self.listener.progress, self.listener.member)
            port.hub.after(port.network.latency(), port.master.heartbeat, self, *beat)

    def answered(self, asked_at: float, known: bool) -> None:
        """The master heard a heartbeat."""
        if not self._port.cut:
            action = self._known if known else self._unknown
            self._port.hub.after(self._port.network.latency(), self._port.process.deliver, action, asked_at)

    def _known(self, asked_at: float) -> None:
        self.listener.answered(asked_at)

    def _unknown(self, _: float) -> None:
        self.listener.doubt()
