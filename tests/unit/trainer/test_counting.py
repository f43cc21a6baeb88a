"""What reports of a plain loop prove: never more than was consumed, in whatever order batches arrive."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainer_kit import Delivered

from edl_torch.core.calls import Grant
from edl_torch.errors import AccountingError, InvalidArgument
from edl_torch.shard import Slice
from edl_torch.trainer.counting import DrawnSamples, StreamCounts


def lease(task: int, records: int, skip: int = 0) -> Grant:
    return Grant(task=task, attempt=1, slice=Slice(epoch=0, shard=task, skip=skip, limit=records))


@dataclass
class Worker:
    """A loader worker as torch runs it: it draws leases when it needs samples; its batches stay in order."""

    name: str
    leases: list[int]
    batch_size: int
    samples: list[tuple[int, int]] = field(default_factory=list)
    batches: list[list[tuple[int, int]]] = field(default_factory=list)

    def fetch(self, counts: StreamCounts, next_task: list[int]) -> bool:
        """Collate one more batch. False when there is nothing left."""
        while len(self.samples) < self.batch_size and self.leases:
            records, task = self.leases.pop(0), next_task[0]
            next_task[0] += 1
            counts.grant(self.name, lease(task, records))
            self.samples += [(task, position) for position in range(records)]
        batch, self.samples = self.samples[: self.batch_size], self.samples[self.batch_size :]
        if batch:
            self.batches.append(batch)
        return bool(batch)


@pytest.mark.parametrize("is_seen", [False, True])
@given(
    plans=st.lists(st.lists(st.integers(1, 9), max_size=4), min_size=1, max_size=4),
    batch_size=st.integers(1, 5),
    explicit=st.booleans(),
    data=st.data(),
)
def test_no_order_of_arrival_makes_an_acknowledgement_early_and_in_the_end_all_count(
    is_seen: bool, plans: list[list[int]], batch_size: int, explicit: bool, data: st.DataObject
) -> None:
    """Whether it is seen what a loader delivers, or not."""
    loop = Delivered(batch_size)
    counts = StreamCounts(batch_size, loop) if is_seen else StreamCounts(batch_size)
    workers = [Worker(f"worker {w}", list(plan), batch_size) for w, plan in enumerate(plans)]
    next_task = [1]
    consumed: set[tuple[int, int]] = set()
    proved: set[tuple[int, int]] = set()
    in_hand: list[list[tuple[int, int]]] = []
    while True:
        able = [w for w in workers if w.samples or w.leases]
        arrived = [w for w in workers if w.batches]
        actions = ["fetch"] * bool(able) + ["consume"] * bool(arrived) + ["report"] * bool(in_hand)
        if not actions:
            break
        match data.draw(st.sampled_from(actions)):
            case "fetch":
                worker = data.draw(st.sampled_from(able))
                worker.fetch(counts, next_task)
                if is_seen and len(worker.batches[-1]) < batch_size:
                    counts.end(worker.name)
            case "consume":
                batch = data.draw(st.sampled_from(arrived)).batches.pop(0)
                loop.count += 1
                in_hand.append(batch)
                consumed |= set(batch)
            case "report":
                batch = in_hand.pop(0)
                runs = counts.report(len(batch) if explicit else None)
                new = {(task, position) for task, first, after in runs for position in range(first, after)}
                assert not new & proved
                proved |= new
                assert proved <= consumed
    assert proved == consumed
    assert counts.unreported == 0


@given(
    records=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    batch_size=st.integers(1, 5),
    bad=st.sets(st.tuples(st.integers(1, 5), st.integers(0, 8))),
)
def test_quarantined_records_are_in_no_batch(
    records: list[int], batch_size: int, bad: set[tuple[int, int]]
) -> None:
    counts = StreamCounts(batch_size)
    samples = []
    for task, number in enumerate(records, 1):
        counts.grant("main", lease(task, number))
        for position in range(number):
            if (task, position) in bad:
                counts.fail(task, position)
                counts.fail(task, position)  # told twice
            else:
                samples.append((task, position))
    covered: list[tuple[int, int]] = []
    for first in range(0, len(samples), batch_size):
        for task, start, after in counts.report(None):
            covered += [(task, p) for p in range(start, after) if (task, p) not in bad]
        assert covered == samples[: first + batch_size]


def test_no_batch_is_short_before_its_stream_has_ended() -> None:
    counts = StreamCounts(4, Delivered(4, 2))
    counts.grant("main", lease(1, 6))
    counts.report(None)
    with pytest.raises(
        AccountingError, match=r"4 record.* of the 6 delivered in this pass 2 are not reported"
    ):
        counts.report(None)
    counts.end("main")
    assert counts.report(None) == [(1, 4, 6)]


def test_mixed_reports_are_refused_and_change_nothing() -> None:
    counts = StreamCounts(4)
    counts.grant("worker 0", lease(1, 4))
    counts.grant("worker 1", lease(2, 4))
    assert counts.report(None) == []
    with pytest.raises(InvalidArgument, match="always or never"):
        counts.report(4)
    assert counts.report(None) == [(1, 0, 4), (2, 0, 4)]


def test_more_reports_than_batches_are_refused_and_change_nothing() -> None:
    counts = StreamCounts(4)
    with pytest.raises(AccountingError, match=r"4 record.* of the 0 delivered in this pass 0"):
        counts.report(None)
    counts.grant("main", lease(1, 5))
    assert [counts.report(None) for _ in range(2)] == [[(1, 0, 4)], [(1, 4, 5)]]
    with pytest.raises(AccountingError, match=r"4 record.* of the 5 delivered in this pass 0"):
        counts.report(None)
    counts.grant("main", lease(2, 5))
    with pytest.raises(AccountingError, match=r"6 record.* of the 10 delivered in this pass 5"):
        counts.report(6)
    assert counts.report(None) == [(2, 0, 4)]
    counts.grant("worker 1", lease(3, 2))  # 4 batches at the most, of which 3 are reported
    assert counts.report(None) == [(2, 4, 5), (3, 0, 2)]
    with pytest.raises(AccountingError, match=r"5 batch\(es\) are reported .* 4 were delivered"):
        counts.report(None)


@given(
    plans=st.lists(st.lists(st.integers(1, 9), max_size=4), min_size=1, max_size=4),
    batch_size=st.integers(1, 5),
    loaded=st.integers(1, 7),
    drop_last=st.booleans(),
    data=st.data(),
)
def test_reports_of_any_number_and_size_count_nothing_that_was_not_delivered(
    plans: list[list[int]], batch_size: int, loaded: int, drop_last: bool, data: st.DataObject
) -> None:
    loop = Delivered(loaded, drop_last=drop_last)
    counts = StreamCounts(batch_size, loop)
    workers = [Worker(f"worker {w}", list(plan), loaded) for w, plan in enumerate(plans)]
    next_task = [1]
    delivered: set[tuple[int, int]] = set()
    proved: set[tuple[int, int]] = set()
    for _ in range(data.draw(st.integers(0, 40))):
        able = [w for w in workers if w.samples or w.leases]
        arrived = [w for w in workers if w.batches]
        actions = ["report", *["fetch"] * bool(able), *["consume"] * bool(arrived)]
        match data.draw(st.sampled_from(actions)):
            case "fetch":
                worker = data.draw(st.sampled_from(able))
                worker.fetch(counts, next_task)
                if len(worker.batches[-1]) < loaded:
                    counts.end(worker.name)  # it asked for more, and there was none
                    if drop_last:
                        worker.batches.pop()
            case "consume":
                batch = data.draw(st.sampled_from(arrived)).batches.pop(0)
                loop.count += 1
                delivered |= set(batch)
            case "report":
                with suppress(AccountingError, InvalidArgument):
                    runs = counts.report(data.draw(st.none() | st.integers(0, 12)))
                    proved |= {(task, p) for task, first, after in runs for p in range(first, after)}
        assert proved <= delivered


# What was delivered: drawn from a dataset, granted, or brought by a loader ----------------------------------


@dataclass
class Stream:
    granted: int
    ended: bool = False


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
    assert Delivered(4, count, drop_last=drop_last).records(streams) == records


def test_the_last_batch_of_a_loader_may_be_short_when_all_is_read() -> None:
    assert Delivered(4, 2).may_end_short([Stream(7, ended=True)])
    assert not Delivered(4, 2).may_end_short([Stream(8, ended=True)])
    assert not Delivered(4, 2).may_end_short([Stream(7)])
    assert not Delivered(4, 1).may_end_short([Stream(7, ended=True)])
    assert Delivered(4, 2).batch_size == 4
