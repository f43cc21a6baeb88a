"""Leases and batches of one trainer: what goes back, what counts, what is void."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainer_kit import ack, back

from edl_torch.core.calls import Acknowledgement, GiveBack, Grant
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
