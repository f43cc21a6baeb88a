"""A job with one model under random faults: a runner, its incarnations, and those that were superseded.

The runner is what torchrun or a spot scheduler is: it sees that a trainer died at once, and that one does not
answer after its patience; it starts another. A superseded trainer that is alive goes on when it wakes, with
whatever it was in. The weights are compared with tokens at every save and restore, and at the end.
"""

from __future__ import annotations

import gc
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from sim_checkpoints import Folder
from sim_hub import Hub
from sim_master import DATASET, SimMaster
from sim_model import BrokenPromise, History
from sim_model_trainer import Fates, Incarnation
from sim_network import Network, Weather
from sim_trainer import Job, Pace
from sim_weights import Judge, Weights

STUCK_S = 3000.0  # without a record learnt: longer than a job with a dead master waits, several times
LOOK_S = 10.0
AWAKE_S = 400.0  # the longest sleep of a superseded trainer, and so the time that it may do harm in
MOST_ZOMBIES = 6
FAULTS: dict[str, int] = {
    "kill": 10,
    "stop": 20,
    "cut": 10,
    "stream": 10,
    "hang": 8,
    "master": 8,
    "supersede": 12,
    "leave": 6,
    "rollback": 12,
    "forget": 2,
}
DATA = 2  # as such a number: how often the data become others


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """A run. Faults come one after the other, `fault_every_s` apart on average, while `faults` last."""

    seed: int
    job: Job
    pace: Pace
    faults: int
    fault_every_s: float = 40.0
    kinds: dict[str, int] = field(default_factory=lambda: dict(FAULTS))
    fates: Fates = field(default_factory=Fates)
    weather: Weather = field(default_factory=lambda: Weather(0.002, 0.002, 0.002, 0.0005))
    lease_timeout_s: float = 10.0
    grace_s: float = 1.0
    progress_timeout_s: float = 15.0
    forgets: float = 0.0  # how likely it is that a trainer goes back to a token without its model
    audit_dir: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelResult:
    """What a run did. `died_of` counts the errors that ended incarnations; the model is that of the last."""

    digest: str
    events: int
    compared: int
    saved: int
    incarnations: int
    zombies: int
    rolled_back: int
    faults: Counter[str]
    died_of: Counter[str]
    model: Weights
    simulated_s: float
    cpu_s: float

    @property
    def rate(self) -> float:
        """Events for a second of processor time."""
        return self.events / self.cpu_s


