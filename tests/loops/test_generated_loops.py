"""Generated training loops keep every promise, by their own count and by the gradient of one process."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from loop_program import Program
from loop_runs import run
from loop_settings import drawing
from loop_strategies import elastic_programs, left_programs, plain_programs


@drawing(120)
@given(program=elastic_programs())
def test_loops_over_an_elastic_loader(program: Program) -> None:
    run(program)


@drawing(120)
@given(program=left_programs())
def test_loops_that_are_left_with_what_they_have_gathered(program: Program) -> None:
    run(program)


@drawing(200)
@given(program=plain_programs())
def test_loops_over_a_plain_loader(program: Program) -> None:
    run(program)


@drawing(15)
@given(program=elastic_programs(st.sampled_from([1, 2])))
def test_loops_over_an_elastic_loader_with_workers(program: Program) -> None:
    run(program)


@drawing(20)
@given(program=plain_programs(st.sampled_from([1, 2])))
def test_loops_over_a_plain_loader_with_workers(program: Program) -> None:
    run(program)
