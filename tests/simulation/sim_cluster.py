"""A whole job under random faults, on one thread and a clock of its own: a function of the seed alone."""

from __future__ import annotations

import gc
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from sim_hub import Hub
from sim_master import DATASET, SimMaster
from sim_mixture import MixtureModel, Reweigher
from sim_model import BrokenPromise, Model
from sim_network import Network, Weather
from sim_trainer import Job, Trainer

from edl_torch.core.calls import Acknowledgement, Fence, Registration, ReportCall
from edl_torch.core.plan import Plan

STUCK_S = 900.0  # without an outcome: longer than any fault, and than a job with a dead master waits
LOOK_S = 10.0
ALL_FAULTS: dict[str, int] = {
    "kill": 30,
    "stop": 15,
    "cut": 10,
    "stream": 15,
    "hang": 8,
    "master": 4,
    "join": 4,
    "leave": 4,
    "forge": 10,
    "weights": 40,  # of mixtures
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """A run. `faults` come one after the other while the job runs; `restores` of them go back to a token."""

    seed: int
    trainers: int
    job: Job
    faults: int
    restores: int = 0
    weather: Weather = field(default_factory=lambda: Weather(0.002, 0.002, 0.002, 0.0005))
    lease_timeout_s: float = 10.0
    grace_s: float = 1.0
    progress_timeout_s: float = 15.0
    audit_dir: Path | None = None  # where trainers write down what happens to them


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a run did. `digest` is of every call, answer and fault, with its time."""

    digest: str
    events: int
    records: int
    doubled: int
    allowed: int
    faults: Counter[str]
    simulated_s: float
    cpu_s: float
    processes: int

    @property
    def rate(self) -> float:
        """Events for a second of processor time."""
        return self.events / self.cpu_s


class Cluster:
    """One run. `run` raises BrokenPromise, or whatever the code under test raises."""

    def __init__(
        self,
        options: Options,
        tell: Callable[[str], None] = lambda _: None,
        watch: Callable[[Plan, int], Model] = Model,
    ) -> None:
        job = options.job
        self._tell = tell
        self.options = options
        self.hub = Hub()
        self.chance = random.Random(options.seed)
        spec = job.spec()
        self.model = (MixtureModel if job.components else watch)(Plan(spec), job.batch)
        self.master = SimMaster(
            self.hub,
            self.model,
            lease_timeout_s=options.lease_timeout_s,
            grace_s=options.grace_s,
            progress_timeout_s=options.progress_timeout_s,
        )
        description = job.description()
        sources = description.sources()
        assert sources is not None
        registration: Registration = description.in_full(sources)
        self.master.dispatcher.define(registration, batch_size=job.batch)
        self.network = Network(self.hub, random.Random(options.seed + 1), options.weather)
        self.counts: Counter[str] = Counter()
        self.excuses = 0  # disturbances that may cost a batch each
        self.trainers: list[Trainer] = []
        self._ended: set[Trainer] = set()  # of them: after each event somebody asks whether all have
        self._lives = 0
        self._spared_until = 0.0
        self._left = options.faults
        self._restores = options.restores

    # The run --------------------------------------------------------------------------------------------

    def run(self) -> Result:
        """To the end of the job."""
        began = time.process_time()
        for _ in range(self.options.trainers):
            self.hub.after(self.chance.uniform(0, 5), self._start)
        self.hub.after(10, self._fault)
        self.hub.after(LOOK_S, self._look)
        self.hub.after(10, gc.freeze)  # by then all trainers are there, and stay for long
        thresholds = gc.get_threshold()
        gc.set_threshold(100_000, 50, 50)
        try:
            self.hub.run(self._over)
        finally:
            gc.unfreeze()
            gc.set_threshold(*thresholds)
            for trainer in self.trainers:
                trainer.shell.kill()
        self.model.finished(self.master.ledger)
        doubled = self.model.trained_records - self.model.done
        excuses = self.excuses + sum(trainer.breaks for trainer in self.trainers)
        allowed = self.options.job.batch * excuses
        if not self.counts["restore"] and doubled > allowed:
            raise BrokenPromise(f"{doubled} records were trained twice; {self.counts} excuse {allowed}")
        return Result(
            digest=self.model.steps.hexdigest(),
            events=self.hub.events,
            records=self.model.done + self.model.bad,
            doubled=doubled,
            allowed=allowed,
            faults=self.counts,
            simulated_s=self.hub.now,
            cpu_s=time.process_time() - began,
            processes=self._lives,
        )

    def _over(self) -> bool:
        if self._left or not self.master.up or len(self._ended) < len(self.trainers):
            return False
        return self.master.ledger.finished  # else they were asked to leave, and others come in their place

    def _look(self) -> None:
        """Nobody hangs; who has ended is replaced while there is work."""
        self.hub.after(LOOK_S, self._look)
        if self.hub.now - self.model.last_outcome_at > STUCK_S:
            raise BrokenPromise(f"the job is stuck: {self.master.ledger}, {self.master.ledger.leases}")
        self._bury()
        self._tell(
            f"{self.hub.now:.0f} s simulated, {self.hub.events} events: {self.model.done} of "
            f"{self.model.plan.size * self.options.job.epochs} records done, {len(self.trainers)} trainers, "
            f"{self._left} faults to come"
        )

    def _bury(self) -> None:
        over = self.master.ledger.finished
        for trainer in [trainer for trainer in self.trainers if trainer.ended]:
            self._end(trainer)
            if not over:
                self._start()
        if over:
            self._left = 0

    def _start(self, token: str | bool | None = False) -> None:
        self._lives += 1
        self.trainers.append(
            Trainer(
                self._lives,
                self.options.job,
                hub=self.hub,
                network=self.network,
                master=self.master,
                model=self.model,
                token=token,
                audit_dir=self.options.audit_dir,
                on_end=self._ended.add,
            )
        )

    def _end(self, trainer: Trainer) -> None:
        self.excuses += trainer.breaks + 1
        trainer.shell.kill()
        self.trainers.remove(trainer)
        self._ended.discard(trainer)
        self.master.stream_broke(trainer.session)

    # Faults ---------------------------------------------------------------------------------------------

    def _fault(self) -> None:
        if not self._left or self.master.ledger.finished:
            self._left = 0
            return
        self._left -= 1
        if self._restores and self._left * (self.options.restores + 1) < self._restores * self.options.faults:
            self._restores -= 1
            kind = "restore"
        else:
            never = () if self.options.job.components else ("weights",)
            never += () if self.hub.now > self._spared_until else ("master",)
            kinds = [kind for kind in ALL_FAULTS if kind not in never]
            kind = self.chance.choices(kinds, [ALL_FAULTS[kind] for kind in kinds])[0]
        self.counts[kind] += 1
        self.model.note(self.hub.now, kind)
        if not self.trainers:
            self._start()
        getattr(self, f"_{kind}")(self.chance.choice(self.trainers))
        self.hub.after(self.chance.expovariate(1 / self._pace_s), self._fault)

    @property
    def _pace_s(self) -> float:
        """So that all come while there is work."""
        job = self.options.job
        steps = job.size * job.epochs / job.batch / self.options.trainers
        return 0.7 * steps * job.step_s / max(1, self.options.faults)

    def _duration(self) -> float:
        """Of a stop or a cut: shorter than the timeout, or longer."""
        parts = self.chance.uniform(0.1, 0.6), self.chance.uniform(1.1, 2.0)
        return self.chance.choice(parts) * self._timeout_s

    @property
    def _timeout_s(self) -> float:
        return self.options.lease_timeout_s

    def _after(self, seconds: float, trainer: Trainer, action: Callable[[], None]) -> None:
        self.hub.after(seconds, lambda: None if trainer.process.dead else action())

    def _kill(self, trainer: Trainer) -> None:
        self._end(trainer)
        self.hub.after(self.chance.choice((0.0, self.chance.uniform(0, self._timeout_s))), self._start)

    def _stop(self, trainer: Trainer) -> None:
        self.excuses += 1
        trainer.process.stop()
        self._after(self._duration(), trainer, trainer.process.go_on)

    def _cut(self, trainer: Trainer) -> None:
        """A black hole. The master may hear of it, or not before the timeout; so may the trainer."""
        self.excuses += 1
        trainer.port.cut = True
        if self.chance.random() < 0.5:
            self.master.stream_broke(trainer.session)

        def mend() -> None:
            trainer.port.cut = False
            self.master.stream_broke(trainer.session)

        self._after(self._duration(), trainer, mend)

    def _stream(self, trainer: Trainer) -> None:
        self.excuses += 1
        self.master.stream_broke(trainer.session)

    def _hang(self, trainer: Trainer) -> None:
        self.excuses += 1
        trainer.hang_s = self.options.progress_timeout_s * self.chance.uniform(0.5, 2.0)

    def _master(self, _: Trainer) -> None:
        """It comes back, and is left in peace for a while: with thousands of trainers faults come fast."""
        away_s = self.chance.uniform(0.0, 1.5 * self._timeout_s)
        self._spared_until = self.hub.now + away_s + 2 * self._timeout_s
        self.master.kill()
        self.hub.after(away_s, self.master.start)

    def _join(self, _: Trainer) -> None:
        self._start()

    def _leave(self, trainer: Trainer) -> None:
        trainer.leave = True

    def _weights(self, _: Trainer) -> None:
        """Somebody gives the mixture other weights."""
        assert isinstance(self.model, MixtureModel)
        Reweigher(self.hub, self.master, self.model, self.chance).begin()

    def _forge(self, trainer: Trainer) -> None:
        """A late or misled outcome: another's lease, or another attempt. It must be refused."""
        leases = self.model.leases
        if not leases or not self.master.up:
            return
        task = self.chance.choice(tuple(leases)) if len(leases) < 1000 else next(reversed(leases))
        held = leases[task]
        member = self.master.dispatcher.members.get(trainer.session)
        if member is None:
            return
        attempt = held.attempt + (held.session == trainer.session)
        done = Acknowledgement(task=task, attempt=attempt, upto=held.stop)
        self.master.forge(
            ReportCall(
                session=trainer.session,
                dataset=DATASET,
                fence=Fence(
                    ledger=self.master.dispatcher.ledger_id,
                    lineage=self.model.lineage,
                    member=member.number,
                ),
                request=0,
                acknowledgements=(done,),
            )
        )

    def _restore(self, _: Trainer) -> None:
        """A new trainer takes the job back to a token, or to its beginning; the others hear of it and end."""
        self.model.last_outcome_at = self.hub.now
        texts = [text for text, _ in self.master.tokens]
        self._start(self.chance.choice([*texts[-5:], None]))
