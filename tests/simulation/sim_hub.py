"""One thread plays a whole cluster: a clock, what is due, and processes, whose threads are generators.

A thread yields what it waits for, and the hub goes on to what is due next. Nothing here knows a master or a
trainer, and nothing happens but by the hub: a seed fixes it all.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Any, NamedTuple

from edl_torch.trainer.vocabulary import Procedure, Wait

Event = Callable[..., None]
PARKED: Any = object()  # in place of an answer: it comes later


class Sleep(NamedTuple):
    """Wait so long. There is no answer."""

    seconds: float


class Hub:
    """The clock, and what is due. `events` counts what was due at some time: arrivals, timers, faults."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._numbers = count()
        self._due: list[tuple[float, int, Event, tuple[Any, ...]]] = []

    def after(self, seconds: float, event: Event, *arguments: Any) -> None:
        """Do it so much later. What is due at the same time happens in the order in which it was planned."""
        heappush(self._due, (self.now + seconds, next(self._numbers), event, arguments))

    def run(self, over: Callable[[], bool]) -> None:
        """Until it is over, or nothing is due any more. Raises what any thread or event raises."""
        due = self._due
        while due and not over():
            self.now, _, event, arguments = heappop(due)
            self.events += 1
            event(*arguments)


class Task:
    """One thread of a process. `number` counts its waits, so that it is never woken from another one."""

    __slots__ = ("ended", "number", "procedure", "ready")

    def __init__(self, procedure: Procedure[None]) -> None:
        self.procedure = procedure
        self.number = 0
        self.ready: Callable[[], Any] = bool  # what it waits for, while the process looks for that
        self.ended = False


class Process:
    """Threads that are stopped, continued and killed together.

    `perform` does what a task yields, but for `Sleep` and `Wait`: it returns the answer, or PARKED. `wakes`
    is called before tasks go on, `rests` when all of them wait.
    """

    def __init__(
        self,
        hub: Hub,
        *,
        perform: Callable[[Task, Any], Any],
        wakes: Callable[[], None],
        rests: Callable[[], None],
    ) -> None:
        self.hub = hub
        self.dead = False
        self.stopped = False
        self._perform = perform
        self._wakes = wakes
        self._rests = rests
        self._tasks: dict[Task, None] = {}
        self._waiting: list[Task] = []  # until something holds in this process
        self._kept: list[tuple[Event, tuple[Any, ...]]] = []

    # What reaches it --------------------------------------------------------------------------------------

    def deliver(self, event: Event, *arguments: Any) -> None:
        """Something reaches the process: now, when it goes on, or never."""
        if self.dead:
            return
        if self.stopped:
            self._kept.append((event, arguments))
        else:
            event(*arguments)

    def run(self, procedure: Procedure[None]) -> None:
        """Begin another thread."""
        self._wakes()
        self.start(procedure)
        self._settle()

    def start(self, procedure: Procedure[None]) -> Task:
        """Begin another thread; called by one that runs."""
        task = Task(procedure)
        self._tasks[task] = None
        self._go_on(task, procedure.send, None)
        return task

    def wake(self, task: Task, number: int, value: Any = None) -> None:
        """End a task's wait of this number with an answer, unless it has ended."""
        if task.number != number:
            return
        if self.stopped:
            self._kept.append((self.wake, (task, number, value)))
            return
        self._wakes()
        self._go_on(task, task.procedure.send, value)
        self._settle()

    def fail(self, task: Task, number: int, error: Exception) -> None:
        """End a task's wait of this number with an error."""
        if task.number == number:
            self._wakes()
            self._go_on(task, task.procedure.throw, error)
            self._settle()

    # Signals ----------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """As SIGSTOP."""
        self.stopped = True

    def go_on(self) -> None:
        """As SIGCONT. What has arrived is seen before any task goes on."""
        self.stopped = False
        kept, self._kept = self._kept, []
        of_tasks = (self.wake, self.fail, self._timed_out)
        for event, arguments in sorted(kept, key=lambda item: item[0] in of_tasks):
            self.deliver(event, *arguments)
        self._wakes()
        self._settle()

    def kill(self) -> None:
        """As SIGKILL. Never called by one of its own tasks."""
        if self.dead:
            return
        self.dead = True
        self._kept.clear()
        self._waiting.clear()
        for task in self._tasks:
            task.number = -1
            task.procedure.close()
        self._tasks.clear()

    # Tasks ------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Let every task go on that waits for what holds by now."""
        waiting, index = self._waiting, 0
        while index < len(waiting) and not self.stopped:
            task = waiting[index]
            if value := task.ready():
                del waiting[index]
                self._go_on(task, task.procedure.send, value)
                index = 0
            else:
                index += 1
        self._rests()

    def _go_on(self, task: Task, resume: Callable[[Any], Any], value: Any) -> None:
        """Run a task until it waits."""
        task.number += 1
        try:
            action = resume(value)
            while True:
                if type(action) is Wait:
                    value = action.ready()
                    if not value and (action.timeout_s is None or action.timeout_s > 0):
                        self._park(task, action)
                        return
                elif type(action) is Sleep:
                    self.hub.after(action.seconds, self.wake, task, task.number)
                    return
                elif (value := self._perform(task, action)) is PARKED:
                    return
                action = task.procedure.send(value)
        except StopIteration:
            task.ended = True
            del self._tasks[task]

    def _park(self, task: Task, wait: Wait) -> None:
        task.ready = wait.ready
        self._waiting.append(task)
        if wait.timeout_s is not None:
            self.hub.after(wait.timeout_s, self.deliver, self._timed_out, task, task.number)

    def _timed_out(self, task: Task, number: int) -> None:
        if task.number == number:
            self._waiting.remove(task)
            self.wake(task, number, task.ready())
