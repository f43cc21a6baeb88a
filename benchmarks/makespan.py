"""How well an epoch ends: trainers of different paces, over what their paces together would need.

`python benchmarks/makespan.py --json runs/makespan.json`. A master process, and trainer processes whose step
is a sleep, so that a few processors are enough for all.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from harness import parser, write_json
from serving import environment_of_children, master

PEERS = Path(__file__).with_name("makespan_peers.py")
GOAL = 1.05
LONGEST_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """Trainers with so many seconds for a step, and each so many loader workers."""

    title: str
    steps_s: tuple[float, ...]
    workers: int
    batches: int
    epochs: int = 2
    goal: float | None = GOAL

    @property
    def steps_alone_s(self) -> float:
        """All trainers at work until the end, with no time but that of the steps."""
        return self.batches / sum(1 / step_s for step_s in self.steps_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """Seconds from the end of the one before until the last trainer's last step.

    `ideal_s` is all trainers at work until the end, each at the pace that it had from its first step to its
    last: what loader, reports and a busy machine cost is in that pace.
    """

    makespan_s: float
    ideal_s: float

    @property
    def over_ideal(self) -> float:
        """What the end has cost."""
        return self.makespan_s / self.ideal_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One kind of epoch in every round. In the `first` of a job nobody knows yet who is slow."""

    race: Race
    first: bool
    epochs: tuple[Epoch, ...]
    load: float

    @property
    def over_ideal(self) -> tuple[float, ...]:
        """Of each epoch."""
        return tuple(epoch.over_ideal for epoch in self.epochs)

    @property
    def over_steps(self) -> float:
        """The same over the time of the steps alone: the median."""
        return statistics.median(epoch.makespan_s / self.race.steps_alone_s for epoch in self.epochs)

    @property
    def median(self) -> float:
        """Of all rounds."""
        return statistics.median(self.over_ideal)

    @property
    def met(self) -> bool | None:
        """Whether the median reaches the target; None without one."""
        return None if self.race.goal is None else self.median <= self.race.goal

    def __str__(self) -> str:
        what = f"{self.race.title}, {self.race.workers} workers, {'first' if self.first else 'later'} epoch"
        low, high = min(self.over_ideal), max(self.over_ideal)
        line = f"{what:<64}{low:>8.3f}{self.median:>8.3f}{high:>8.3f}{self.over_steps:>12.3f}"
        if self.met is None:
            return line
        return f"{line}  ≤ {self.race.goal:g}  {'met' if self.met else 'MISSED'}"

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        derived = {"over_ideal": self.over_ideal, "median": self.median, "over_steps": self.over_steps}
        return {**asdict(self), **derived, "met": self.met}


def races(step_s: float, batches: int, *, quick: bool) -> Iterator[Race]:
    """One slow trainer of four, which is the target; and, unless it is quick, twelve that all differ."""
    fast = 1 if quick else 3
    for workers in (0, 2):
        paces = (*[step_s] * fast, 4 * step_s)
        title = f"one of {len(paces)} trainers is 4 x slower"
        yield Race(title=title, steps_s=paces, workers=workers, batches=batches)
    if quick:
        return
    spread = tuple(step_s * (1 + 9 * place / 11) for place in range(12))
    yield Race(
        title="12 trainers, up to 10 x slower", steps_s=spread, workers=0, batches=2 * batches, goal=None
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    options = parser("How long epochs take with trainers of different paces.").parse_args(arguments)
    step_s, batches, rounds = (0.005, 40, 1) if options.quick else (0.1, 400, 3)
    print(f"{'makespan over the ideal':<64}{'min':>8}{'median':>8}{'max':>8}{'over steps':>12}  target")
    found = []
    for race in races(step_s, batches, quick=options.quick):
        load = os.getloadavg()[0]
        rows = list(zip(*(run(race) for _ in range(rounds)), strict=True))
        later = tuple(epoch for row in rows[1:] for epoch in row)
        for first, epochs in ((True, rows[0]), (False, later)):
            finding = Finding(race=race, first=first, epochs=epochs, load=load)
            print(finding, flush=True)
            found.append(finding.as_json())
    if options.json is not None:
        write_json(options.json, {"quick": options.quick, "findings": found})


def run(race: Race) -> list[Epoch]:
    """One job."""
    dataset = uuid.uuid4().hex
    with ExitStack() as stack:
        server = stack.enter_context(master())
        trainers = [
            stack.enter_context(_trainer(server.address, dataset, race, step_s)) for step_s in race.steps_s
        ]
        for trainer in trainers:
            assert trainer.stdout is not None
            assert trainer.stdout.readline() == "ready\n"
        began = time.monotonic()
        for trainer in trainers:
            assert trainer.stdin is not None
            trainer.stdin.write("go\n")
            trainer.stdin.flush()
        told = [json.loads(trainer.communicate(timeout=LONGEST_S)[0]) for trainer in trainers]
    epochs = []
    for epoch in zip(*told, strict=True):
        steps = sum(one["steps"] for one in epoch)
        assert steps == race.batches, f"{steps} of {race.batches} batches: a trainer died"
        ended = max(one["ended_at"] for one in epoch)
        epochs.append(Epoch(makespan_s=ended - began, ideal_s=race.batches / sum(map(_pace, epoch))))
        began = ended
    return epochs


def _pace(told: dict[str, float]) -> float:
    """Steps a second, from the end of the first step to that of the last."""
    return (told["steps"] - 1) / (told["ended_at"] - told["first_at"]) if told["steps"] > 1 else 0.0


@contextmanager
def _trainer(address: str, dataset: str, race: Race, step_s: float) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [
            *(sys.executable, str(PEERS), address, dataset),
            *map(str, (race.batches, race.epochs, step_s, race.workers)),
        ],
        env=environment_of_children(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


if __name__ == "__main__":
    main()
