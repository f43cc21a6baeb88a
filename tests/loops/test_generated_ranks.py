"""Generated loops of synchronous ranks: their one model has the gradient of one process."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from loop_settings import DEMOTED, drawing
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
    weighed = draw(st.sampled_from([True, True, False]))
    one = len(every) == 1  # else a token is taken between the steps of two optimizers
    return Ranks(
        size=size,
        data=draw(datas()),
        every=every,
        attached=draw(st.booleans()) if every == (1,) else True,
        weighed=weighed,
        poison=draw(st.sampled_from(Poison)),
        leave=draw(steps),
        trained=draw(st.booleans()),
        **draw(st.sampled_from(LEAVING)),
        failed=tuple(draw(st.one_of(st.just([]), failed))),
        save=draw(steps) if one else -1,
        heirs=draw(st.integers(1, 3)),
        # Without weights a rank of its own learns from copies of others' batches, too.
        reduced=not weighed or draw(st.sampled_from([True, True, False])),
        forgets_model=draw(st.integers(0, 3)) == 0,
        in_process=draw(st.booleans()),
    )


def test_loops_of_synchronous_ranks() -> None:
    """What several models have is never proven, and what one has is."""
    exact: list[str] = []  # '' for each that is proven; else the loop, and why not

    @drawing(90)
    @given(program=rank_programs())
    def judge(program: Ranks) -> None:
        why = run(program)
        if why is not None:
            exact.append(why and f"{program!r}: {why}")

    judge()
    demoted = [said for said in exact if said]
    print(f"{len(exact) - len(demoted)} of {len(exact)} exact loops are proven")
    assert len(exact) >= 20
    assert len(demoted) <= DEMOTED * len(exact), "\n".join(demoted)
