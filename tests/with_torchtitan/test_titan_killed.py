"""Torchtitan jobs killed with -9 and resumed by another number of ranks learn every record once an epoch."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from kill_matrix import EVERY, RECORDS, each_job, lives
from titan_kit import Jobs, jobs

EPOCHS, BATCH = 2, 2


def end_and_check(titan: Jobs, records: int, **job: Any) -> None:
    """Train to the end of the data: each record is learnt once an epoch, and the audit proves it."""
    titan.start(**job)
    assert titan.end() == 0, (titan.folder / "trainer.log").read_text()[-4000:]
    status, verdict = titan.audit()
    assert titan.counts(records) == [EPOCHS] * records
    assert (status, verdict["verdict"]) == (0, "PROVEN"), verdict


@pytest.mark.parametrize(
    ("accumulate", "num_workers", "worlds", "records", "most_steps"),
    [(1, 0, (1, 2, 2, 1, 2, 1), 107, 12), (4, 2, (2, 1, 2, 2, 1, 2), 211, 5)],
    ids=["each batch a step", "four batches a step, with loader workers"],
)
@pytest.mark.timeout(600)
def test_five_times_killed_and_resumed_by_other_numbers_of_ranks(
    accumulate: int,
    num_workers: int,
    worlds: tuple[int, ...],
    records: int,
    most_steps: int,
    tmp_path: Path,
) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    job = {"records": records, "epochs": EPOCHS, "accumulate": accumulate, "num_workers": num_workers}
    with jobs(tmp_path, **job, interval=2, step_s=0.05) as titan:
        for world in worlds[:-1]:
            titan.kill_after(chance.randint(1, most_steps), chance.uniform(0, 0.2), world=world)
        end_and_check(titan, records, world=worlds[-1], step_s=0.0)
    assert titan.saved_of_the_data == {"dataloader.token"}


@each_job
def test_a_job_that_is_killed_ten_times_learns_each_record_of_each_epoch_once(
    tmp_path: Path, ranks: int, workers: int, accumulate: int
) -> None:
    chance = random.Random(f"{ranks} {workers} {accumulate}")
    job = {"records": RECORDS, "epochs": EPOCHS, "accumulate": accumulate, "num_workers": workers}
    with jobs(tmp_path, **job, interval=EVERY[accumulate]) as titan:
        for life in lives(ranks, lambda: EPOCHS * RECORDS // BATCH - titan.acknowledged // BATCH, chance):
            steps, delay_s = (life.batches - 1) // accumulate, chance.uniform(0, 0.2)
            print(f"after {titan.acknowledged} records {life.ranks} ranks, {steps} steps, {delay_s} s")
            titan.kill_after(steps, delay_s, world=life.ranks, step_s=0.05)
        end_and_check(titan, RECORDS, world=chance.randint(1, ranks))


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_plain_model_on_one_rank_is_proven(accumulate: int, tmp_path: Path) -> None:
    with jobs(tmp_path, records=43, epochs=EPOCHS, accumulate=accumulate, world=1) as titan:
        end_and_check(titan, 43)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_ranks_learn_nothing_from_what_stands_in_for_records(accumulate: int, tmp_path: Path) -> None:
    """One shard in each epoch: while one rank reads it the other has nothing."""
    with jobs(tmp_path, records=5, accumulate=accumulate, world=2) as titan:
        end_and_check(titan, 5)


WHOLE: dict[str, int] = {"world": 2}
TENSOR, CONTEXT, PIPELINE = ({"world": 2, part: 2} for part in ("tp", "cp", "pp"))
SEVERAL = {"world": 4, "tp": 2}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("accumulate", "num_workers", "shapes"),
    [
        (1, 0, [TENSOR, CONTEXT, PIPELINE]),
        pytest.param(4, 2, [SEVERAL, PIPELINE, WHOLE, CONTEXT, TENSOR], marks=pytest.mark.long),
    ],
    ids=["each batch a step", "four batches a step, with loader workers"],
)
def test_ranks_that_hold_one_model_in_parts_learn_every_record_once(
    accumulate: int, num_workers: int, shapes: list[dict[str, int]], tmp_path: Path
) -> None:
    """Each incarnation is killed, and the next one holds the model in other parts."""
    seed, records = random.SystemRandom().randrange(1 << 30), 31 * accumulate
    print(f"seed {seed}")
    chance = random.Random(seed)
    job = {"records": records, "epochs": EPOCHS, "accumulate": accumulate, "num_workers": num_workers}
    with jobs(tmp_path, **job, interval=2, step_s=0.05) as titan:
        for shape in shapes[:-1]:
            titan.kill_after(chance.randint(1, 6), chance.uniform(0, 0.2), **shape)
        end_and_check(titan, records, **shapes[-1], step_s=0.0)
