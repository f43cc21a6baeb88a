"""One incarnation of a job with one model: it loads the newest checkpoint, trains, saves, and ends.

Its loop is that of `sim_trainer`; its model learns what its readers have read. At each point of saving,
loading and asking whether the job is finished it may be stopped, killed or delayed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from sim_checkpoints import Folder, load, save
from sim_hub import Sleep
from sim_trainer import Trainer
from sim_weights import Run

from edl_torch.core.calls import Grant
from edl_torch.core.plan import Plan
from edl_torch.errors import EdlError
from edl_torch.shard import Slice
from edl_torch.trainer.vocabulary import Procedure, Tally, Ticket

LEASES = 16  # a batch is read from fewer
RARELY = 0.01  # as often as points of loading and saving something happens after each step


class Batch(tuple[tuple[int, int, int], ...]):
    """A ticket, and the records that its batch holds as its reader read them."""

    runs: tuple[Run, ...] = ()


class Lease(NamedTuple):
    """A lease that is read: numbers of its records, and of each 1 where it cannot be read."""

    slice: Slice
    numbers: npt.NDArray[np.int64]
    is_bad: bytes

    def records(self, first: int, after: int) -> Run:
        """The records at these positions of the lease's shard."""
        skip = self.slice.skip
        return self.slice.epoch, self.numbers[first - skip : after - skip]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fates:
    """How likely it is that something happens at a point (those whose names begin with `at`), and how long a
    delay may last."""

    at: str = ""
    stop: float = 0.03
    kill: float = 0.01
    delay: float = 0.1
    delay_s: float = 2.0

    @property
    def total(self) -> float:
        """Of anything."""
        return self.stop + self.kill + self.delay


class Incarnation(Trainer):
    """`on_stop` stops it for a while, `on_kill` kills it; both are the runner's, who must know."""

    padding = Batch()

    def __init__(
        self,
        *arguments: Any,
        folder: Folder,
        fates: Fates,
        on_stop: Callable[[Incarnation], None],
        on_kill: Callable[[Incarnation], None],
        forgets: bool = False,
        **named: Any,
    ) -> None:
        self.weights = folder.judge.nothing()
        self.lineage = 0
        self.loaded = False  # it has a model, and trains
        self.finished = False
        self.died_of = ""
        self._folder, self._fates, self._forgets = folder, fates, forgets
        self._on_stop, self._on_kill = on_stop, on_kill
        self._reading: dict[str, dict[int, Lease]] = {}  # by stream
        super().__init__(*arguments, **named)
        self._plan = Plan(self.job.spec())

    def _ends(self, error: EdlError) -> None:
        """A traceback, and the runner starts another one."""
        self.died_of = type(error).__name__
        super()._ends(error)

    def _main(self) -> Procedure[None]:
        self.shell.begin()
        try:
            yield from self._live()
        except EdlError as error:
            self._ends(error)
        yield from self._exit()

    def _live(self) -> Procedure[None]:
        self.weights = yield from load(self._folder, self.shell, self._point, forgets=self._forgets)
        self.loaded = True
        self._attach()
        while not (yield from self._sees_the_end()):
            yield from self._pass()
            if self.leave or self._chance.random() < 0.5:
                yield from self._save()
            if self.leave:
                return
        self.finished = True
        # One that was away may have learnt a batch twice; then no checkpoint can be had of it.
        self._folder.judge.nothing_missing(self.weights, f"{self.session} was told that all is finished")
        yield from self._save()
        self._folder.judge.complete(self.weights, f"{self.session} ended")

    def _sees_the_end(self) -> Procedure[bool]:
        """`service.finished`."""
        yield from self._point("finished?")
        yield from self._trainer.registrar.plan()
        yield from self._trainer.reporter.flush()
        yield from self._point("finished? flushed")
        return (yield from self._trainer.position.progress()).finished

    def _point(self, name: str, often: float = 1.0) -> Procedure[None]:
        """Between two steps: whatever can happen to a process."""
        fates, fate = self._fates, self._chance.random() / often
        if fate > fates.total or not name.startswith(fates.at):
            return
        self._model.note(self.hub.now, self.session, name, fate)
        if fate < fates.kill:
            self.hub.after(0, self._on_kill, self)
            yield Sleep(1)
        elif fate < fates.kill + fates.stop:
            self._on_stop(self)
            yield Sleep(0)
        else:
            yield Sleep(self._chance.uniform(0, fates.delay_s))

    def _save(self) -> Procedure[None]:
        yield from save(self._folder, self.shell, self.weights, self._point)

    # What it learns ---------------------------------------------------------------------------------------

    def _pass(self) -> Procedure[None]:
        self.shell.model.is_due = True
        yield from super()._pass()
        self.shell.look("end", self.weights.parameters)

    def _step(self) -> Procedure[None]:
        if self.shell.model.is_due:
            self.shell.look("begin", self.weights.parameters)
        for batch in self._in_loop:
            assert isinstance(batch, Batch)
            self.weights.learn(batch.runs)
        yield from self._point("stepped", RARELY)
        yield from super()._step()
        if self.shell.model.stepped():
            self.shell.look("step", self.weights.parameters)

    def _break(self, number: int) -> Procedure[None]:
        if not self.pace.accumulates:
            yield from self._trainer.report(None)  # it was trained on
        yield from super()._break(number)

    def begun(self, stream: str, grant: Grant) -> None:
        """A reading process begins to read a lease."""
        reading = self._reading.setdefault(stream, {})
        reading.pop(grant.task, None)  # after a rollback task numbers come again
        numbers = self._plan.indices(grant.slice).numbers
        reading[grant.task] = Lease(grant.slice, numbers, self.job.is_bad(numbers).tobytes())
        for task in list(reading)[:-LEASES]:
            del reading[task]

    def read_batch(self, stream: str, tally: Tally) -> Procedure[Ticket]:
        """Return the batch that a reading process has drawn."""
        batch = Batch((yield from super().read_batch(stream, tally)))
        reading = self._reading[stream]
        batch.runs = tuple(reading[task].records(first, after) for task, first, after in batch)
        return batch

    def first_bad(self, stream: str, grant: Grant, first: int, stop: int) -> int:
        """The first position from `first` on whose record cannot be read."""
        lease = self._reading[stream][grant.task]
        skip = lease.slice.skip
        found = lease.is_bad.find(1, first - skip, stop - skip)
        return skip + found if found >= 0 else stop
