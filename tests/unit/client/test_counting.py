"""What reports of a plain loop prove: never more than was consumed, in whatever order batches arrive."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl_torch.client.counting import StreamCounts
from edl_torch.core.calls import Grant
from edl_torch.errors import InvalidArgument
from edl_torch.shard import Slice


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


@settings(max_examples=120)
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


@settings(max_examples=100)
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


def test_mixed_reports_are_refused_and_change_nothing() -> None:
    counts = StreamCounts(4)
    counts.grant("worker 0", lease(1, 4))
    counts.grant("worker 1", lease(2, 4))
    assert counts.report(None) == []
    with pytest.raises(InvalidArgument, match="always or never"):
        counts.report(4)
    assert counts.report(None) == [(1, 0, 4), (2, 0, 4)]


def test_more_reports_than_batches_prove_nothing_more() -> None:
    counts = StreamCounts(4)
    assert counts.report(None) == []
    counts.grant("main", lease(1, 5))
    assert [counts.report(None) for _ in range(3)] == [[(1, 0, 4)], [(1, 4, 5)], []]
    counts.grant("main", lease(2, 5))
    assert counts.report(None) == [(2, 0, 4)]
