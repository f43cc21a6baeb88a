"""A trainer process in the simulation: a pure trainer, and a training loop around it.

The loop does what `data.loader` and a `DataLoader` with its workers do with elastic passes, without the
records: it draws positions, makes tickets, hands batches, trains, breaks, saves and restores.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
from sim_hub import Hub, Sleep
from sim_master import DATASET, SimMaster
from sim_mixture import reader_of
from sim_model import BrokenPromise, History
from sim_network import Network
from sim_session import SimSession

from edl_torch.client.description import Description
from edl_torch.core.calls import Grant
from edl_torch.core.registration import new_spec
from edl_torch.errors import AccountingError, EdlError, InvalidArgument
from edl_torch.shard import DatasetSpec, Source
from edl_torch.trainer.vocabulary import Procedure, Tally, Ticket, Wait, ticket_size

PREFETCH = 2  # batches of a loader worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What all trainers of a run have in common."""

    size: int
    records_per_shard: int
    batch: int
    epochs: int
    seed: int
    shuffle_shards: bool = True
    shuffle_window: int | None = None
    drop_last: bool = False
    bad_every: int = 0  # of so many records one cannot be read
    breaks: float = 0.0  # how likely it is that a loop breaks after a batch
    saves: float = 0.0  # how likely it is that it takes a token
    step_s: float = 0.5
    data: int = 0  # which data they are
    follows_data: bool = False  # whether it goes on, on purpose, from a token of other data
    components: tuple[int, ...] = ()  # sizes, of a mixture
    turn: int = 1  # records that each gives in a row

    def spec(self) -> DatasetSpec:
        """As a master has it."""
        if self.components:
            description = self.description()
            return new_spec(description.in_full(description.sources() or ()), self.batch)
        return DatasetSpec(
            name=DATASET,
            sources=(Source(name="", count=self.size),),
            records_per_shard=self.records_per_shard,
            shuffle_shards=self.shuffle_shards,
            shuffle_in_shard=self.shuffle_window is not None,
            shuffle_window=self.shuffle_window or 1,
            seed=self.seed,
            num_epochs=self.epochs,
        )

    def description(self) -> Description:
        """As a service describes it."""
        if self.components:
            return Description(
                name=DATASET,
                batch_size=self.batch,
                reader=reader_of(self.components, self.size, self.seed, self.turn),
                records_per_shard=self.records_per_shard,
                seed=self.seed,
                max_bad_records=self.size if self.bad_every else 0,
            )
        return Description(
            name=DATASET,
            batch_size=self.batch,
            dataset_size=self.size,
            num_epochs=self.epochs,
            records_per_shard=self.records_per_shard,
            shuffle_shards=self.shuffle_shards,
            shuffle_window=self.shuffle_window,
            seed=self.seed,
            max_bad_records=self.size * self.epochs if self.bad_every else 0,
            fingerprint=f"data {self.data}",
            data_changed="new_epoch" if self.follows_data else None,
        )

    def is_bad(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Whether records cannot be read."""
        return (numbers + 7) % self.bad_every == 0 if self.bad_every else np.zeros(len(numbers), np.bool_)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What one trainer is like: seconds for a step, give or take the part `jitter`, and to read a batch; its
    loader workers and how long one takes to start; batches for one step of its optimizer (0: it has none).

    `tells` is how many batches a wrapper reads ahead, which says of each when it passes it on (0: none);
    `pads` how likely it is that a batch is a padding batch, as ranks in step have them; `keeps` how likely it
    is that a loop that was left keeps the gradients that it gathered, for a step in its next pass.
    """

    step_s: float
    jitter: float = 0.0
    workers: int = 0
    accumulates: int = 0
    read_s: float = 0.0
    start_s: float = 0.0
    tells: int = 0
    pads: float = 0.0
    keeps: float = 0.0


def any_pace(job: Job, chance: random.Random, number: int) -> Pace:
    """One in twenty is slow; one in eight is behind a wrapper, and one in eight is a rank in step."""
    habits = random.Random(job.seed * 7919 + number)
    slow = chance.random() < 0.05
    return Pace(
        step_s=job.step_s * chance.uniform(0.5, 1.5) * (4 if slow else 1),
        workers=chance.choice((0, 0, 0, 0, 0, 0, 0, 1, 2)),
        accumulates=chance.choice((0, 0, 0, 0, 1, 2, 3)),
        tells=habits.choice((0,) * 7 + (2,)),
        pads=habits.choice((0.0,) * 7 + (0.2,)),
    )


class Trainer:
    """One life of a trainer. `token` is restored first: a text, None for the beginning, or False for none."""

    padding: Ticket = ()

    def __init__(
        self,
        number: int,
        job: Job,
        *,
        hub: Hub,
        network: Network,
        master: SimMaster,
        model: History,
        token: str | bool | None = False,
        on_end: Callable[[Trainer], None],
        pace: Pace | None = None,
        audit_dir: Path | None = None,
    ) -> None:
        self.number = number
        self.session = f"s{number}"
        self.hang_s = 0.0  # of the next step
        self.leave = False
        self.breaks = 0
        self.inner_passes = 0
        self.batches_read = 0
        self.ended = False
        chance = self._chance = random.Random(job.seed * 1_000_003 + number)
        self.pace = pace or any_pace(job, chance, number)
        self.shell = SimSession(
            self.session,
            f"t{number}",
            job.description(),
            hub,
            network,
            master,
            audit_dir,
            manual=bool(self.pace.tells),
        )
        self.process, self.port = self.shell.process, self.shell.port
        self.job, self.hub = job, hub
        self._model, self._token = model, token
        self._on_end = on_end
        self._trainer = self.shell.trainer
        self._in_loop: list[Ticket] = []  # handed, not stepped on
        self._left: Ticket | None = None  # the batch that was in hand when the loop was left
        self._ahead: deque[Ticket] = deque()  # a wrapper has read them, and not passed them on
        self._is_read = False  # all of the pass, by the wrapper
        self._inner: Batches | None = None  # what reads, while there is something to read
        self._optimizer = -1
        hub.after(0, self.process.run, self._main())

    def _main(self) -> Procedure[None]:
        self.shell.begin()
        try:
            yield from self._live()
        except (AccountingError, InvalidArgument):
            raise
        except EdlError as error:  # the process ends with a traceback, and its exit closes the service
            self._ends(error)
        yield from self._exit()

    def _ends(self, error: EdlError) -> None:
        self._model.note(self.hub.now, self.session, "ends", type(error).__name__)

    def _exit(self) -> Procedure[None]:
        try:
            yield from self.shell.close()
        except EdlError as error:
            self._model.note(self.hub.now, self.session, "closes", type(error).__name__)
        self.ended = True
        self._on_end(self)

    def _live(self) -> Procedure[None]:
        if self._token is not False:
            yield from self.shell.restore(self._token or None)  # type: ignore[arg-type]
        self._attach()
        yield from self._trainer.registrar.plan()
        while not self.leave:
            if (yield from self.shell.progress()).finished:
                return
            yield from self._pass()

    def _attach(self) -> None:
        if self.pace.accumulates:
            self._optimizer = self._trainer.state.batches.attach("optimizer")

    def _pass(self) -> Procedure[None]:
        number = yield from self._trainer.open()
        self._ahead.clear()
        self._is_read = False
        while (ticket := (yield from self._next_in_loop(number))) is not None:
            self._left = None
            self._in_loop.append(ticket)
            yield Sleep(self._step_takes_s() + self.hang_s)
            self.hang_s = 0.0
            if len(self._in_loop) >= self.pace.accumulates:
                yield from self._step()
            if self.job.saves and self._chance.random() < self.job.saves:
                yield from self._save()
            if self.leave or (self.job.breaks and self._chance.random() < self.job.breaks):
                yield from self._break(number)
                break
        # What is left at the end of a job counts without a step, and is not learnt.
        if self._in_loop and not self._keeps():
            yield from self._step()
        self._stop_reading()

    def _keeps(self) -> bool:
        """Whether what was gathered waits for the next pass: only a loop that was left may have one."""
        return bool(self._left and self.pace.keeps) and self._chance.random() < self.pace.keeps

    def _step_takes_s(self) -> float:
        jitter = self.pace.jitter
        return self.pace.step_s * (self._chance.uniform(1 - jitter, 1 + jitter) if jitter else 1)

    def _break(self, number: int) -> Procedure[None]:
        """What was not stepped on is taken from the batch in hand only; a later step may cover the others."""
        # Behind a wrapper that has read the pass to its end nobody hears of it before the next one.
        yield from self._trainer.elastic.close(number)
        if self._in_loop:
            self._left = self._in_loop.pop()
        self.breaks += 1

    def _step(self) -> Procedure[None]:
        """The optimizer steps, or the loop comes to the end of its body."""
        for ticket in self._in_loop:
            self._model.trained(ticket)
        self._in_loop.clear()
        if self.pace.accumulates:
            left = self._left is not None
            yield from self._trainer.elastic.stepped(self._optimizer, before_hand=left)

    def _save(self) -> Procedure[None]:
        yield from self._trainer.position.snapshot()

    # What a wrapper does that reads ahead -----------------------------------------------------------------

    def _next_in_loop(self, number: int) -> Procedure[Ticket | None]:
        if not self.pace.tells:
            return (yield from self._next_batch(number))
        while not self._is_read and len(self._ahead) <= self.pace.tells:
            ticket = yield from self._next_batch(number)
            if ticket is None:
                self._is_read = True
            else:
                self._ahead.append(ticket)
        passed = yield from self._trainer.elastic.passed_on()
        ticket = self._ahead.popleft() if self._ahead else None
        void = passed is not None and not passed.ticket
        if not void and ticket != (None if passed is None else passed.ticket):
            raise BrokenPromise(f"{self.session} was passed {ticket}, and its trainer says {passed}")
        return ticket

    # What `data.loop.loader_pass` does --------------------------------------------------------------------

    def _next_batch(self, number: int) -> Procedure[Ticket | None]:
        passes = self._trainer.elastic
        if not (yield from passes.request(number)):
            return None
        if self.pace.pads and self._chance.random() < self.pace.pads:
            passes.pad()
            return self.padding
        while True:
            if self._inner is None:
                if not (yield from passes.more_to_read()):
                    yield from passes.close(number)
                    return None
                self.inner_passes += 1
                self._inner = Workers(self) if self.pace.workers else Reader(self, "main")
            ticket = yield from self._inner.next()
            if ticket is None:
                self._stop_reading()
            elif self.job.drop_last and ticket_size(ticket) < self.job.batch:
                yield from passes.return_remainder(ticket)
            elif (yield from passes.hand(ticket)):
                self._model.handed(self.session, ticket)
                return ticket

    def _stop_reading(self) -> None:
        if self._inner is not None:
            self._inner.end()
            self._inner = None

    # What a reading process does --------------------------------------------------------------------------

    def begun(self, stream: str, grant: Grant) -> None:
        """A reading process begins to read a lease."""
        plan = self._trainer.state.registered.plan
        if plan is not None:
            self._model.begun(self._trainer.state.fence, grant.slice, plan)

    def read_batch(self, stream: str, tally: Tally) -> Procedure[Ticket]:
        """Return the batch that a reading process has drawn."""
        self.batches_read += 1
        if self.pace.read_s:
            yield Sleep(self.pace.read_s)
        return tally.take()[0]

    def first_bad(self, stream: str, grant: Grant, first: int, stop: int) -> int:
        """The first position from `first` on that cannot be read; the same for whoever reads it.

        Of records that are mixed it is the position that is bad: to look the record up takes far longer.
        """
        every = self.job.bad_every
        if not every:
            return stop
        base = grant.slice.shard * self.job.records_per_shard
        return first + -(base + first + 7) % every


class Batches(Protocol):
    """What is read in one inner pass."""

    def next(self) -> Procedure[Ticket | None]:
        """Return the next batch; None at the end."""
        ...

    def end(self) -> None:
        """Nobody asks any more."""
        ...


class Reader:
    """What `ShardedDataset` and the collate wrapper do in one reading process."""

    def __init__(self, trainer: Trainer, stream: str) -> None:
        self._reads_for = trainer
        self._trainer = trainer.shell.trainer
        self._stream = stream
        self._number = 0
        self._grant: Grant | None = None
        self._tally = Tally()
        self._run = [0, 0, 0]
        self._stop = 0
        self._missing = trainer.job.batch
        self._over = False

    def end(self) -> None:
        """Nobody asks any more."""

    def next(self) -> Procedure[Ticket | None]:
        """Return the next batch; None at the end."""
        while not self._over:
            if self._run[2] < self._stop:
                yield from self._draw()
            elif (yield from self._next_grant()) is None:
                self._over = True
                if self._missing == self._reads_for.job.batch:
                    return None
                self._missing = 0
            if not self._missing:
                self._missing = self._reads_for.job.batch
                return (yield from self._reads_for.read_batch(self._stream, self._tally))
        return None

    def _next_grant(self) -> Procedure[Grant | None]:
        if not self._number:
            self._number, _ = yield from self._trainer.begin_stream()
        grant = self._grant = yield from self._trainer.leasing.next(self._stream, self._number)
        if grant is not None:
            self._reads_for.begun(self._stream, grant)
            self._run, self._stop = self._tally.start(grant.task, grant.slice.skip), grant.slice.stop
        return grant

    def _draw(self) -> Procedure[None]:
        """Draw samples for the batch, up to the next that cannot be read."""
        run, grant = self._run, self._grant
        assert grant is not None
        stop = min(self._stop, run[2] + self._missing)
        bad = self._reads_for.first_bad(self._stream, grant, run[2], stop)
        self._missing -= min(stop, bad) - run[2]
        run[2] = min(stop, bad)
        if bad < stop:
            yield from self._trainer.fail_record(grant.task, bad, "bad")
            self._run = self._tally.start(grant.task, bad + 1)


class Workers:
    """What a `DataLoader` does: batches of each worker in turn; workers read ahead."""

    def __init__(self, trainer: Trainer) -> None:
        self._over = False
        self._queues: list[deque[Ticket | EdlError | None]] = [deque() for _ in range(trainer.pace.workers)]
        self._reading = deque(range(trainer.pace.workers))
        for worker in range(trainer.pace.workers):
            trainer.process.start(self._work(trainer, worker))

    def end(self) -> None:
        """Nobody asks any more: workers end."""
        self._over = True

    def _work(self, trainer: Trainer, worker: int) -> Procedure[None]:
        queue, reader = self._queues[worker], Reader(trainer, f"worker {worker}")

        def has_room() -> bool:
            return len(queue) < PREFETCH or self._over

        if trainer.pace.start_s:
            yield Sleep(trainer.pace.start_s)
        try:
            while (ticket := (yield from reader.next())) is not None:
                queue.append(ticket)
                yield Wait(has_room)
                if self._over:
                    return
        except EdlError as error:  # the loop raises what a worker raised
            queue.append(error)
        else:
            queue.append(None)

    def next(self) -> Procedure[Ticket | None]:
        """Return the next batch; None at the end."""
        while self._reading:
            queue = self._queues[self._reading[0]]
            if not queue:
                yield Wait(queue.__len__)
            ticket = queue.popleft()
            if isinstance(ticket, EdlError):
                raise ticket
            if ticket is None:
                self._reading.popleft()
            else:
                self._reading.rotate(-1)
                return ticket
        return None
