"""Which batches the loop has, which wait for a step, and which it is done with."""

from __future__ import annotations

import pytest

from edl_torch.errors import AccountingError
from edl_torch.trainer.batches import Batches


class Steps(Batches):
    """Batches of one record each, and how many of them are kept."""

    def handed(self) -> None:
        self.asked()
        self.hand(((1, self._newest, self._newest + 1),))

    def stepped(self, number: int, *, before_hand: bool = False) -> None:
        super().stepped(number, before_hand=before_hand)
        self.done()

    def stepped_after_the_end(self, number: int) -> None:
        if not self.ended:
            self.asked()
            self.end_pass()
        self.stepped(number)

    @property
    def keep(self) -> int:
        """How many are not done with."""
        self.done()
        return len(self)

    def withdrawn(self, newest: int) -> None:
        self.take_back([*self.unfinished, *self.ahead][len(self) - newest :])


@pytest.mark.parametrize(("backwards", "kept"), [(1, 1), (2, 0)])
def test_a_last_step_was_on_all_that_was_read_ahead_where_so_many_backward_passes_came(
    backwards: int, kept: int
) -> None:
    """Fewer have not reached each of them: it waits for a step, as of an optimizer that trains on some."""
    steps = Steps(2)
    number = steps.attach()
    for _ in range(4):
        steps.handed()
    steps.stepped_after_the_end(number)
    steps.gathered_to_the_end(number, backwards)
    steps.begin_pass()
    assert steps.keep == kept


def loop_behind(steps: Steps, number: int, batches: int, behind: int, accumulates: int = 1) -> None:
    """A loop that trains on each batch once `behind` more were handed out, and on the rest after the last."""
    for handed in range(1, batches + 1):
        steps.handed()
        if handed > behind and (handed - behind) % accumulates == 0:
            steps.stepped(number)
    for trained in range(batches - behind + 1, batches + 1):
        if trained % accumulates == 0:
            steps.stepped_after_the_end(number)


@pytest.mark.parametrize("behind", [1, 2, 3])
@pytest.mark.parametrize("lookahead", [0, 1, 2, 3])
def test_a_wrapper_that_reads_further_ahead_than_it_said_is_an_error(lookahead: int, behind: int) -> None:
    steps = Steps(lookahead)
    number = steps.attach()
    if behind <= lookahead:
        loop_behind(steps, number, 8, behind)
        assert steps.keep == max(0, lookahead - behind)
    else:
        with pytest.raises(AccountingError, match=f"reads {behind} ahead, and lookahead is {lookahead}"):
            loop_behind(steps, number, 8, behind)


def test_two_steps_show_that_a_wrapper_reads_ahead_and_one_does_not() -> None:
    """The one may be on both batches: the loop gathers gradients."""
    once, twice = Steps(), Steps()
    loop_behind(once, once.attach(), 2, 1)
    with pytest.raises(AccountingError, match="reads 1 ahead"):
        loop_behind(twice, twice.attach(), 3, 1)


@pytest.mark.parametrize("way", ["reported", "failed"])
@pytest.mark.parametrize("skipped", [1, 2])
def test_a_loop_that_skips_its_first_steps_and_says_so_is_none(way: str, skipped: int) -> None:
    steps = Steps()
    number = steps.attach()
    for batch in range(8):
        steps.handed()
        if batch < skipped:
            getattr(steps, way)()
        else:
            steps.stepped(number)
    steps.stepped_after_the_end(number)
    assert steps.keep == 0
    steps.begin_pass()  # what was said of the last pass says nothing of this one
    with pytest.raises(AccountingError, match=r"reads 1 ahead.*skipped 1 step\(s\) at first"):
        loop_behind(steps, number, 8, 1)


def test_the_last_one_decides_on_when_it_is_gone() -> None:
    steps = Steps()
    first = steps.attach()
    steps.handed()
    steps.gone(first)
    assert (steps.attached, steps.keep) == (True, 1)
    steps.withdrawn(1)
    assert steps.attached
    steps.handed()
    assert steps.keep == 1


