"""Interval arithmetic against Python's sets."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edl_torch.audit.intervals import Intervals, covered

runs = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda r: (r[0], r[0] + r[1])), max_size=12
)


def arrays(pairs):
    table = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def numbers(found: Intervals) -> set[int]:
    return {number for start, end in found for number in range(start, end)}


def check_form(found: Intervals) -> None:
    assert (found.starts < found.ends).all()
    assert (found.ends[:-1] < found.starts[1:]).all()


@given(runs, st.integers(1, 4))
def test_covered_counts_how_often_a_number_is_there(pairs, times):
    often = [number for start, end in pairs for number in range(start, end)]
    found = covered(*arrays(pairs), times)
    check_form(found)
    assert numbers(found) == {number for number in often if often.count(number) >= times}
    assert found.count == len(numbers(found))


@given(runs, runs)
def test_sets_of_intervals_are_sets(first, second):
    a, b = covered(*arrays(first)), covered(*arrays(second))
    for found, wanted in (
        (a | b, numbers(a) | numbers(b)),
        (a & b, numbers(a) & numbers(b)),
        (a - b, numbers(a) - numbers(b)),
    ):
        check_form(found)
        assert numbers(found) == wanted
    assert (a == b) == (numbers(a) == numbers(b))


def test_single_runs_and_points():
    assert list(Intervals.run(3, 5)) == [(3, 5)]
    assert not Intervals.run(5, 5)
    assert list(Intervals.of([(4, 5), (2, 4), (9, 10), (2, 3)])) == [(2, 5), (9, 10)]
    assert repr(Intervals.of([(4, 5), (9, 10)])) == "<Intervals n=2 integers=2>"
    assert Intervals() != 0


def test_a_set_of_intervals_is_no_key():
    with pytest.raises(TypeError, match="unhashable"):
        hash(Intervals())


def test_numbers_near_the_largest_are_exact():
    top = 2**63 - 1
    found = Intervals.run(top - 10, top) - Intervals.run(top - 5, top - 4)
    assert list(found) == [(top - 10, top - 5), (top - 4, top)]


@given(runs, st.integers(-2, 40), st.integers(-2, 40))
def test_what_lies_between_two_numbers(pairs, low, high):
    records = covered(*arrays(pairs))
    found = records.between(low, high)
    check_form(found)
    assert numbers(found) == {number for number in numbers(records) if low <= number < high}
