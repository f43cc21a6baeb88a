"""Trainers of different paces share an epoch, and nothing goes wrong: how long that takes.

Real trainers and the real dispatcher, as in `sim_cluster`, whose faults it leaves out.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from sim_hub import Hub
from sim_master import SimMaster
from sim_model import Model
from sim_network import Network, Weather
from sim_trainer import Job, Pace, Trainer

from edl_torch.core.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """`over_ideal` is the makespan over what all speeds together would need. `reads` are batches read."""

    makespan_s: float
    over_ideal: float
    events: int
    passes: int
    reads: float


def race(job: Job, paces: Sequence[Pace], seed: int = 0) -> Finish:
    """From the first trainer's start until the last record's outcome."""
    hub = Hub()
    spec = job.spec()
    model = Model(Plan(spec), job.batch)
    master = SimMaster(hub, model, lease_timeout_s=30.0, grace_s=1.0, progress_timeout_s=0.0)
    network = Network(hub, random.Random(seed), Weather())
    ended: list[Trainer] = []
    trainers: list[Trainer] = []

    def start(number: int, pace: Pace) -> None:
        trainers.append(
            Trainer(
                *(number, job),
                hub=hub,
                network=network,
                master=master,
                model=model,
                on_end=ended.append,
                pace=pace,
            )
        )

    order = random.Random(seed)
    for number, pace in enumerate(order.sample(list(paces), len(paces))):
        hub.after(order.uniform(0, 0.1), start, number, pace)
    try:
        hub.run(lambda: len(ended) == len(paces))
    finally:
        for trainer in trainers:
            trainer.shell.kill()
    model.finished(master.ledger)
    batches = job.epochs * job.size / job.batch
    ideal_s = batches / sum(1 / (pace.step_s + (0 if pace.workers else pace.read_s)) for pace in paces)
    return Finish(
        makespan_s=model.last_outcome_at,
        over_ideal=model.last_outcome_at / ideal_s,
        events=hub.events,
        passes=sum(trainer.inner_passes for trainer in trainers),
        reads=sum(trainer.batches_read for trainer in trainers) / batches,
    )