def test_one_of_several_that_is_gone_decides_no_more() -> None:
    steps = Steps()
    first, second = steps.attach("first"), steps.attach("second")
    steps.handed()
    steps.stepped(second)
    steps.gone(first)
    assert (steps.keep, steps.attached) == (0, True)
    steps.handed()
    assert steps.slowest == ["second"]


def test_a_detached_one_holds_back_the_word_of_the_others_no_more() -> None:
    steps = Steps()
    quick, idle = steps.attach("quick"), steps.attach("idle")
    for number in (quick, idle):
        steps.stepped(number)
    steps.begin_pass()
    steps.handed()
    steps.stepped(quick)
    assert steps.all_step
    steps.take_idle()
    assert not steps.all_step
    steps.detach(idle)
    assert steps.all_step


@pytest.mark.parametrize("sees", [True, False])
def test_a_step_has_used_the_padding_batches_that_it_was_seen_to_or_all_where_nothing_is_seen(
    sees: bool,
) -> None:
    batches = Batches()
    batches.sees = sees
    batches.hand()
    first = batches.in_hand
    assert first is not None
    batches.hand()
    assert batches.take_unweighed([first]) == (1 if sees else 2)
    assert batches.take_unweighed([first]) == 0  # said once


def test_padding_batches_that_were_weighed_or_went_back_are_in_no_step_as_if_they_counted() -> None:
    batches = Batches(lookahead=None)
    for _ in range(4):
        batches.hand()
    batches.pass_on()
    batches.weigh_padding(batches.in_hand)
    batches.pass_on()
    batches.weigh_gathered()
    batches.take_back([batches.ahead[0]])
    (left,) = batches.unweighed
    assert left is batches.ahead[0]
    batches.weigh_padding(left)
    assert batches.take_unweighed([left]) == 0


def test_padding_batches_are_no_reading_ahead() -> None:
    """Five batches and three padding batches make two windows of four; a third ends after the last batch."""
    steps = Steps()
    number = steps.attach()
    for window in (("real",) * 4, ("real", "padding", "padding", "padding")):
        for batch in window:
            steps.handed() if batch == "real" else steps.hand()
        steps.stepped(number)
    steps.stepped_after_the_end(number)
    assert steps.keep == 0


def test_padding_batches_are_among_those_that_were_read_ahead() -> None:
    """A wrapper reads one ahead: the loop steps on the first of four when it has the second."""
    steps = Steps()
    number = steps.attach()
    steps.handed()
    for batch in ("real", "real", "padding"):
        steps.handed() if batch == "real" else steps.hand()
        steps.stepped(number)
    with pytest.raises(AccountingError, match="reads 1 ahead, and lookahead is 0"):
        steps.stepped_after_the_end(number)


def test_batches_that_went_back_before_the_first_step_are_no_reading_ahead() -> None:
    steps = Steps()
    number = steps.attach()
    for _ in range(2):
        steps.handed()
        steps.withdrawn(1)
    for _ in range(3):
        steps.handed()
        steps.stepped(number)
    steps.stepped_after_the_end(number)
    assert steps.keep == 0


def test_a_batch_with_records_is_in_doubt_until_a_gradient_of_it_is_seen() -> None:
    batches = Batches(None)
    assert not batches.in_doubt
    for ticket in [((1, 0, 2),), ((1, 2, 4),), (), ((1, 4, 6),)]:
        batches.hand(ticket)
    batches.pass_on()
    assert not batches.in_doubt, "nobody could see its gradient"
    batches.sees = True
    batches.pass_on()
    assert batches.in_doubt
    batches.pass_on()
    assert not batches.in_doubt, "it is a padding batch"
    batches.ahead[0].used_by = 1  # as by a loop that trains before its wrapper tells
    batches.pass_on()
    assert not batches.in_doubt


def test_nothing_may_be_learnt_of_a_batch_that_has_failed_though_the_loop_still_has_it() -> None:
    batches = Batches()
    batches.hand(((1, 0, 2),))
    failed = batches.in_hand
    assert failed is not None
    assert batches.failed() == ((1, 0, 2),)
    assert (failed.counts_not, failed.has_learnt) == ("bad", True)
    assert batches.in_hand is not None
    assert (batches.in_hand.instead_of, batches.in_hand.counts_not) == (failed, "bad")
