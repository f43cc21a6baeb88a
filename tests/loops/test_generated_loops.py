"""Generated training loops keep every promise, by their own count and by the gradient of one process."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from loop_program import Program
from loop_promises import BrokenPromise, is_bare_proof
from loop_runs import run
from loop_settings import DEMOTED, drawing
from loop_strategies import elastic_programs, left_programs, plain_programs

from edl_torch.cli.verdict_words import inexact, undecided


@drawing(120)
@given(program=elastic_programs())
def test_loops_over_an_elastic_loader(program: Program) -> None:
    run(program)


def test_exact_loops_with_attached_optimizers_are_proven() -> None:
    """Demoting everything is no mend: of the loops that the model itself calls exact, 99 % are proven."""
    exact: list[str] = []  # '' for each that is proven; else the loop, and why not

    @drawing(300)
    @given(program=elastic_programs(attached=st.just(True)))
    def judge(program: Program) -> None:
        try:
            first = run(program)
        except BrokenPromise as broken:  # the other tests draw for those
            if "proven" in broken.promise:
                raise
            return
        job = first.heir or first
        all_attached = len(program.attached) == len(program.optimizers)  # else nothing tells of the others
        if all_attached and program.shows_gradients and job.finished and job.judged and job.judged.exact:
            verdict = job.judged.verdict
            why = [*undecided(verdict), *inexact(verdict)]
            exact.append("" if is_bare_proof(verdict) else f"{program!r}: {why}")

    judge()
    demoted = [said for said in exact if said]
    print(f"{len(exact) - len(demoted)} of {len(exact)} exact loops are proven")
    assert len(exact) >= 60
    assert len(demoted) <= DEMOTED * len(exact), "\n".join(demoted)


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
