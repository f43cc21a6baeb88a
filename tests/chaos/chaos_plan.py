"""What happens to a job in one chaos run: a function of the seed alone.

It knows no process and no clock; `chaos_job` carries it out. Times are when a fault is due: a busy machine is
late, so that the same seed gives the same faults in the same order, not the same interleaving.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from enum import Enum

BATCH = 4
EPOCHS = 2
LEASE_TIMEOUT_S = 2.0
GRACE_S = 0.3
PROGRESS_TIMEOUT_S = 2.0
QUIET_S = 0.4  # a trainer is left in peace for so long after a fault is over


class Kind(Enum):
    """A fault. `Fault.for_s` is how long it lasts."""

    KILL = "kill"  # kill -9 of a trainer; the next one takes `for_s` to come up
    MASTER = "master"  # kill -9 of the master; its next life is started after `for_s`
    STOP = "stop"  # SIGSTOP, and SIGCONT after `for_s`
    HANG = "hang"  # the training loop stands still while heartbeats flow, then goes on with its batch
    CUT = "cut"  # the trainer's connections are reset
    HOLD = "hold"  # a black hole: nothing passes
    REFUSE = "refuse"  # reset, and so is every new connection
    RAGGED = "ragged"  # delays, and connections that break at random
    DELAY = "delay"  # delays alone


NETWORK = (Kind.CUT, Kind.HOLD, Kind.REFUSE, Kind.RAGGED, Kind.DELAY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Intensity:
    """Faults of a run, one each `pace_s` on average. `others` are stops and what befalls the network."""

    trainer_kills: int
    master_kills: int
    others: int
    pace_s: float


LONG = Intensity(trainer_kills=20, master_kills=5, others=15, pace_s=0.4)
SHORT = Intensity(trainer_kills=3, master_kills=1, others=3, pace_s=0.3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`slot` is the number of a trainer's place, which one process after the other fills."""

    at_s: float
    kind: Kind
    slot: int
    for_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A job and its faults. The tuples with an item for each slot say what its trainers are like.

    With a `window` records are mixed inside windows of so many shards; the reader reads `in_order` only, or
    picks records. `threads` read in a trainer, or in each of its loader workers, where it is not 0.
    """

    seed: int
    size: int
    records_per_shard: int
    shuffle: bool
    steps_s: tuple[float, ...]
    workers: tuple[int, ...]
    naps_s: tuple[float, ...]
    faults: tuple[Fault, ...]
    window: int
    in_order: bool
    threads: tuple[int, ...]

    @property
    def records(self) -> int:
        """Of all epochs."""
        return EPOCHS * self.size

    @property
    def counts(self) -> Counter[Kind]:
        """Faults of each kind."""
        return Counter(fault.kind for fault in self.faults)

    def __str__(self) -> str:
        faults = ", ".join(f"{kind.value} {number}" for kind, number in sorted_counts(self.counts))
        window = f", window {self.window}" if self.window else ""
        return (
            f"seed {self.seed}: {len(self.steps_s)} trainers, threads {self.threads}, "
            f"{EPOCHS} × {self.size} records{window}; {faults}"
        )


def sorted_counts(counts: Counter[Kind]) -> list[tuple[Kind, int]]:
    """In the order in which the kinds are declared."""
    return [(kind, counts[kind]) for kind in Kind if counts[kind]]


def make_plan(seed: int, intensity: Intensity) -> Plan:
    """The plan of a seed."""
    chance = random.Random(seed)
    slots = chance.randint(2, 4)
    steps = tuple(chance.uniform(0.01, 0.04) for _ in range(slots))
    kinds = [Kind.KILL] * intensity.trainer_kills + [Kind.MASTER] * intensity.master_kills
    # Some runs have nothing that excuses a record trained twice but a trainer's death.
    weights = chance.choice(((3, 2, 2, 2, 2, 2, 1), (3, 2, 2, 2, 2, 2, 1), (0, 0, 0, 0, 0, 0, 1)))
    kinds += chance.choices([Kind.STOP, Kind.HANG, *NETWORK], weights, k=intensity.others)
    chance.shuffle(kinds)
    faults = _schedule(chance, kinds, slots, intensity.pace_s)
    lasts_s = max(fault.at_s + fault.for_s for fault in faults)
    per_second = sum(BATCH / step for step in steps)
    plan = Plan(
        seed=seed,
        size=int(per_second * lasts_s / EPOCHS) + chance.randint(1, 99),  # never over before the faults are
        records_per_shard=chance.choice((BATCH, 30, 64)),
        shuffle=chance.random() < 0.5,
        steps_s=steps,
        workers=tuple(chance.choice((0, 0, 1)) for _ in range(slots)),
        naps_s=tuple(chance.choice((0.0, 0.0, 1.0)) for _ in range(slots)),
        faults=faults,
        window=0,
        in_order=False,
        threads=(0,) * slots,
    )
    window = 0 if plan.shuffle else chance.choice((0, 1, 4, 4, 16))
    in_order = chance.random() < 0.5
    threads = tuple(chance.choice((0, 0, 2)) for _ in range(slots))
    return replace(plan, window=window, in_order=in_order, threads=threads)


def _schedule(chance: random.Random, kinds: list[Kind], slots: int, pace_s: float) -> tuple[Fault, ...]:
    faults: list[Fault] = []
    free_at = [1.0] * slots
    master_free_at = 1.0
    at_s = 1.0
    for kind in kinds:
        at_s += chance.uniform(0.3, 1.7) * pace_s
        for_s = _duration(chance, kind)
        if kind is Kind.MASTER:
            at_s, slot = max(at_s, master_free_at), -1
            master_free_at = at_s + for_s + chance.uniform(0.3, 3.0)  # now and then it dies as it starts
        else:
            slot = _idle(chance, free_at, at_s)
            at_s = max(at_s, free_at[slot])
            free_at[slot] = at_s + for_s + QUIET_S
        faults.append(Fault(at_s=at_s, kind=kind, slot=slot, for_s=for_s))
    return tuple(faults)


def _idle(chance: random.Random, free_at: list[float], at_s: float) -> int:
    """A slot with no fault at this time, else the one that is free first."""
    idle = [slot for slot, free in enumerate(free_at) if free <= at_s]
    return chance.choice(idle) if idle else free_at.index(min(free_at))


def _duration(chance: random.Random, kind: Kind) -> float:
    shorter, longer = (0.2, LEASE_TIMEOUT_S * 0.6), (LEASE_TIMEOUT_S * 1.1, LEASE_TIMEOUT_S * 1.5)
    match kind:
        case Kind.KILL:
            return chance.choice((0.0, 0.0, 0.0, chance.uniform(0.5, 2.0)))  # the last is a slow start
        case Kind.MASTER:
            return chance.choice((0.0, chance.uniform(0.0, 1.0)))
        case Kind.HANG:
            return chance.uniform(1.6, 2.0) * PROGRESS_TIMEOUT_S  # a heartbeat late tells of the last move
        case Kind.CUT:
            return 0.0
        case Kind.DELAY | Kind.RAGGED:
            return chance.uniform(0.5, 1.5)
        case _:
            return chance.uniform(*chance.choice((shorter, longer)))
