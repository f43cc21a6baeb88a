from __future__ import annotations

import random
from itertools import islice

import pytest

from edl_torch.system.backoff import backoff


@pytest.mark.parametrize(("first_s", "longest_s"), [(0.05, 1.0), (0.1, 5.0), (0.2, 15.0), (3.0, 0.5)])
def test_pauses_double_up_to_the_longest_and_are_never_alike(first_s: float, longest_s: float) -> None:
    drawn = list(islice(backoff(first_s, longest_s), 50))
    for number, pause_s in enumerate(drawn):
        most_s = min(longest_s, first_s * 2**number)
        assert 0.5 * most_s <= pause_s <= most_s
    assert len(set(drawn)) == 50


def test_the_users_random_numbers_stay_as_they_were() -> None:
    random.seed(7)
    expected = random.random()
    random.seed(7)
    list(islice(backoff(), 9))
    assert random.random() == expected
