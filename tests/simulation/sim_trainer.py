"""A trainer process in the simulation: a real session, and a training loop around it.

The loop does what `data.loader` and a `DataLoader` with its workers do with a session's elastic passes,
without the records: it draws positions, makes tickets, hands batches, trains, breaks, saves and restores.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sim_hub import Hub, Process, SimThreads
from sim_master import DATASET, SimMaster
from sim_model import History
from sim_network import Network, SimPort

from edl_torch.client.description import Description
from edl_torch.client.session import Session
from edl_torch.core.calls import Grant
from edl_torch.errors import AccountingError, EdlError, InvalidArgument
from edl_torch.shard import DatasetSpec, Source
from edl_torch.trainer.supply import Mode
from edl_torch.trainer.tickets import Tally, Ticket, ticket_size

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
    drop_last: bool = False
    bad_every: int = 0  # of so many positions one cannot be read
    breaks: float = 0.0  # how likely it is that a loop breaks after a batch
    saves: float = 0.0  # how likely it is that it takes a token
    step_s: float = 0.5

    def spec(self) -> DatasetSpec:
        """As a master has it."""
        return DatasetSpec(
            name=DATASET,
            sources=(Source(name="", count=self.size),),
            records_per_shard=self.records_per_shard,
            shuffle_shards=self.shuffle_shards,
            seed=self.seed,
            num_epochs=self.epochs,
        )

    def description(self) -> Description:
        """As a service describes it."""
        return Description(
            name=DATASET,
            batch_size=self.batch,
            dataset_size=self.size,
            num_epochs=self.epochs,
            records_per_shard=self.records_per_shard,
            shuffle_shards=self.shuffle_shards,
            seed=self.seed,
            max_bad_records=self.size * self.epochs if self.bad_every else 0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What one trainer is like: seconds for a step, give or take the part `jitter`, and to read a batch; its
    loader workers and how long one takes to start; batches for one step of its optimizer (0: it has none)."""

    step_s: float
    jitter: float = 0.0
    workers: int = 0
    accumulates: int = 0
    read_s: float = 0.0
    start_s: float = 0.0


def any_pace(job: Job, chance: random.Random) -> Pace:
    """One in twenty is slow."""
    slow = chance.random() < 0.05
    return Pace(
        step_s=job.step_s * chance.uniform(0.5, 1.5) * (4 if slow else 1),
        workers=chance.choice((0, 0, 0, 0, 0, 0, 0, 1, 2)),
        accumulates=chance.choice((0, 0, 0, 0, 1, 2, 3)),
    )


