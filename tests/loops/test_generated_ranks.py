"""Generated loops of synchronous ranks: their one model has the gradient of one process."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from loop_settings import drawing
from loop_strategies import datas
from rank_job import run
from rank_program import Poison, Ranks

LEAVING = [{}, {"flush": False}, {"flush": False, "lookahead": 1}, {"flush": False, "lookahead": 2}]


@st.composite
def rank_programs(draw: Any) -> Ranks:
    size = draw(st.integers(1, 3))
    steps = st.sampled_from([-1, -1, 0, 1, 2, 3])
    failed = st.lists(st.tuples(st.integers(0, 4), st.integers(0, size - 1)), max_size=2, unique=True)
    every = draw(st.sampled_from([(1,), (2,), (3,), (1, 1), (1, 2), (3, 2)]))
    one = len(every) == 1  # else a token is taken between the steps of two optimizers
    return Ranks(
        size=size,
        data=draw(datas()),
        every=every,
        attached=draw(st.booleans()) if every == (1,) else True,
        weighed=draw(st.sampled_from([True, True, False])),
        poison=draw(st.sampled_from(Poison)),
        leave=draw(steps),
        trained=draw(st.booleans()),
        **draw(st.sampled_from(LEAVING)),
        failed=tuple(draw(st.one_of(st.just([]), failed))),
        save=draw(steps) if one else -1,
        heirs=draw(st.integers(1, 3)),
        in_process=draw(st.booleans()),
    )


@drawing(60)
@given(program=rank_programs())
def test_loops_of_synchronous_ranks(program: Ranks) -> None:
    run(program)
