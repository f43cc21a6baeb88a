"""What reports of a plain loop prove: never more than was consumed, in whatever order batches arrive."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edl_torch.core.calls import Grant
from edl_torch.errors import AccountingError, InvalidArgument
from edl_torch.shard import Slice
from edl_torch.trainer.counting import DeliveredBatches, StreamCounts


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


@given(
    plans=st.lists(st.lists(st.integers(1, 9), max_size=4), min_size=1, max_size=4),
    batch_size=st.integers(1, 5),
    explicit=st.booleans(),
    data=st.data(),
)
def test_no_order_of_arrival_makes_an_acknowledgement_early(
    plans: list[list[int]], batch_size: int, explicit: bool, data: st.DataObject
) -> None:
    counts = StreamCounts(batch_size)
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
                data.draw(st.sampled_from(able)).fetch(counts, next_task)
            case "consume":
                batch = data.draw(st.sampled_from(arrived)).batches.pop(0)
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


class AllDelivered(DeliveredBatches):
    batches = 2  # type: ignore[assignment]


def test_no_batch_is_short_before_its_stream_has_ended() -> None:
    counts = StreamCounts(4, AllDelivered(4, drop_last=False))
    counts.grant("main", lease(1, 6))
    counts.report(None)
    with pytest.raises(
        AccountingError, match=r"4 record.* of the 6 delivered in this pass 2 are not reported"
    ):
        counts.report(None)
    counts.end("main")
    assert counts.report(None) == [(1, 4, 6)]


def test_one_stream_is_exact_and_several_are_not() -> None:
    counts = StreamCounts(4)
    assert counts.exact
    counts.grant("worker 0", lease(1, 8))
    assert counts.exact
    assert counts.report(None) == [(1, 0, 4)]
    counts.grant("worker 1", lease(2, 8))
    assert not counts.exact
    assert counts.report(None) == []  # may be the other's first batch
    assert counts.unreported == 12


def test_the_published_formula() -> None:
    counts = StreamCounts(4)
    counts.grant("worker 0", lease(1, 10))  # 3 batches
    counts.grant("worker 1", lease(2, 4))  # 1 batch
    proved = [counts.report(None) for _ in range(4)]
    assert proved == [[], [(1, 0, 4)], [(1, 4, 8)], [(1, 8, 10), (2, 0, 4)]]


def test_what_was_reported_and_is_not_proved_is_uncounted() -> None:
    counts = StreamCounts(4)
    counts.grant("worker 0", lease(1, 10))
    counts.grant("worker 1", lease(2, 4))
    uncounted = []
    for _ in range(4):
        counts.report(None)
        uncounted.append(counts.uncounted)
    assert uncounted == [4, 4, 4, 0]


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


class Loop(DeliveredBatches):
    """Counts what arrives, as a DataLoader's iterator does."""

    def __init__(self, batch_size: int, *, drop_last: bool) -> None:
        super().__init__(batch_size, drop_last=drop_last)
        self.sizes: list[int] = []

    @property
    def batches(self) -> int:
        return len(self.sizes)


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
    loop = Loop(loaded, drop_last=drop_last)
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
                loop.sizes.append(len(batch))
                delivered |= set(batch)
            case "report":
                with suppress(AccountingError, InvalidArgument):
                    runs = counts.report(data.draw(st.none() | st.integers(0, 12)))
                    proved |= {(task, p) for task, first, after in runs for p in range(first, after)}
        assert proved <= delivered


@given(
    plans=st.lists(st.lists(st.integers(1, 9), max_size=4), min_size=1, max_size=4),
    batch_size=st.integers(1, 5),
    explicit=st.booleans(),
    data=st.data(),
)
def test_a_report_for_each_batch_is_never_refused_and_counts_all_at_the_end(
    plans: list[list[int]], batch_size: int, explicit: bool, data: st.DataObject
) -> None:
    loop = Loop(batch_size, drop_last=False)
    counts = StreamCounts(batch_size, loop)
    workers = [Worker(f"worker {w}", list(plan), batch_size) for w, plan in enumerate(plans)]
    next_task = [1]
    unreported: list[int] = []
    while True:
        able = [w for w in workers if w.samples or w.leases]
        arrived = [w for w in workers if w.batches]
        actions = ["fetch"] * bool(able) + ["consume"] * bool(arrived) + ["report"] * bool(unreported)
        if not actions:
            break
        match data.draw(st.sampled_from(actions)):
            case "fetch":
                worker = data.draw(st.sampled_from(able))
                worker.fetch(counts, next_task)
                if len(worker.batches[-1]) < batch_size:
                    counts.end(worker.name)
            case "consume":
                batch = data.draw(st.sampled_from(arrived)).batches.pop(0)
                loop.sizes.append(len(batch))
                unreported.append(len(batch))
            case "report":
                size = unreported.pop(0)
                counts.report(size if explicit else None)
    assert counts.unreported == 0
