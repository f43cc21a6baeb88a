"""How long an epoch takes with trainers of different paces, over what their paces together would need.

Simulated time: nothing here depends on this machine. `benchmarks/makespan.py` asks real processes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from cases import cases
from sim_race import Finish, race
from sim_trainer import Job, Pace

GOAL = 1.05
BATCH = 8
DEFAULT = 8  # batches in a shard


def epoch(
    paces: Sequence[Pace],
    *,
    batches: int,
    seed: int,
    per_shard: int = DEFAULT,
    drop_last: bool = False,
    window: int = 1,
) -> Finish:
    """One epoch of so many batches."""
    job = Job(
        size=batches * BATCH,
        records_per_shard=per_shard * BATCH,
        batch=BATCH,
        epochs=1,
        seed=seed,
        drop_last=drop_last,
        shuffle_window=window,
    )
    finish = race(job, paces, seed)
    print(f"seed {seed}: {finish}")
    return finish


def one_slow(**options: float | int) -> list[Pace]:
    """One trainer four times slower than three others."""
    fast = Pace(step_s=1.0, **options)  # type: ignore[arg-type]
    return [fast, fast, fast, Pace(step_s=4.0, **options)]  # type: ignore[arg-type]


@cases("seed", [1], [1, 2, 3])
@pytest.mark.parametrize("per_shard", [1, DEFAULT, 32])
@pytest.mark.parametrize("workers", [0, 1, 2, 4])
def test_one_slow_trainer_does_not_hold_up_the_epoch(workers: int, per_shard: int, seed: int) -> None:
    finish = epoch(one_slow(workers=workers), batches=400, seed=seed, per_shard=per_shard)
    assert finish.over_ideal <= GOAL


@pytest.mark.parametrize("window", [16, 10**6])
@pytest.mark.parametrize("workers", [0, 2])
def test_nor_does_it_where_shards_are_mixed(workers: int, window: int) -> None:
    assert epoch(one_slow(workers=workers), batches=400, seed=1, window=window).over_ideal <= GOAL


@pytest.mark.parametrize(
    "paces",
    [
        pytest.param(one_slow(read_s=0.25), id="reading in the loop"),
        pytest.param(one_slow(workers=2, accumulates=4), id="a step for four batches"),
        pytest.param(one_slow(workers=2, jitter=0.1), id="steps that vary"),
    ],
)
@cases("seed", [1], [1, 2, 3])
@pytest.mark.parametrize("drop_last", [False, True])
def test_nor_does_it_however_it_trains(paces: list[Pace], seed: int, drop_last: bool) -> None:
    assert epoch(paces, batches=400, seed=seed, drop_last=drop_last).over_ideal <= GOAL


@pytest.mark.parametrize(
    ("trainers", "workers"),
    [
        (16, 0),
        (16, 2),
        pytest.param(64, 0, marks=pytest.mark.long),
        pytest.param(64, 2, marks=pytest.mark.long),
    ],
)
def test_trainers_of_very_different_paces_come_to_the_end_together(trainers: int, workers: int) -> None:
    chance = random.Random(trainers)
    paces = [Pace(step_s=chance.uniform(1, 10), workers=workers) for _ in range(trainers)]
    assert epoch(paces, batches=100 * trainers, seed=1).over_ideal <= GOAL


def test_trainers_of_one_pace_lose_nothing_by_it() -> None:
    assert epoch([Pace(step_s=1.0, workers=2)] * 4, batches=400, seed=1).over_ideal <= 1.02


@pytest.mark.parametrize("workers", [2, 4])
def test_the_end_costs_no_trainer_more_than_one_start_of_its_workers(workers: int) -> None:
    """Who is lent less than it would read ahead reads on in another pass, whose workers start anew."""
    finish = epoch(one_slow(workers=workers), batches=400, seed=1)
    assert finish.passes <= 2 * 4
