"""The plan of ten deaths: a job has not come to its end before the tenth."""

from __future__ import annotations

import random

import pytest
from kill_matrix import KILLS, LATER, lives


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("keeps", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("same", [False, True])
def test_a_job_is_not_over_before_its_tenth_death(ranks: int, keeps: float, same: bool) -> None:
    """Whatever part of what a life has read its checkpoints keep."""
    batches = 404
    for seed in range(100):
        done, ends = 0, 0
        planned = lives(ranks, lambda: batches - done, random.Random(seed), same=same)  # noqa: B023
        several = []
        for number, life in enumerate(planned):
            if life.ends_epoch:
                ends += 1
                assert number == KILLS - 1 or done < batches // 2, "the first epoch is over already"
                done = ends * batches // 2
            else:
                done += int((life.batches + LATER) * life.ranks * keeps)
            assert number == KILLS - 1 or done < batches
            several.append(life.ranks)
        assert sorted(several) == [ranks if same else 1] * 3 + [ranks] * 7
