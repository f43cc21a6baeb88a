"""Leases and batches of one trainer: what goes back, what counts, what is void."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainer_kit import ack, back

from edl_torch.core.calls import Acknowledgement, Failure, GiveBack, Grant
from edl_torch.core.limits import REASON_CHARS, Limits
from edl_torch.errors import AccountingError
from edl_torch.shard import Slice
from edl_torch.trainer.batches import Hold
from edl_torch.trainer.inflight import InFlight
from edl_torch.trainer.vocabulary import Ticket


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


def test_a_batch_is_acknowledged_when_it_is_settled(inflight: Loop) -> None:
    assert inflight.hand(((1, 0, 4),))
    assert inflight.hand(((1, 4, 8),))
    assert inflight.settle(1) == [ack(1, 4)]
    assert inflight.records == 6
    assert inflight.settle(0) == [ack(1, 8, 4)]
    assert inflight.settle(0) == []


def test_a_lease_settled_to_its_end_is_forgotten(inflight: Loop) -> None:
    inflight.hand(((1, 0, 10),))
    assert inflight
    assert inflight.settle(0) == [ack(1, 10)]
    assert not inflight
    assert 1 not in inflight


def test_positions_out_of_order_are_an_accounting_error(inflight: Loop) -> None:
    with pytest.raises(AccountingError, match=r"positions 4…7 of task 1, expected 0"):
        inflight.hand(((1, 4, 8),))
    assert inflight.batches == []


@pytest.mark.parametrize("bad", [[0], [0, 1], [3], [9], [4, 5], [0, 3, 9]])
def test_bad_records_are_no_batchs_wherever_they_are(inflight: Loop, bad: list[int]) -> None:
    good = [position for position in range(10) if position not in bad]
    for position in bad:
        assert inflight.fail(1, position, "torn") == [
            Failure(task=1, attempt=1, position=position, reason="torn")
        ]
        assert inflight.fail(1, position, "torn") == []
    for position in good:
        assert inflight.hand(((1, position, position + 1),))
    assert inflight.settle(0) == [ack(1, position + 1, position) for position in good]
    assert not inflight


def test_a_bad_record_behind_what_was_acknowledged_is_passed_over(inflight: Loop) -> None:
    inflight.hand(((1, 0, 4),))
    inflight.settle(0)
    inflight.fail(1, 4, "torn")
    assert inflight.hand(((1, 5, 8),))
    assert inflight.leave(0) == [back(1, 8)]


def test_nothing_below_a_bad_first_record_goes_back(inflight: Loop) -> None:
    inflight.fail(1, 0, "torn")
    assert inflight.leave(0) == [back(1, 1)]
    assert not inflight


def test_a_failure_in_what_went_back_is_the_next_readers_business(inflight: Loop) -> None:
    inflight.hand(((1, 0, 4),))
    assert inflight.leave(0) == [back(1, 4)]
    assert inflight.fail(1, 6, "torn") == []


def test_a_reason_travels_no_longer_than_it_is_kept(inflight: Loop) -> None:
    (failure,) = inflight.fail(1, 0, "x" * 1_000_000)
    assert failure.reason == Limits().shorten(failure.reason) == "x" * REASON_CHARS + "…"


def test_a_lease_with_bad_records_only_is_forgotten(inflight: Loop) -> None:
    for position in range(10):
        inflight.fail(1, position, "torn")
    assert not inflight


def test_withdrawing_takes_the_newest_batches_and_all_that_was_not_handed(inflight: Loop) -> None:
    inflight.grant(lease(2))
    inflight.hand(((1, 0, 4),))
    inflight.hand(((1, 4, 10), (2, 0, 2)))
    assert sorted(inflight.leave(1), key=lambda b: b.task) == [back(1, 4), back(2, 0)]
    assert inflight.settle(0) == [ack(1, 4)]
    assert not inflight


def test_a_batch_with_a_void_lease_is_discarded_and_the_rest_of_it_goes_back(inflight: Loop) -> None:
    inflight.grant(lease(2))
    inflight.void([1])
    assert not inflight.hand(((1, 0, 2), (2, 0, 2)))
    assert inflight.give_back([((1, 0, 2), (2, 0, 2))]) == [back(2, 0, 2)]
    assert inflight.hand(((2, 2, 4),)), "the batch after it is this trainer's"
    assert not inflight.is_mine(((2, 0, 2),))


def test_of_a_discarded_batch_with_a_hole_each_run_goes_back(inflight: Loop) -> None:
    inflight.fail(1, 2, "torn")
    inflight.void([7])
    assert inflight.give_back([((7, 0, 1), (1, 0, 2), (1, 3, 4))]) == [back(1, 0, 2), back(1, 3, 4)]
    assert inflight.leave(0) == [back(1, 4)]
    assert not inflight


def test_a_batch_in_the_middle_goes_back_or_counts_by_itself(inflight: Loop) -> None:
    for first in range(0, 10, 2):
        inflight.hand(((1, first, first + 2),))
    assert inflight.acknowledge([((1, 6, 8),)]) == [ack(1, 8, 6)]
    assert inflight.give_back([((1, 2, 4),)]) == [back(1, 2, 4)]
    assert inflight.acknowledge([((1, 0, 10),)]) == [ack(1, 2), ack(1, 6, 4), ack(1, 10, 8)]
    assert not inflight


def test_settling_a_batch_whose_lease_became_void_tells_nothing(inflight: Loop) -> None:
    inflight.hand(((1, 0, 4),))
    inflight.void([1])
    assert inflight.settle(0) == []


def test_undrawn_leases_stay_when_undelivered_ones_go_back(inflight: Loop) -> None:
    inflight.grant(lease(2))
    inflight.hand(((1, 0, 4),))
    assert inflight.give_back_undelivered() == [back(1, 4)]
    assert 2 in inflight
    assert inflight.give_back_undrawn([lease(2), lease(9)]) == [back(2, 0)]


def test_a_called_back_bundle_becomes_remainders_again(inflight: Loop) -> None:
    inflight.grant(lease(2, bundle=1))
    assert inflight.give_back_undrawn([lease(2, bundle=1)]) == [back(2, 0, remainder=True)]


def test_a_partial_batch_goes_back_as_remainders(inflight: Loop) -> None:
    inflight.hand(((1, 0, 8),))
    assert inflight.give_back([((1, 8, 10),)], remainder=True) == [back(1, 8, remainder=True)]
    assert inflight.settle(0) == [ack(1, 8)]
    assert not inflight


def test_all_that_is_not_acknowledged_goes_back(inflight: Loop) -> None:
    inflight.hand(((1, 0, 4),))
    inflight.hand(((1, 4, 8),))
    inflight.settle(1)
    assert inflight.give_back_unacknowledged() == [back(1, 4)]


def test_what_goes_back_begins_behind_records_that_failed(inflight: Loop) -> None:
    """The report that tells of it may acknowledge the batch before them, and so pass over them."""
    inflight.hand(((1, 0, 4),))
    inflight.fail(1, 4, "torn")
    inflight.fail(1, 5, "torn")
    assert inflight.leave(0) == [back(1, 6)]
    assert inflight.settle(0) == [ack(1, 4)]
    assert not inflight


def test_nothing_goes_back_where_all_the_rest_has_failed(inflight: Loop) -> None:
    inflight.hand(((1, 0, 8),))
    inflight.fail(1, 8, "torn")
    inflight.fail(1, 9, "torn")
    assert inflight.leave(0) == []
    assert inflight.settle(0) == [ack(1, 8)]
    assert not inflight


def test_of_three_batches_the_one_in_the_middle_may_fail(inflight: Loop) -> None:
    for first, after in ((0, 2), (2, 6), (6, 10)):
        inflight.hand(((1, first, after),))
    del inflight.batches[1]
    assert len([inflight.fail(1, position, "NaN") for position in range(2, 6)]) == 4
    assert inflight.settle(1) == [ack(1, 2)]
    assert inflight.settle(0) == [ack(1, 10, 6)]


def test_a_ticket_stands_for_parts_of_its_leases(inflight: Loop) -> None:
    inflight.grant(lease(2, 3, 9))
    assert inflight.slices(((1, 4, 10), (2, 3, 5))) == (
        Slice(epoch=0, shard=1, skip=4, limit=6),
        Slice(epoch=0, shard=2, skip=3, limit=2),
    )


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


def test_where_a_stream_is(inflight: Loop) -> None:
    inflight.grant(lease(2, 3, 9))
    inflight.draw(2, "worker 1")
    inflight.draw(5, "worker 1")  # void meanwhile
    inflight.hand(((1, 0, 4),))
    assert inflight.unhanded("worker 0") == [Slice(epoch=0, shard=1, skip=4, limit=6)]
    assert inflight.unhanded("worker 1") == [Slice(epoch=0, shard=2, skip=3, limit=6)]
    assert inflight.unhanded("worker 2") == []


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
