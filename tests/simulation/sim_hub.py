"""One system thread plays a whole cluster: a clock, what is due, and processes whose threads are greenlets.

The code of a session runs as it is. Where it would wait, its greenlet parks and the hub goes on to what is
due next. Nothing here knows a master or a trainer, and nothing happens but by the hub: a seed fixes it all.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

Action = Callable[..., None]


class Killed(GreenletExit):
    """Unwinds the threads of a process that is killed: no code of the product catches it."""


class Hub:
    """The clock, and what is due. `events` counts what was due at some time: arrivals, timers, faults."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self.held = 0  # locks of conditions: nobody may park with one
        self._main = getcurrent()
        self._number = 0
        self._due: list[tuple[float, int, Action, tuple[Any, ...]]] = []
        self._ready: deque[tuple[Task, int, Callable[[], Any] | None]] = deque()

    def clock(self) -> float:
        """The time in seconds."""
        return self.now

    def after(self, seconds: float, action: Action, *arguments: Any) -> None:
        """Do it so much later. What is due at the same time happens in the order in which it was planned."""
        self._number += 1
        heapq.heappush(self._due, (self.now + seconds, self._number, action, arguments))

    def run(self, over: Callable[[], bool]) -> None:
        """Until it is over, or nothing is due any more. Raises what any task or action raises."""
        ready, due = self._ready, self._due
        while True:
            while ready:
                self._resume(*ready.popleft())
            if not due or over():
                return
            when, _, action, arguments = heapq.heappop(due)
            self.now = when
            self.events += 1
            action(*arguments)

    def _resume(self, task: Task, number: int, condition: Callable[[], Any] | None) -> None:
        if task.number == number and not task.dead and (condition is None or condition()):
            task.switch()

    def make_ready(self, task: Task, number: int, condition: Callable[[], Any] | None = None) -> None:
        """Let a parked task run soon; with a condition, only if that holds by then."""
        self._ready.append((task, number, condition))

    def park(self) -> None:
        """The task that calls waits until it is woken under the number that it has now."""
        assert not self.held, "a thread waits with a lock held"
        if getcurrent().process.dead:  # type: ignore[attr-defined]
            raise Killed
        self._main.switch()

    def current(self) -> Task:
        """The task that calls."""
        task = getcurrent()
        assert isinstance(task, Task), "only a thread of a process may wait"
        return task

    def sleep(self, seconds: float) -> None:
        """The task that calls waits so long."""
        task = self.current()
        self.after(seconds, task.wake, task.wait_begins())
        self.park()


class Task(greenlet):
    """One thread of a process. `number` counts its waits, so that it is never woken from another one."""

    def __init__(self, process: Process, target: Callable[[], None]) -> None:
        super().__init__(target, process.hub._main)
        self.process = process
        self.number = 0
        self.joining: list[tuple[Task, int]] = []

    def wait_begins(self) -> int:
        """The number to wake it by."""
        self.number += 1
        return self.number

    def wake(self, number: int, condition: Callable[[], Any] | None = None) -> None:
        """End its wait of this number, unless it has ended; a stopped process hears of it when it goes on."""
        if self.number == number:
            self.process.deliver(self.process.hub.make_ready, self, number, condition)


class Process:
    """Threads that are stopped, continued and killed together."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.dead = False
        self.stopped = False
        self._tasks: list[Task] = []
        self._kept: list[tuple[Action, tuple[Any, ...]]] = []

    def start(self, target: Callable[[], None]) -> Task:
        """Another thread; it begins soon."""
        task = Task(self, target)
        self._tasks.append(task)
        self.deliver(self.hub.make_ready, task, 0)
        return task

    def deliver(self, action: Action, *arguments: Any) -> None:
        """Something reaches the process: now, when it goes on, or never."""
        if self.dead:
            return
        if self.stopped:
            self._kept.append((action, arguments))
        else:
            action(*arguments)

    def stop(self) -> None:
        """As SIGSTOP."""
        self.stopped = True

    def go_on(self) -> None:
        """As SIGCONT."""
        self.stopped = False
        kept, self._kept = self._kept, []
        for action, arguments in kept:
            self.deliver(action, *arguments)

    def kill(self) -> None:
        """As SIGKILL. Never called by one of its own threads."""
        if not self.dead:
            self.dead = True
            self._kept.clear()
            for task in self._tasks:
                if not task.dead:
                    task.throw(Killed)
            self._tasks.clear()


class SimCondition:
    """`threading.Condition` for tasks. Its lock is never contended: who holds it does not park."""

    __slots__ = ("_hub", "_waiting")

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._waiting: list[tuple[Task, int, Callable[[], Any]]] = []

    def __enter__(self) -> None:
        self._hub.held += 1

    def __exit__(self, *_: object) -> None:
        self._hub.held -= 1

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        """Wait, with the lock let go, until it holds."""
        result = predicate()
        if result or (timeout is not None and timeout <= 0):
            return result
        hub = self._hub
        task = hub.current()
        number = task.wait_begins()
        self._waiting.append((task, number, predicate))
        if timeout is not None:
            hub.after(timeout, task.wake, number)
        hub.held -= 1
        try:
            hub.park()
        finally:
            hub.held += 1
        self._waiting = [item for item in self._waiting if item[1] != number or item[0] is not task]
        return predicate()

    def notify_all(self) -> None:
        """All that wait look again, soon; who would find nothing goes on waiting."""
        for task, number, predicate in self._waiting:
            task.wake(number, predicate)


class SimThread:
    """A `Thread` of a session."""

    def __init__(self, process: Process, target: Callable[[], None]) -> None:
        self._process = process
        self._target = target
        self._task: Task | None = None

    def start(self) -> None:
        """Begin."""
        self._task = self._process.start(self._run)

    def _run(self) -> None:
        self._target()
        task = self._process.hub.current()
        for waiting, number in task.joining:
            waiting.wake(number)

    def join(self, timeout_s: float) -> None:
        """Wait for its end."""
        hub = self._process.hub
        task = hub.current()
        if self._task is None or self._task is task or self._task.dead:
            return
        number = task.wait_begins()
        self._task.joining.append((task, number))
        hub.after(timeout_s, task.wake, number)
        hub.park()

    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._task is not None and not self._task.dead


class SimThreads:
    """What a session needs of its machine: the `Threads` of one process."""

    def __init__(self, process: Process, session: str) -> None:
        self._process = process
        self._session = session

    def new_id(self) -> str:
        """The one that was planned."""
        return self._session

    def clock(self) -> float:
        """The hub's."""
        return self._process.hub.now

    def lock(self) -> SimLock:
        """A lock that may be held while its task waits."""
        return SimLock(self._process.hub)

    def condition(self) -> SimCondition:
        """A condition."""
        return SimCondition(self._process.hub)

    def thread(self, target: Callable[[], None], name: str) -> SimThread:
        """A thread of the same process."""
        return SimThread(self._process, target)


class SimLock:
    """A lock. First come, first served."""

    def __init__(self, hub: Hub) -> None:
        self._free = SimCondition(hub)
        self._locked = False

    def __enter__(self) -> None:
        with self._free:
            while self._locked:
                self._free.wait_for(lambda: not self._locked)
            self._locked = True

    def __exit__(self, *_: object) -> None:
        with self._free:
            self._locked = False
            self._free.notify_all()
