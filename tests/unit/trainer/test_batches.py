"""Which batches the loop has, which wait for a step, and which it is done with."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainer_kit import ack, back

from edl_torch.core.calls import Acknowledgement, GiveBack, Grant
from edl_torch.errors import AccountingError
from edl_torch.shard import Slice
from edl_torch.trainer.batches import Batches, Hold
from edl_torch.trainer.inflight import InFlight
from edl_torch.trainer.vocabulary import Ticket


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


def test_one_that_never_stepped_and_was_detached_does_not_count_among_all() -> None:
    steps = Steps()
    stepping, never = steps.attach(), steps.attach()
    steps.handed()
    steps.stepped(stepping)
    assert not steps.all_step
    steps.detach(never)
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


# Leases and batches of one trainer: what goes back, what counts, what is void -------------------------------


def lease(task: int, start: int = 0, stop: int = 10, *, attempt: int = 1, bundle: int = 0) -> Grant:
    cut = Slice(epoch=0, shard=task, skip=start, limit=stop - start)
    return Grant(task=task, attempt=attempt, slice=cut, bundle=bundle)


class Loop(InFlight):
    """The leases, and the batches that were handed out."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Ticket] = []

    def hand(self, ticket: Ticket) -> list[Hold] | None:
        holds = super().hand(ticket)
        if holds is not None:
            self.batches.append(ticket)
        return holds

    def settle(self, keep: int) -> list[Acknowledgement]:
        done = self.batches[: max(0, len(self.batches) - keep)]
        self.batches = self.batches[len(done) :]
        return self.acknowledge(done)

    def leave(self, newest: int) -> list[GiveBack]:
        back = self.batches[max(0, len(self.batches) - newest) :]
        self.batches = self.batches[: len(self.batches) - len(back)]
        return self.withdraw(back)


@pytest.fixture
def inflight() -> Loop:
    inflight = Loop()
    inflight.grant(lease(1))
    inflight.draw(1, "worker 0")
    return inflight


def test_positions_out_of_order_are_an_accounting_error(inflight: Loop) -> None:
    with pytest.raises(AccountingError, match=r"positions 4…7 of task 1, expected 0"):
        inflight.hand(((1, 4, 8),))
    assert inflight.batches == []


def test_what_goes_back_begins_behind_records_that_failed(inflight: Loop) -> None:
    """The report that tells of it may acknowledge the batch before them, and so pass over them."""
    inflight.hand(((1, 0, 4),))
    inflight.fail(1, 4, "torn")
    inflight.fail(1, 5, "torn")
    assert inflight.leave(0) == [back(1, 6)]
    assert inflight.settle(0) == [ack(1, 4)]
    assert not inflight


def test_batches_of_another_trainer_are_held_as_they_come() -> None:
    inflight = Loop()
    parts = (Slice(epoch=0, shard=5, skip=4, limit=4), Slice(epoch=0, shard=6, skip=0, limit=2))
    first, second = inflight.take_over(parts), inflight.take_over(parts[:1])
    assert inflight.slices(first) == parts
    assert inflight.slices(second) == parts[:1]
    assert len({task for task, _, _ in first + second}) == 3  # the same records may come again
    assert inflight.hand(first) == [(parts[0], 4, 8), (parts[1], 0, 2)]
    assert [(done.attempt, done.start, done.upto) for done in inflight.settle(0)] == [(0, 4, 8), (0, 0, 2)]
    assert inflight.records == 4


@given(
    stop=st.integers(1, 12),
    bad=st.sets(st.integers(0, 11)),
    batch_size=st.integers(1, 4),
    kept=st.lists(st.integers(0, 2), max_size=12),
    withdrawn=st.integers(0, 2),
)
def test_every_record_of_a_lease_is_told_exactly_one_thing(
    stop: int, bad: set[int], batch_size: int, kept: list[int], withdrawn: int
) -> None:
    inflight = Loop()
    inflight.grant(lease(1, 0, stop))
    inflight.draw(1, "main")
    bad &= set(range(stop))
    good = [position for position in range(stop) if position not in bad]
    told: dict[int, str] = {}

    def fail(below: int) -> None:
        for position in sorted(bad):
            if position < below and inflight.fail(1, position, "torn"):
                told[position] = "bad"

    def settle(keep: int) -> None:
        for done in inflight.settle(keep):
            assert told.keys().isdisjoint(range(done.start, done.upto))
            told.update(dict.fromkeys(range(done.start, done.upto), "done"))

    for keep in kept:
        batch, good = good[:batch_size], good[batch_size:]
        fail(batch[-1] if batch else stop)
        if batch:
            assert inflight.hand(tuple((1, position, position + 1) for position in batch))
        settle(keep)
    for gone in inflight.leave(withdrawn):
        told.update({p: "back" for p in range(gone.start, gone.upto or stop) if p not in told})
    settle(0)
    assert not inflight
    assert sorted(told) == list(range(stop))
    assert all(told[p] != "done" for p in bad)
    outcomes = [told[p] for p in range(stop) if p not in bad]
    assert outcomes == sorted(outcomes, key=["done", "back"].index)