class ModelJob:
    """One run. `run` raises BrokenPromise, or whatever the code under test raises."""

    def __init__(self, options: ModelOptions) -> None:
        self.options = options
        self.hub = Hub()
        self.chance = random.Random(options.seed)
        self.history = History()
        self.master = SimMaster(
            self.hub,
            self.history,
            lease_timeout_s=options.lease_timeout_s,
            grace_s=options.grace_s,
            progress_timeout_s=options.progress_timeout_s,
        )
        self.network = Network(self.hub, random.Random(options.seed + 1), options.weather)
        self.folder = Folder(Judge(options.job))
        self.job = options.job  # as the data are now
        self.counts: Counter[str] = Counter()
        self.died_of: Counter[str] = Counter()
        self.current: Incarnation | None = None
        self.superseded: list[Incarnation] = []
        self.done = False  # the runner has seen an incarnation end well
        self._knows_old_data = False  # the master: they were others when it began
        self._model = self.folder.judge.nothing()
        self._lives = self._zombies = self._rolled_back = 0
        self._left = options.faults
        self._learnt = (0.0, (0, 0))

    # The run --------------------------------------------------------------------------------------------

    def run(self) -> ModelResult:
        """To the end of the job, and of all who were superseded."""
        began = time.process_time()
        self._start()
        self.hub.after(self._pause_s(), self._fault)
        self.hub.after(LOOK_S, self._look)
        thresholds = gc.get_threshold()
        gc.set_threshold(100_000, 50, 50)
        try:
            self.hub.run(lambda: self.done and self.master.up and not self.superseded)
        finally:
            gc.set_threshold(*thresholds)
            for each in (*self.superseded, *([self.current] if self.current else [])):
                each.shell.kill()
        return ModelResult(
            digest=self.history.steps.hexdigest(),
            events=self.hub.events,
            compared=self.folder.judge.compared,
            saved=self.folder.saved,
            incarnations=self._lives,
            zombies=self._zombies,
            rolled_back=self._rolled_back,
            faults=self.counts,
            died_of=self.died_of,
            model=self._model,
            simulated_s=self.hub.now,
            cpu_s=time.process_time() - began,
        )

    def _look(self) -> None:
        """The job moves on."""
        self.hub.after(LOOK_S, self._look)
        newest = int(self.current.weights.counts.sum()) if self.current else 0
        seen = self.folder.saved, newest
        if seen != self._learnt[1]:
            self._learnt = self.hub.now, seen
        elif self.hub.now - self._learnt[0] > STUCK_S:
            raise BrokenPromise(f"the job is stuck: {self._ledger()}, {self.died_of}")

    def _ledger(self) -> object:
        return self.master.dispatcher.find_ledger(DATASET)

    # The runner -----------------------------------------------------------------------------------------

    def _start(self) -> None:
        """A new incarnation; the one before it, where it is alive, is superseded."""
        if self.done:
            return
        old = self.current
        if old is not None and not old.ended:
            self._zombies += 1
            self.superseded.append(old)
            if self.chance.random() < 0.3:  # some are found and killed
                self.hub.after(self.chance.uniform(0, 10 * self._timeout_s), self._bury, old)
            else:
                self.hub.after(2 * AWAKE_S, self._bury, old)
            if len(self.superseded) > MOST_ZOMBIES:
                self._bury(self.superseded[0])
        self._lives += 1
        self.current = Incarnation(
            *(self._lives, self.job),
            hub=self.hub,
            network=self.network,
            master=self.master,
            model=self.history,
            pace=self.options.pace,
            folder=self.folder,
            fates=self.options.fates if self._left else Fates(stop=0.0, kill=0.0),
            on_stop=self._stop,
            on_kill=self._kill,
            on_end=self._ended,
            forgets=bool(self.options.forgets) and self.chance.random() < self.options.forgets,
            audit_dir=self.options.audit_dir,
        )

    def _bury(self, zombie: Incarnation) -> None:
        if zombie in self.superseded:
            self.superseded.remove(zombie)
            self._end(zombie)

    def _end(self, trainer: Incarnation) -> None:
        trainer.shell.kill()
        self.master.stream_broke(trainer.session)

    def _ended(self, trainer: Incarnation) -> None:
        """A process has ended by itself."""
        self.died_of[trainer.died_of or ("finished" if trainer.finished else "left")] += 1
        self.hub.after(0, self._reap, trainer)

    def _reap(self, trainer: Incarnation) -> None:
        self._end(trainer)
        if trainer in self.superseded:
            self.superseded.remove(trainer)
        if trainer is self.current:
            self.current = None
            self._heed(trainer.died_of)
            if trainer.finished and not trainer.died_of:
                self.done = True
                self._left = 0
                self._model = trainer.weights
            else:
                self.hub.after(self.chance.uniform(0, 2), self._start_if_none)

    def _heed(self, died_of: str) -> None:
        """Where the data have changed, the user does what the error says."""
        if died_of == "DatasetConflict" and self._knows_old_data:
            self._knows_old_data = False
            self._master_dies(self.master.forget)
        elif died_of == "TokenError" and not self.job.follows_data:
            self.job = replace(self.job, follows_data=True)
        elif died_of in ("DatasetConflict", "TokenError"):
            raise BrokenPromise(f"a trainer of the data as they are was refused: {died_of}")

    def _start_if_none(self) -> None:
        if self.current is None:
            self._start()

    def _watch(self, trainer: Incarnation, troubled: Callable[[], bool]) -> None:
        """It does not answer: after its patience the runner starts another."""
        patience_s = self.chance.choice((0.0, 0.5, 1.5, 3.0)) * self._timeout_s

        def look() -> None:
            if trainer is self.current and not trainer.ended and troubled():
                self._start()

        self.hub.after(patience_s, look)

    # Faults ---------------------------------------------------------------------------------------------

    def _fault(self) -> None:
        if not self._left:
            return
        self._left -= 1
        kinds = self.options.kinds
        kind = self.chance.choices(list(kinds), list(kinds.values()))[0]
        self.counts[kind] += 1
        self.history.note(self.hub.now, kind)
        alive = [*self.superseded, *([self.current] if self.current else [])]
        # Most of them are of the trainer that the runner believes in.
        chosen = self.current if self.current and self.chance.random() < 0.8 else None
        if chosen is None and alive:
            chosen = self.chance.choice(alive)
        if chosen is not None:
            getattr(self, f"_{kind}")(chosen)
        self.hub.after(self._pause_s(), self._fault)

    def _pause_s(self) -> float:
        return self.chance.expovariate(1 / self.options.fault_every_s)

    @property
    def _timeout_s(self) -> float:
        return self.options.lease_timeout_s

    def _duration(self) -> float:
        """Of a stop or a cut: shorter than the timeout, longer, or until nobody thinks of it any more."""
        parts = self.chance.uniform(0.1, 0.6), self.chance.uniform(1.1, 2.0), self.chance.uniform(2, 40)
        return self.chance.choice(parts) * self._timeout_s

    def _after(self, seconds: float, trainer: Incarnation, action: Callable[[], None]) -> None:
        self.hub.after(seconds, lambda: None if trainer.process.dead else action())

    def _kill(self, trainer: Incarnation) -> None:
        if trainer.process.dead:
            return
        self._end(trainer)
        trainer.ended = True
        if trainer in self.superseded:
            self.superseded.remove(trainer)
        elif trainer is self.current:
            self.current = None
            seconds = self.chance.choice((0.0, self.chance.uniform(0, 2 * self._timeout_s)))
            self.hub.after(seconds, self._start_if_none)

    def _stop(self, trainer: Incarnation) -> None:
        trainer.process.stop()
        self._watch(trainer, lambda: trainer.process.stopped)
        self._after(self._duration(), trainer, trainer.process.go_on)

    def _cut(self, trainer: Incarnation) -> None:
        trainer.port.cut = True
        if self.chance.random() < 0.5:
            self.master.stream_broke(trainer.session)

        def mend() -> None:
            trainer.port.cut = False
            self.master.stream_broke(trainer.session)

        self._watch(trainer, lambda: trainer.port.cut)
        self._after(self._duration(), trainer, mend)

    def _stream(self, trainer: Incarnation) -> None:
        self.master.stream_broke(trainer.session)

    def _hang(self, trainer: Incarnation) -> None:
        trainer.hang_s = self._duration()
        self._watch(trainer, lambda: True)

    def _supersede(self, trainer: Incarnation) -> None:
        """The runner's own network was cut: it gives up a trainer that nothing is wrong with."""
        self._start()

    def _leave(self, trainer: Incarnation) -> None:
        trainer.leave = True

    def _master(self, _: Incarnation) -> None:
        self._master_dies(lambda: None)

    def _rollback(self, _: Incarnation) -> None:
        """The journal is one of a transaction ago, of a few, or of some seconds."""
        extent = self.chance.choice(("one", "few", "seconds"))
        commits = {"one": 1, "few": self.chance.randint(2, 12), "seconds": 0}[extent]
        seconds = self.chance.uniform(0, 4 * self._timeout_s) if extent == "seconds" else 0.0

        def roll_back() -> None:
            self._rolled_back += self.master.roll_back(commits=commits, seconds=seconds)

        self._master_dies(roll_back)

    def _forget(self, _: Incarnation) -> None:
        self._master_dies(self.master.forget)

    def _data(self, _: Incarnation) -> None:
        """All trainers end, and the data are others when the next one begins; it may know of it, or not.

        So may the user know that a master which keeps their old names must go, or not.
        """
        newest = self.folder.newest
        cursor = json.loads(self.folder.read(newest).token)["cursor"] if newest else [0, 0, 0]
        first_epoch = cursor[0] + bool(cursor[1] or cursor[2])
        if first_epoch >= self.job.epochs or not self.master.up:
            return
        while self.superseded:
            self._bury(self.superseded[0])
        if self.current is not None:
            self._end(self.current)
            self.current = None
        self.job = replace(
            self.job,
            size=self.job.size + self.chance.choice((0, 0, 5, -5)),
            data=self.job.data + 1,
            follows_data=self.chance.random() < 0.5,
        )
        self.folder.judge = Judge(self.job, first_epoch, compared=self.folder.judge.compared)
        self._knows_old_data = self.chance.random() < 0.5
        if not self._knows_old_data:
            self._master_dies(self.master.forget)
        self.hub.after(0, self._start_if_none)

    def _master_dies(self, meanwhile: Callable[[], object]) -> None:
        if not self.master.up:
            return
        self.master.kill()
        meanwhile()
        away_s = self.chance.choice((0.0, self.chance.uniform(0, 1.5 * self._timeout_s)))
        self.hub.after(away_s, self.master.start)


