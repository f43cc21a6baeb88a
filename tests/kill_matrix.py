"""Jobs that each framework brings to their end, though each is killed ten times.

It says when an attempt dies, so that the job cannot end before its tenth death. It knows no framework.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from framework_jobs import Death, Job

KILLS = 10
RECORDS = 607  # no multiple of a batch, a window or the ranks
EVERY = {1: 3, 4: 1}  # steps or batches between checkpoints, by accumulation
BATCH_S = 0.01  # how long a batch takes at least, until the last kill
LATER = 3  # batches after a place, at most, when a death is not there itself


def each_job(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test with `ranks` (at most), `workers` of a loader and `accumulate` of each job."""
    jobs = list(itertools.product((1, 2), (0, 2), (1, 4)))
    marks = [
        pytest.mark.parametrize(("ranks", "workers", "accumulate"), jobs),
        pytest.mark.timeout(1800),
        pytest.mark.long,
    ]
    for mark in marks:
        test = mark(test)
    return test


@dataclass(frozen=True, kw_only=True)
class Life:
    """One attempt at a job: one of its `ranks` dies after `batches` of its own, or where an epoch ends."""

    ranks: int
    batches: int
    ends_epoch: bool


def lives(
    ranks: int, left: Callable[[], int], chance: random.Random, *, same: bool = False
) -> Iterator[Life]:
    """Plan ten lives of a job of two epochs, each when the one before has ended.

    `left` returns how many batches the job has left, of all ranks together. Each life may have its part of
    them and a quarter more. The fifth ends with an epoch, and the tenth; of several ranks three have but one,
    unless their number stays the `same`.
    """
    several = [ranks] * 7 + [ranks if same else 1] * 3
    chance.shuffle(several)
    for number, now in enumerate(several):
        most = left() * 5 // 4 // (KILLS - number + 1) // now - LATER
        ends_epoch = number in (KILLS // 2 - 1, KILLS - 1)
        yield Life(ranks=now, batches=chance.randint(1, max(1, most)), ends_epoch=ends_epoch)


def death_in(life: Life, places: Mapping[str, int], ends: Sequence[str], chance: random.Random) -> Death:
    """Choose where a rank dies: at once, or a little later, wherever that is."""
    rank, later_s = chance.randrange(life.ranks), chance.choice((0.0, chance.uniform(0, LATER * BATCH_S)))
    if life.ends_epoch:
        return Death(chance.choice(ends), 1, rank=rank)
    place = chance.choice(("start", *places))
    if place == "start":
        return Death(place, 1, later_s=chance.uniform(0, life.batches * BATCH_S), rank=rank)
    return Death(place, max(1, life.batches // places[place]), later_s=later_s, rank=rank)


def kill_ten_times(
    job: Job,
    settings: Any,
    ranks: int,
    *,
    batches: int,
    places: Mapping[str, int],
    ends: Sequence[str],
    same: bool = False,
) -> dict[str, Any]:
    """Kill a job of two epochs ten times, then let it come to its end. Returns what it found there.

    It has as many `batches`, of all ranks together, as `RECORDS` make. `places` are where it can die, with
    the number of batches from one time there to the next; it comes to `ends` once an epoch. With `same` it
    has always so many ranks.
    """
    chance = random.Random(f"{settings}")

    def left() -> int:
        return batches - batches * job.acknowledged() // (2 * RECORDS)

    for life in lives(ranks, left, chance, same=same):
        death = death_in(life, places, ends, chance)
        print(f"after {job.acknowledged()} records {life.ranks} ranks, {death}")
        job.run_to_death(life.ranks, replace(settings, death=death, step_s=BATCH_S))
    assert job.kills == KILLS
    return job.run(ranks if same else chance.randint(1, ranks))
