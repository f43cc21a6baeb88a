"""What lies between trainers and the master: latency, loss, repetition, and the port of a trainer over it.

It knows no meaning of a call, but that leaving needs no answer and that leases are presented over a stream.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sim_hub import Hub, Process, Task
from sim_master import SimMaster

from edl_torch.errors import EdlError, MasterUnavailable
from edl_torch.trainer.liveness import Liveness

ATTEMPT_S = 10.0  # until a call that is lost is repeated
MASTER_TIMEOUT_S = 600.0
LOOK_S = 0.2


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

    def send(self, call: SimCall, arrive: Callable[..., None]) -> None:
        """A call leaves a trainer."""
        weather, fate, after = self.weather, self._random(), self.hub.after
        if call.port.cut:
            after(ATTEMPT_S, call.fail)
            return
        if fate < weather.total:
            if fate < weather.lose_call:
                after(ATTEMPT_S, call.fail)
                return
            fate -= weather.lose_call
            if fate < weather.lose_answer:
                call.lost = True
            elif fate < weather.lose_answer + weather.repeat:  # a copy comes long after
                after(self.chance.expovariate(0.1), arrive, call.copy(), *call.content)
            else:  # it is late itself, and has been repeated by then
                after(ATTEMPT_S, call.fail)
                after(self.chance.uniform(1.0, 3.0) * ATTEMPT_S, arrive, call, *call.content)
                return
        after(self.latency(), arrive, call, *call.content)


class SimCall:
    """One attempt of a task's call. Without a task nobody waits for its answer.

    `content` is the method, its argument, and how long it may wait at the master.
    """

    __slots__ = ("content", "give_up_at", "lost", "number", "pause_s", "port", "task")

    def __init__(
        self,
        port: SimPort,
        content: tuple[str, Any, float],
        task: Task | None = None,
        give_up_at: float = 0.0,
        pause_s: float = 0.05,
    ) -> None:
        self.port = port
        self.content = content
        self.task = task
        self.number = 0 if task is None else task.number
        self.give_up_at = give_up_at
        self.pause_s = pause_s
        self.lost = False

    def copy(self) -> SimCall:
        """The same, for whose answer nobody waits."""
        return SimCall(self.port, self.content)

    def leave(self) -> None:
        """It leaves the trainer."""
        port = self.port
        assert self.task is not None
        if self.task.number != self.number:
            return
        if self.content[0] == "confirm" and not port.stands:
            port.hub.after(LOOK_S, port.process.deliver, self.leave)
        else:
            port.network.send(self, port.master.receive)

    def send(self, value: Any, error: EdlError | None) -> None:
        """The answer leaves the master."""
        port, task = self.port, self.task
        if task is None:
            return
        if self.lost or port.cut:
            port.hub.after(ATTEMPT_S, self.fail)
        elif error is None:
            port.hub.after(port.network.latency(), port.process.wake, task, self.number, value)
        else:
            port.hub.after(
                port.network.latency(), port.process.deliver, port.process.fail, task, self.number, error
            )

    def fail(self) -> None:
        """There is no answer."""
        if self.task is not None:
            self.port.process.deliver(self._failed, self.task)

    def _failed(self, task: Task) -> None:
        port, method = self.port, self.content[0]
        if task.number != self.number:
            return
        if method == "leave":  # nobody insists on it
            port.process.wake(task, self.number)
        elif port.hub.now + self.pause_s > self.give_up_at:
            error = MasterUnavailable(f"no answer to {method} within {MASTER_TIMEOUT_S:g} s")
            port.process.fail(task, self.number, error)
        else:
            task.number += 1  # a late answer to this attempt is not heard any more
            again = SimCall(port, self.content, task, self.give_up_at, min(1.0, 2 * self.pause_s))
            pause_s = port.network.chance.uniform(0.5, 1.0) * self.pause_s
            port.hub.after(pause_s, port.process.deliver, again.leave)


class SimPort:
    """What one process speaks through to whoever is the master at that time."""

    def __init__(self, process: Process, network: Network, master: SimMaster) -> None:
        self.hub = process.hub
        self.process = process
        self.network = network
        self.master = master
        self.cut = False  # nothing passes in either direction
        self._liveness: Liveness | None = None

    @property
    def stands(self) -> bool:
        """Whether the stream does, as far as this process has heard."""
        return self._liveness is None or self._liveness.standing

    def call(self, task: Task, method: str, request: Any, wait_s: float = 0.0) -> None:
        """Repeat a call of this task until it is answered, as the port over grpc does."""
        SimCall(self, (method, request, wait_s), task, self.hub.now + MASTER_TIMEOUT_S).leave()

    def attend(self, session: str, liveness: Liveness, wanted: Callable[[str], None]) -> None:
        """Keep the stream and the heartbeat."""
        self._liveness = liveness
        Heartbeat(self, session, liveness, wanted)


class Heartbeat:
    """Plays the stream and the heartbeats of `client.grpc.client`; the liveness is real."""

    def __init__(
        self, port: SimPort, session: str, liveness: Liveness, wanted: Callable[[str], None]
    ) -> None:
        self.session = session
        self.asked_at = 0.0  # when the stream was asked for that the master has
        self._liveness = liveness
        self._wanted = wanted
        self._port = port
        self._open()

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

    def attending(self, lease_timeout_s: float, progress_timeout_s: float) -> None:
        """The master has the stream, and asks for a heartbeat."""
        port = self._port
        if not port.cut:
            timeouts = lease_timeout_s, progress_timeout_s
            port.hub.after(port.network.latency(), port.process.deliver, self._stands, *timeouts)

    def _stands(self, lease_timeout_s: float, progress_timeout_s: float) -> None:
        if self._port.master.stream_of(self.session) is not self:
            return
        if not self._liveness.standing:
            self._liveness.stood(
                self.asked_at, lease_timeout_s=lease_timeout_s, progress_timeout_s=progress_timeout_s
            )
        self._beat()

    def breaks(self) -> None:
        """The stream broke; the process sees it when it runs."""
        self._port.hub.after(self._port.network.latency(), self._port.process.deliver, self._broke)

    def _broke(self) -> None:
        self._liveness.broke()
        self._open_later()

    def wanted(self, dataset: str) -> None:
        """Another trainer waits."""
        if not self._port.cut:
            self._port.hub.after(
                self._port.network.latency(), self._port.process.deliver, self._wanted, dataset
            )

    # The heartbeat --------------------------------------------------------------------------------------

    def _beat(self) -> None:
        port = self._port
        if not port.cut:
            beat = (port.hub.now, self._liveness.progress, self._liveness.member)
            port.hub.after(port.network.latency(), port.master.heartbeat, self, *beat)

    def answered(self, asked_at: float, known: bool) -> None:
        """The master heard a heartbeat."""
        port, heard = self._port, self._liveness
        if port.cut:
            return
        if known:
            port.hub.after(port.network.latency(), port.process.deliver, heard.answered, asked_at)
        else:
            port.hub.after(port.network.latency(), port.process.deliver, heard.doubt)