def model_options(seed: int, *, shards: int = 4000, faults: int = 240, simple: bool = False) -> ModelOptions:
    """What kind of job it is depends on the seed, so that a few seeds go through all kinds.

    A `simple` one mixes no records, its data stay as they are, and it has no wrapper that reads ahead, no
    padding batches, no windows left.
    """
    kind = random.Random(seed)
    job = Job(
        size=8 * shards - 3,
        records_per_shard=8,
        batch=4,
        epochs=2 + seed % 2,
        seed=seed,
        shuffle_shards=seed % 5 != 0,
        drop_last=seed % 4 == 1,
        bad_every=97 if seed % 3 == 0 else 0,
        breaks=kind.choice((0.0, 0.002)),
        saves=kind.choice((0.005, 0.01, 0.03)),
    )
    pace = Pace(
        step_s=kind.uniform(0.2, 0.6),
        jitter=0.3,
        workers=kind.choice((0, 0, 1, 2)),
        accumulates=kind.choice((0, 1, 1, 2, 3)),
    )
    kinds = dict(FAULTS)
    if not simple:
        job = replace(job, shuffle_window=kind.choice((None, 1, 2, 16, 10**6)))
        pace = replace(pace, tells=kind.choice((0, 1, 3)), pads=kind.choice((0.0, 0.1)))
        if kind.random() < 0.5:
            job, pace = replace(job, breaks=0.02), replace(pace, keeps=0.5)
        if kind.random() < 0.5:
            kinds["data"] = DATA
    every_s = pace.step_s * job.size * job.epochs / job.batch / faults
    return ModelOptions(seed=seed, job=job, pace=pace, faults=faults, fault_every_s=every_s, kinds=kinds)
