"""How long records of a batch are read and transformed, and what is timed of a training loop."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loader_kit import ColumnReader, trainer
from plan_kit import planned
from torch.utils.data import DataLoader, IterableDataset

from edl_torch import ElasticDataLoader
from edl_torch.core.calls import Grant
from edl_torch.core.plan import Plan
from edl_torch.data import dataset
from edl_torch.data.batches.transport import IterationSetup
from edl_torch.data.loop.inner_loader import ReadingHere, reads_here
from edl_torch.data.reading import record_jobs as cells
from edl_torch.data.reading import sample_reading as reading
from edl_torch.data.reading import sample_reading as reading_times
from edl_torch.data.reading.sample_reading import (
    EACH_S,
    ReadingTimes,
    SampleList,
    SampleReader,
    Times,
)
from edl_torch.data.reading.seeding import record_seeds
from edl_torch.data.reading.threaded_reading import ThreadedReading
from edl_torch.errors import ReaderError
from edl_torch.readers.base import AbstractDataReader
from edl_torch.shard import Slice
from edl_torch.testing import FakeClock, FakeMaster
from edl_torch.trainer.measuring import Measuring, Stopwatch
from edl_torch.trainer.vocabulary import Tally

PLAN = planned()  # shards of six records
READ_S, TRANSFORM_S, LEASE_S = 0.25, 0.5, 16.0


class Clock:
    """A clock that moves when somebody works."""

    def __init__(self) -> None:
        self.now = 1.0

    def __call__(self) -> float:
        return self.now

    def works(self, seconds: float, value: Any) -> Any:
        self.now += seconds
        return value


class Slow(AbstractDataReader):
    """Takes time for each record; `bad` ones take it too."""

    def __init__(self, clock: Clock, read_s: float = READ_S, bad: int | None = None) -> None:
        super().__init__()
        self._clock, self._read_s, self._bad = clock, read_s, bad

    def create_shards(self, mode: Any = None) -> dict[str, int]:
        return {"a": 23, "b": 9}

    def read_records(self, task: Any) -> Iterator[int]:
        for number in range(task.start, task.end):
            if self._clock.works(self._read_s, number) == self._bad:
                raise ValueError("torn")
            yield number


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (cells, dataset, reading, reading_times):
        monkeypatch.setattr(module, "perf_counter", clock)
    return clock


def leases() -> Iterator[Grant]:
    for shard in range(4):
        size = PLAN.records_in(0, shard)
        yield Grant(task=shard, attempt=1, slice=Slice(epoch=0, shard=shard, skip=0, limit=size))


Batch = tuple[list[int], Times | None]


def batches(clock: Clock, reader: Slow, size: int, transform_s: float, plan: Plan = PLAN) -> Iterator[Batch]:
    """Batches, and their times where they were timed, as the collate function takes them."""
    times = ReadingTimes()

    def to_samples(plan: Plan, part: Slice, records: Any) -> Any:
        return map(partial(clock.works, transform_s), records)

    def on_bad(position: int, error: ReaderError) -> list[int]:
        return [0, position + 1, position + 1]

    read, samples = SampleReader(reader, to_samples), SampleList(size, times)
    for grant in leases():
        clock.now += LEASE_S
        for batch in read.lists(samples, plan, grant, [grant.task, 0, 0], on_bad):
            yield batch, times.take() if times.timing else None
    for batch in samples.rest():
        yield batch, times.take() if times.timing else None


def test_of_a_slow_source_each_batch_but_the_first_is_timed_less_the_waits_for_leases(clock: Clock) -> None:
    found = list(batches(clock, Slow(clock), 4, TRANSFORM_S))
    assert [number for batch, _ in found for number in batch] == list(range(23))
    assert found[0][1] is None  # it opens files
    for batch, times in found[1:]:
        assert times == (len(batch) * READ_S, len(batch) * TRANSFORM_S)


def test_of_a_fast_source_a_batch_is_timed_now_and_then(clock: Clock) -> None:
    found = list(batches(clock, Slow(clock, EACH_S / 16), 2, 0.0))
    timed = [place for place, (_, times) in enumerate(found) if times is not None]
    assert [number for batch, _ in found for number in batch] == list(range(23))
    assert 1 < len(timed) < len(found) / 2
    assert all(times == pytest.approx((EACH_S / 8, 0.0)) for _, times in found[1:-1] if times is not None)


def test_a_record_that_cannot_be_read_took_time_too(clock: Clock) -> None:
    found = list(batches(clock, Slow(clock, bad=7), 4, TRANSFORM_S))
    assert [number for batch, _ in found for number in batch] == [n for n in range(23) if n != 7]
    assert found[1] == ([4, 5, 6, 8], (5 * READ_S, 4 * TRANSFORM_S))


def test_a_shard_that_is_kept_is_read_for_the_batch_that_needs_it_first(clock: Clock) -> None:
    found = list(batches(clock, Slow(clock), 3, TRANSFORM_S, planned(in_shard=True)))
    assert [times for _, times in found[1:5]] == [
        (0.0, 3 * TRANSFORM_S),
        (6 * READ_S, 3 * TRANSFORM_S),
        (0.0, 3 * TRANSFORM_S),
        (6 * READ_S, 3 * TRANSFORM_S),
    ]


def test_timing_makes_no_seeds_of_all_that_is_left_of_a_large_lease(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def counted(*arguments: Any) -> list[int]:
        made.extend(seeds := record_seeds(*arguments))
        return seeds

    monkeypatch.setattr(dataset, "record_seeds", counted)
    numbers, size = range(200_000), 10
    with ElasticDataLoader(
        numbers,
        batch_size=size,
        records_per_shard=len(numbers),
        transform=partial(clock.works, EACH_S / size / 3),
        seed_transforms=True,
    ) as loader:
        iterator = iter(loader)
        batches = [next(iterator) for _ in range(60)]
        timed = loader.progress().measures.timed
        loader.stepped()
    assert torch.equal(torch.cat(batches), torch.arange(600))
    assert timed >= 10
    assert len(made) < len(numbers)


@pytest.mark.parametrize("seeds", [False, True])
def test_threads_count_each_record_where_it_is_worked_on(clock: Clock, seeds: bool) -> None:
    """The first one shows that its transform draws, and is transformed where the loop is."""
    setup = IterationSetup(columnar=False, list_size=1 if seeds else 4, threads=1, ahead=1)
    batches = ThreadedReading(
        Slow(clock),
        PLAN,
        leases(),
        setup,
        lambda grant, position, error: None,
        transform=lambda number: clock.works(TRANSFORM_S, torch.rand(1)),
        seeds=seeds,
        keeps_samples=False,
    )
    batch = next(batches)
    assert setup.times.timing
    batches.close()
    assert setup.times.take() == (len(batch) * READ_S, len(batch) * TRANSFORM_S)


@pytest.mark.parametrize("transform_s", [TRANSFORM_S, None])
def test_of_columns_each_batch_is_timed_less_the_work_of_the_loop(
    clock: Clock, transform_s: float | None
) -> None:
    class Columns(ColumnReader):
        def read_batch(self, name: str, indices: Any) -> Any:
            return clock.works(READ_S, super().read_batch(name, indices))

    grants, times, found = leases(), ReadingTimes(), []
    link: Any = SimpleNamespace(next=lambda: clock.works(LEASE_S, next(grants, None)))
    with trainer(FakeMaster(), Columns({"a": 23, "b": 9})) as (_, columns):
        columns.transform = None if transform_s is None else partial(clock.works, transform_s)
        for batch in columns._batches(link, PLAN, Tally(), times):
            found.append((len(batch), times.timing, times.take()))
            clock.now += 9.0
    expected = (READ_S, transform_s or 0.0)
    assert [size for size, _, _ in found] == [4, 2, 4, 2, 4, 2, 4, 1]
    assert all(timing and seconds == pytest.approx(expected) for _, timing, seconds in found)


def test_of_columns_that_take_no_time_few_batches_are_timed(clock: Clock) -> None:
    grants, times = leases(), ReadingTimes()
    link: Any = SimpleNamespace(next=lambda: next(grants, None))
    with trainer(FakeMaster(), ColumnReader({"a": 23, "b": 9})) as (_, columns):
        timed = []
        for _ in columns._batches(link, PLAN, Tally(), times):
            timed.append(times.timing)
            times.clear()
    assert timed == [True] + [False] * 7
    assert times.due_at == clock.now + EACH_S


def test_what_was_begun_of_an_abandoned_batch_is_in_no_other(clock: Clock) -> None:
    times = ReadingTimes()
    times.begin()
    times.add(1.0, 2.0)
    times.clear()
    assert not times.timing
    for begun in (1, 2):
        records = times.reading(clock.works(READ_S, number) for number in range(3))
        for _ in range(begun):
            next(records)
        times.clear()
    asked_at = clock.now
    assert next(times.reading(iter([clock.works(READ_S, 7)]))) == 7
    times.drew(asked_at)
    assert times.take() == (0.0, READ_S)


def test_samples_are_made_anew_where_timing_changes_in_the_middle_of_a_lease_alone(clock: Clock) -> None:
    parts: list[tuple[int, int]] = []

    def to_samples(plan: Plan, part: Slice, records: Any) -> Any:
        parts.append((part.skip, part.limit))
        return records

    for size, made in ((2, [(0, 6), (2, 4)]), (6, [(0, 6), (0, 6)])):
        times = ReadingTimes()
        samples = SampleList(size, times)
        read = SampleReader(Slow(clock, 0.0), to_samples)
        for grant in list(leases())[:2]:
            list(read.lists(samples, PLAN, grant, [grant.task, 0, 0], lambda position, error: []))
            if size == 2:
                break
        assert parts == made
        parts.clear()


# What is timed of a training loop, and what is not ----------------------------------------------------------


@pytest.fixture
def fake_clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def measuring() -> Measuring:
    return Measuring()


@pytest.fixture
def stopwatch(measuring: Measuring, fake_clock: FakeClock) -> Stopwatch:
    return Stopwatch(measuring, fake_clock)


def test_the_wait_for_a_batch_and_the_work_on_it_are_told_apart(
    stopwatch: Stopwatch, measuring: Measuring, fake_clock: FakeClock
) -> None:
    for _ in range(2):
        asked_at = fake_clock()
        fake_clock.advance(1.0)
        stopwatch.handed(asked_at, 4)
        fake_clock.advance(3.0)
    stopwatch.ended(fake_clock())
    measures = measuring.measures()
    assert (measures.batches, measures.records) == (2, 8)
    assert (measures.waited.count, measures.waited.sum_s) == (2, 2.0)
    assert (measures.stepped.count, measures.stepped.sum_s) == (2, 6.0)
    assert measures.waiting_share == 0.25


def test_the_end_of_a_pass_is_no_wait_for_a_batch_and_no_work(
    stopwatch: Stopwatch, measuring: Measuring, fake_clock: FakeClock
) -> None:
    stopwatch.handed(fake_clock(), 4)
    asked_at = fake_clock()
    stopwatch.wait_for_ranks(lambda: fake_clock.advance(5.0))
    stopwatch.ended(asked_at)
    stopwatch.ended(fake_clock())  # after its end
    measures = measuring.measures()
    assert measures.waited.count == 1
    assert (measures.waited.sum_s, measures.waited_for_ranks_s) == (0.0, 0.0)
    assert (measures.stepped.count, measures.stepped.sum_s) == (1, 0.0)


def test_the_wait_for_other_ranks_is_a_part_of_the_wait(
    stopwatch: Stopwatch, measuring: Measuring, fake_clock: FakeClock
) -> None:
    def wait() -> str:
        fake_clock.advance(2.0)
        return "all are ready"

    asked_at = fake_clock()
    fake_clock.advance(1.0)
    assert stopwatch.wait_for_ranks(wait) == "all are ready"
    stopwatch.handed(asked_at, 0)
    measures = measuring.measures()
    assert (measures.waited.sum_s, measures.waited_for_ranks_s) == (3.0, 2.0)


# Batches that are read in the trainer's process come as torch's iterator brings them ------------------------


class Batches(IterableDataset):
    def __iter__(self):
        return iter([[1, 2], [3, 4], [5]])


def doubled(batch):
    return [2 * number for number in batch]


def loader(**arguments):
    return DataLoader(Batches(), **{"batch_size": None, "collate_fn": doubled, **arguments})


@pytest.mark.parametrize("begin", [iter, ReadingHere])
def test_batches_are_collated_and_end_for_good(begin):
    iterator = begin(loader())
    assert list(iterator) == [[2, 4], [6, 8], [10]]
    assert next(iterator, None) is None


@pytest.mark.parametrize("generator", [None, torch.Generator()])
def test_random_numbers_go_on_as_after_torchs_iterator(generator):
    after = []
    for begin in (iter, ReadingHere):
        torch.manual_seed(7)
        if generator is not None:
            generator.manual_seed(8)
        list(begin(loader(generator=generator)))
        after.append((torch.rand(1), torch.rand(1, generator=generator)))
    assert after[0] == after[1]


def test_a_profiler_sees_what_it_sees_of_torchs_iterator():
    seen = []
    for begin in (iter, ReadingHere):
        batches = begin(loader())
        next(batches)  # before the profiler begins
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            list(batches)
        # Not `key_averages`: it drops an event that lies within one of its name, by another core's clock.
        names = [event.name() for event in profile.profiler.kineto_results.events()]
        seen.append(Counter(name for name in names if name.startswith("enumerate")))
    assert seen[0] == seen[1]
    assert list(seen[0].values()) == [3]


def test_a_batch_is_kept_by_nobody_else():
    class Batch:
        pass

    batches = ReadingHere(loader(collate_fn=lambda _: Batch()))
    batch = weakref.ref(next(batches))
    assert batch() is None


@pytest.mark.parametrize(
    "arguments", [{"num_workers": 1}, {"timeout": 5}, {"pin_memory": True}, {"batch_size": 2}]
)
def test_torch_does_what_needs_more_of_it(arguments):
    assert reads_here(loader())
    assert not reads_here(loader(**arguments))