class Trainer:
    """One life of a trainer. `token` is restored first: a text, None for the beginning, or False for none."""

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
    ) -> None:
        self.number = number
        self.session = f"s{number}"
        self.hang_s = 0.0  # of the next step
        self.leave = False
        self.breaks = 0
        self.inner_passes = 0
        self.batches_read = 0
        self.ended = False
        self.process = Process(hub)
        self.port = SimPort(self.process, network, master, f"t{number}")
        self._job, self._hub, self._model, self._token = job, hub, model, token
        self._on_end = on_end
        chance = self._chance = random.Random(job.seed * 1_000_003 + number)
        self._pace = pace or any_pace(job, chance)
        self._in_loop: list[Ticket] = []  # handed, not stepped on
        self.process.start(self._main)

    def _new_session(self) -> Session:
        return Session(self.port, self._job.description(), 0, threads=SimThreads(self.process, self.session))

    def _main(self) -> None:
        session = self._new_session()
        try:
            self._live(session)
        except (AccountingError, InvalidArgument):
            raise
        except EdlError as error:  # the process ends with a traceback, and its exit closes the service
            self._model.note(self._hub.now, self.session, "ends", type(error).__name__)
        try:
            session.close()
        except EdlError as error:
            self._model.note(self._hub.now, self.session, "closes", type(error).__name__)
        self.ended = True
        self._on_end(self)

    def _live(self, session: Session) -> None:
        if self._token is not False:
            session.position.restore(self._token or None)  # type: ignore[arg-type]
        self._optimizer = session.elastic.attach("optimizer") if self._pace.accumulates else -1
        session.plan()
        while not self.leave:
            session.flush()
            if session.position.progress().finished:
                return
            self._pass(session)

    def _pass(self, session: Session) -> None:
        passes = session.elastic
        number = passes.open()
        try:
            for ticket in self._batches(session, number):
                self._model.handed(self.session, ticket)
                self._in_loop.append(ticket)
                self._hub.sleep(self._step_takes_s() + self.hang_s)
                self.hang_s = 0.0
                if len(self._in_loop) >= self._pace.accumulates:
                    self._step(session)
                if self._job.saves and self._chance.random() < self._job.saves:
                    self._save(session)
                if self.leave or (self._job.breaks and self._chance.random() < self._job.breaks):
                    break
        except AccountingError as error:
            if "after the last optimizer.step()" not in str(error):
                raise
            passes.close(number)
            self._step(session)  # as it says
        else:
            if passes.is_open(number):
                self._break(session, number)

    def _step_takes_s(self) -> float:
        jitter = self._pace.jitter
        return self._pace.step_s * (self._chance.uniform(1 - jitter, 1 + jitter) if jitter else 1)

    def _break(self, session: Session, number: int) -> None:
        """What was not stepped on is taken from the batch in hand only; a later step may cover the others."""
        session.elastic.close(number)
        if self._in_loop:
            self._in_loop.pop()
        self.breaks += 1

    def _step(self, session: Session) -> None:
        """The optimizer steps, or the loop comes to the end of its body."""
        for ticket in self._in_loop:
            self._model.trained(ticket)
        self._in_loop.clear()
        if self._pace.accumulates:
            session.elastic.stepped(self._optimizer)

    def _save(self, session: Session) -> None:
        session.position.snapshot()

    # What `data.loader._Pass` does ------------------------------------------------------------------------

    def _batches(self, session: Session, number: int) -> Iterator[Ticket]:
        passes = session.elastic
        inner: Iterator[Ticket] | None = None
        while passes.is_open(number):
            passes.batch_requested()
            while True:
                if inner is None:
                    if not passes.more_to_read():
                        passes.close(number)
                        return
                    inner = self._read(session)
                ticket = next(inner, None)
                if ticket is None:
                    inner = None
                elif self._job.drop_last and ticket_size(ticket) < self._job.batch:
                    passes.return_remainder(ticket)
                elif passes.hand(ticket):
                    break
            yield ticket

    # What a `DataLoader` does -----------------------------------------------------------------------------

    def _read(self, session: Session) -> Iterator[Ticket]:
        self.inner_passes += 1
        if not self._pace.workers:
            return self._tickets(session, "main")
        return self._from_workers(session)

    def _from_workers(self, session: Session) -> Iterator[Ticket]:
        """Batches of each worker in turn; workers read ahead."""
        news = SimThreads(self.process, "").condition()
        queues: list[deque[Ticket | EdlError | None]] = [deque() for _ in range(self._pace.workers)]

        def work(worker: int) -> None:
            queue = queues[worker]
            last: EdlError | None = None
            if self._pace.start_s:
                self._hub.sleep(self._pace.start_s)
            try:
                for ticket in self._tickets(session, f"worker {worker}"):
                    with news:
                        queue.append(ticket)
                        news.notify_all()
                        news.wait_for(lambda: len(queue) < PREFETCH)
            except EdlError as error:  # the loop raises what a worker raised
                last = error
            with news:
                queue.append(last)
                news.notify_all()

        for worker in range(self._pace.workers):
            self.process.start(lambda worker=worker: work(worker))  # type: ignore[misc]
        reading = list(range(self._pace.workers))
        while reading:
            for worker in tuple(reading):
                with news:
                    news.wait_for(lambda: queues[worker])  # noqa: B023  used at once
                    ticket = queues[worker].popleft()
                    news.notify_all()
                if isinstance(ticket, EdlError):
                    raise ticket
                if ticket is None:
                    reading.remove(worker)
                else:
                    yield ticket

    def _tickets(self, session: Session, stream: str) -> Iterator[Ticket]:
        """What `ShardedDataset` and the collate wrapper do in one reading process."""
        number, _ = session.begin_stream(stream, Mode.ELASTIC)
        tally, wanted = Tally(), self._job.batch
        missing = wanted
        while (grant := session.next_grant(stream, number)) is not None:
            self._begun(stream, grant)
            run = tally.start(grant.task, grant.slice.skip)
            while run[2] < grant.slice.stop:
                stop = min(grant.slice.stop, run[2] + missing)
                bad = self._first_bad(grant, run[2], stop)
                missing -= min(stop, bad) - run[2]
                run[2] = min(stop, bad)
                if bad < stop:
                    session.fail_record(grant.task, bad, "bad")
                    run = tally.start(grant.task, bad + 1)
                elif not missing:
                    yield self._read_batch(stream, tally)
                    missing = wanted
        if missing < wanted:
            yield self._read_batch(stream, tally)

    def _begun(self, stream: str, grant: Grant) -> None:
        """A reading process begins to read a lease."""

    def _read_batch(self, stream: str, tally: Tally) -> Ticket:
        self.batches_read += 1
        if self._pace.read_s:
            self._hub.sleep(self._pace.read_s)
        return tally.take()

    def _first_bad(self, grant: Grant, first: int, stop: int) -> int:
        """The first position from `first` on that cannot be read; the same for whoever reads it."""
        every = self._job.bad_every
        if not every:
            return stop
        base = grant.slice.shard * self._job.records_per_shard
        return first + -(base + first + 7) % every
