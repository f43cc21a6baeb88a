"""Loops of synchronous ranks that once broke a promise, each by its smallest program."""

from __future__ import annotations

import pytest
from loop_program import Data
from rank_job import run
from rank_program import Poison, Ranks

UNEQUAL = Data(records=6, records_per_shard=2)


@pytest.mark.parametrize("poison", [Poison.NAN, Poison.INF])
def test_the_loss_of_a_batch_that_stands_in_poisons_nobody(poison: Poison) -> None:
    run(Ranks(data=UNEQUAL, poison=poison))


@pytest.mark.parametrize("every", [(1, 1), (1, 2), (2, 3)])
def test_each_optimizer_scales_by_the_records_of_all_ranks_in_its_window(every: tuple[int, ...]) -> None:
    run(Ranks(data=UNEQUAL, every=every))


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("every", [(1,), (2,), (2, 3)])
def test_a_loop_that_does_not_weigh_learns_from_padding_and_proves_nothing(
    every: tuple[int, ...], lookahead: int
) -> None:
    """What a rank learns from a padding batch it learns twice, which `run` compares with the verdict."""
    run(Ranks(data=UNEQUAL, every=every, weighed=False, flush=not lookahead, lookahead=lookahead))


@pytest.mark.parametrize("attached", [False, True])
def test_a_rank_that_has_padding_alone_learns_from_it(attached: bool) -> None:
    """Where no optimizer was attached, none attaches itself: it has no batch of its own to step on."""
    data = Data(records=1, batch_size=1)
    assert run(Ranks(data=data, attached=attached, weighed=False)) is None
    assert run(Ranks(data=data, attached=attached)) == ("" if attached else None)


@pytest.mark.parametrize("every", [1, 2])
def test_a_batch_in_hand_when_all_ranks_left_is_not_in_the_gradient(every: int) -> None:
    run(Ranks(data=UNEQUAL, every=(every,), leave=1))


def test_what_was_left_before_any_step_and_is_reduced_with_the_next_batch_is_not_proven() -> None:
    """No optimizer is attached then, and each step is on a new tensor, the mean over all ranks."""
    run(Ranks(size=1, attached=False, trained=True, leave=0, flush=False))


@pytest.mark.parametrize("every", [1, 2])
def test_a_batch_that_failed_on_one_rank_is_not_in_the_gradient(every: int) -> None:
    run(Ranks(data=UNEQUAL, every=(every,), failed=((0, 1),)))


@pytest.mark.parametrize(("lookahead", "flush"), [(0, False), (0, True), (1, False)])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("leave", range(3))
def test_ranks_that_leave_a_window_keep_what_they_gathered(
    leave: int, trained: bool, flush: bool, lookahead: int
) -> None:
    """One of them has a padding batch in hand in some of these steps, with a batch gathered before it."""
    data = Data(records=5, batch_size=1, epochs=2, records_per_shard=2)
    run(Ranks(data=data, every=(3,), leave=leave, trained=trained, flush=flush, lookahead=lookahead))


@pytest.mark.parametrize("save", range(3))
@pytest.mark.parametrize("heirs", [1, 3])
def test_a_token_of_ranks_is_the_instant_of_their_model(save: int, heirs: int) -> None:
    run(Ranks(data=UNEQUAL, every=(2,), save=save, heirs=heirs))


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("leave", [0, 1, 2, 3])
def test_whatever_batch_all_ranks_left_at_comes_again(leave: int, attached: bool) -> None:
    """The last one of an epoch too: the ranks have agreed by then that there is none after it."""
    run(Ranks(data=Data(epochs=2), attached=attached, weighed=False, leave=leave))


@pytest.mark.parametrize(("size", "records"), [(1, 8), (2, 24), (3, 36)])
@pytest.mark.parametrize("every", [2, 3])
def test_ranks_that_reduce_by_hand_after_they_left_their_loop_are_proven(
    every: int, size: int, records: int
) -> None:
    """The sum of all ranks' gradients takes a gradient's place, and is not of the batch that a rank had."""
    program = Ranks(size=size, data=Data(records=records, batch_size=4), every=(every,), leave=1)
    assert run(program) == ""
