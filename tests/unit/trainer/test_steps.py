"""How many of the newest batches must not be acknowledged yet."""

from __future__ import annotations

import pytest

from edl_torch.trainer.steps import Steps


def test_without_optimizer_and_lookahead_nothing_is_kept() -> None:
    steps = Steps()
    steps.handed()
    assert (steps.attached, steps.keep, steps.ahead, steps.in_hand) == (False, 0, 0, 0)


def test_an_optimizer_keeps_what_it_has_not_stepped_on() -> None:
    steps = Steps()
    number = steps.attach()
    steps.handed()
    steps.handed()
    assert (steps.keep, steps.in_hand) == (2, 1)
    steps.stepped(number)
    assert (steps.keep, steps.in_hand) == (0, 0)


@pytest.mark.parametrize("lookahead", [1, 2, 3])
def test_lookahead_keeps_the_newest_out_of_steps_too(lookahead: int) -> None:
    steps = Steps(lookahead)
    number = steps.attach()
    for _ in range(5):
        steps.handed()
    steps.stepped(number)
    assert (steps.keep, steps.ahead, steps.in_hand) == (lookahead, lookahead, lookahead)


def test_after_the_last_batch_each_step_passes_one_more_on() -> None:
    steps = Steps(2)
    number = steps.attach()
    for _ in range(4):
        steps.handed()
    kept = []
    for _ in range(3):
        steps.exhausted_step()
        steps.stepped(number)
        kept.append(steps.keep)
    assert kept == [1, 0, 0]


def test_the_slowest_of_several_optimizers_decides() -> None:
    steps = Steps()
    quick, slow = steps.attach(), steps.attach()
    for _ in range(3):
        steps.handed()
        steps.stepped(quick)
    assert steps.keep == 3
    steps.stepped(slow)
    assert steps.keep == 0


def test_a_report_counts_as_a_step_of_all() -> None:
    steps = Steps()
    steps.attach()
    steps.attach()
    steps.handed()
    steps.reported()
    assert steps.keep == 0


def test_withdrawn_and_failed_batches_need_no_step() -> None:
    steps = Steps(1)
    steps.attach()
    for _ in range(3):
        steps.handed()
    steps.failed()
    assert (steps.keep, steps.ahead) == (2, 1)
    steps.withdrawn(2)
    assert (steps.keep, steps.ahead) == (0, 0)


def test_another_lineage_forgets_every_batch() -> None:
    steps = Steps(1)
    steps.attach()
    steps.handed()
    steps.handed()
    steps.clear()
    assert (steps.keep, steps.ahead, steps.in_hand) == (0, 0, 0)


def test_one_that_is_attached_takes_over_what_waits_for_a_step() -> None:
    steps = Steps()
    old = steps.attach()
    steps.handed()
    new = steps.attach()
    steps.detach(old)
    assert (steps.keep, steps.in_hand) == (1, 1)
    steps.stepped(new)
    assert (steps.keep, steps.in_hand) == (0, 0)


def test_what_the_last_one_left_waits_for_a_later_one() -> None:
    steps = Steps()
    old = steps.attach()
    steps.handed()
    steps.detach(old)
    steps.handed()
    assert (steps.attached, steps.keep) == (True, 2)
    steps.stepped(steps.attach())
    assert steps.keep == 0


def test_a_report_settles_what_the_last_one_left() -> None:
    steps = Steps()
    old = steps.attach()
    steps.handed()
    steps.detach(old)
    steps.reported()
    assert (steps.attached, steps.keep) == (False, 0)


def test_with_none_left_and_nothing_waiting_no_step_decides() -> None:
    steps = Steps()
    only = steps.attach()
    steps.handed()
    steps.stepped(only)
    steps.detach(only)
    assert not steps.attached


def test_the_last_one_decides_on_when_it_is_gone() -> None:
    steps = Steps()
    first = steps.attach()
    steps.handed()
    steps.gone(first)
    assert (steps.attached, steps.keep) == (True, 1)


def test_idle_ones_are_those_that_did_not_step_where_others_did() -> None:
    steps = Steps()
    quick = steps.attach("quick")
    steps.attach("idle")
    steps.passed_on()
    steps.handed()
    steps.stepped(quick)
    assert steps.take_idle() == ["idle"]
    steps.passed_on()
    assert steps.take_idle() == []
