"""What was delivered in a plain pass: drawn from a dataset, granted, or brought by a loader."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from edl_torch.trainer.counting import DeliveredBatches, DrawnSamples, GrantedRecords


@dataclass
class Stream:
    granted: int
    ended: bool = False


class Batches(DeliveredBatches):
    count = 0

    @property
    def batches(self) -> int:
        return self.count


def delivered(count: int, batch_size: int = 4, *, drop_last: bool = False) -> Batches:
    loop = Batches(batch_size, drop_last=drop_last)
    loop.count = count
    return loop


def test_samples_are_counted_as_they_are_drawn_lease_by_lease() -> None:
    drawn = DrawnSamples()
    assert drawn.records([]) == (0, 0)
    run = drawn.start(7, 3)
    assert run == [7, 3, 3]
    run[2] = 5
    assert drawn.records([]) == (2, 2)
    run = drawn.start(8, 10)
    assert drawn.records([]) == (2, 2)
    run[2] = 14
    assert drawn.records([]) == (6, 6)
    drawn.start(9, 0)[2] = 1
    assert drawn.records([]) == (7, 7)


def test_the_last_samples_drawn_may_be_a_short_batch_when_all_is_read() -> None:
    drawn = DrawnSamples()
    drawn.start(7, 3)[2] = 5
    assert drawn.may_end_short([Stream(2, ended=True)])
    assert not drawn.may_end_short([Stream(2)])
    assert not drawn.may_end_short([Stream(3, ended=True)])


def test_what_is_granted_is_delivered_where_nobody_can_look() -> None:
    granted = GrantedRecords()
    assert granted.records([Stream(3), Stream(4)]) == (7, 7)
    assert granted.may_end_short([Stream(3)])
    assert (granted.batch_size, granted.batches) == (0, None)
    assert (DrawnSamples.batch_size, DrawnSamples.batches) == (0, None)


@pytest.mark.parametrize(
    ("count", "streams", "drop_last", "records"),
    [
        (2, [Stream(20)], False, (8, 8)),
        (2, [Stream(7)], False, (7, 7)),
        (2, [Stream(7, ended=True), Stream(20)], False, (7, 8)),  # the short one may be among them
        (1, [Stream(7, ended=True), Stream(20)], False, (4, 4)),  # it is not the first of its worker
        (2, [Stream(7, ended=True), Stream(20)], True, (8, 8)),  # it was withheld
        (2, [Stream(8, ended=True), Stream(20)], False, (8, 8)),
        (2, [Stream(1, ended=True), Stream(2, ended=True)], False, (3, 3)),
        (1, [Stream(1, ended=True), Stream(2, ended=True), Stream(9)], False, (0, 4)),
    ],
)
def test_batches_have_at_least_and_at_most(
    count: int, streams: list[Stream], drop_last: bool, records: tuple[int, int]
) -> None:
    assert delivered(count, drop_last=drop_last).records(streams) == records


def test_the_last_batch_of_a_loader_may_be_short_when_all_is_read() -> None:
    assert delivered(2).may_end_short([Stream(7, ended=True)])
    assert not delivered(2).may_end_short([Stream(8, ended=True)])
    assert not delivered(2).may_end_short([Stream(7)])
    assert not delivered(1).may_end_short([Stream(7, ended=True)])
    assert delivered(2).batch_size == 4
