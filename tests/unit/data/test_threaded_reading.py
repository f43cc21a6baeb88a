"""Several threads make the batches, tickets and errors that one makes."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from functools import partial
from itertools import chain, count
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loader_kit import blocks_waited_for
from plan_kit import Stored, planned

from edl_torch.core.calls import Grant
from edl_torch.core.plan import Plan
from edl_torch.data.batches.convert import to_batch
from edl_torch.data.batches.transport import Collated, IterationSetup
from edl_torch.data.reading import record_jobs
from edl_torch.data.reading.record_jobs import Block, ReaderThreads, RecordJob, StreamedRecords, thread_count
from edl_torch.data.reading.sample_reading import ReadingTimes, SampleList, SampleReader
from edl_torch.data.reading.seeding import Generators, GeneratorStates, record_seeds
from edl_torch.data.reading.threaded_reading import ThreadedReading
from edl_torch.errors import BadRecord, InvalidArgument, ReaderError, ServiceClosed
from edl_torch.readers.base import AbstractDataReader
from edl_torch.shard import Slice
from edl_torch.testing import wait_until
from edl_torch.trainer.vocabulary import Tally

Batches = list[tuple[Any, Any]]  # (ticket, samples)


class Numbers(Stored):
    """Some records take a moment. Knows how many were read at once."""

    def __init__(self, bad: Collection[int] = (), slow: Collection[int] = (), ends: int = 1 << 30) -> None:
        super().__init__(bad, ends)
        self.slow = slow
        self.reading = self.most = 0

    def number(self, name: str, index: int) -> int:
        self.reading += 1
        self.most = max(self.most, self.reading)
        if index in self.slow:
            time.sleep(0.002)
        self.reading -= 1
        return super().number(name, index)


class Picking(Numbers):
    def read_record(self, name: str, index: int) -> int:
        return self.number(name, index)


class Safe(Picking):
    thread_safe = True


def granted(plan: Plan) -> list[Grant]:
    return [
        Grant(
            task=7 * shard,
            attempt=1,
            slice=Slice(epoch=1, shard=shard, skip=shard % 2, limit=plan.records_in(1, shard) - shard % 2),
        )
        for shard in plan.windows_at(1, 0, plan.num_windows)
    ]


class Book:
    """Puts bad records into quarantine and keeps their names, or raises."""

    def __init__(self, *, quarantines: bool) -> None:
        self.quarantines = quarantines
        self.said: list[tuple[int, int, str]] = []

    def __call__(self, grant: Grant, position: int, error: ReaderError) -> None:
        if not self.quarantines:
            raise error
        self.said.append((grant.task, position, str(error)))


def by_one(
    reader: AbstractDataReader,
    plan: Plan,
    size: int,
    book: Book,
    transform: Callable[[Any], Any] | None = None,
    generators: Generators | None = None,
    after: Callable[[], object] = lambda: None,
) -> Batches:
    """As a `ShardedDataset` reads without threads."""
    tally = Tally()

    def to_samples(plan: Plan, part: Slice, records: Any) -> Any:
        if transform is None:
            return records
        if generators is None:
            return map(transform, records)
        seeds = record_seeds(plan.spec.seed, part.epoch, plan.indices(part), plan.folder)
        return map(generators.seeded(transform), records, seeds)

    samples = SampleList(size, ReadingTimes())
    lists = partial(SampleReader(reader, to_samples).lists, samples, plan)

    def read(grant: Grant) -> Iterator[Any]:
        def on_bad(position: int, error: ReaderError) -> list[int]:
            book(grant, position, error)
            return tally.start(grant.task, position + 1)

        return lists(grant, tally.start(grant.task, grant.slice.skip), on_bad)

    found: Batches = []
    for batch in chain(chain.from_iterable(map(read, granted(plan))), samples.rest()):
        if generators is not None:
            generators.put_back()
        found.append((tally.take(), batch))
        after()
    return found


def in_threads(
    reader: AbstractDataReader,
    plan: Plan,
    size: int,
    book: Book,
    transform: Callable[[Any], Any] | None = None,
    generators: Generators | None = None,
    *,
    threads: int = 2,
    ahead: int = 2,
    collate: Callable[..., Any] | None = None,
    tally: Tally | None = None,
    grants: Iterator[Grant] | None = None,
) -> ThreadedReading:
    setup = IterationSetup(columnar=False, list_size=size, collate=collate, threads=threads, ahead=ahead)
    setup.tally, setup.generators = tally or setup.tally, generators or setup.generators
    return ThreadedReading(
        reader,
        plan,
        iter(granted(plan)) if grants is None else grants,
        setup,
        book,
        transform=transform,
        seeds=generators is not None,
        keeps_samples=book.quarantines,
    )


def by_several(
    reader: AbstractDataReader,
    plan: Plan,
    size: int,
    book: Book,
    transform: Callable[[Any], Any] | None = None,
    generators: Generators | None = None,
    after: Callable[[], object] = lambda: None,
    **options: Any,
) -> Batches:
    tally, found = Tally(), []
    for batch in in_threads(reader, plan, size, book, transform, generators, tally=tally, **options):
        if generators is not None:
            generators.put_back()
        made = batch.batch if isinstance(batch, Collated) else batch
        found.append((tally.take(), made))
        after()
    return found


def as_list(samples: list[Any], rows: Any) -> list[Any]:
    return list(samples)


def none_is_left() -> bool:
    return not any(thread.name.startswith("edl-read") for thread in threading.enumerate())


PLANS = {
    "stored": planned(),
    "in shard": planned(in_shard=True),
    "global": planned(shuffle=True),
    "one shard": planned(per=40),
    "windows": planned(in_shard=True, window=2),
}


def reciprocal(number: int) -> float:
    """There is none of 0, nor of 1000 here."""
    return 1 / (number % 1000)


@given(
    order=st.sampled_from(list(PLANS)),
    kind=st.sampled_from([Numbers, Picking, Safe]),
    bad=st.sets(st.sampled_from([*range(23), *range(1000, 1009)]), max_size=12),
    slow=st.sets(st.sampled_from(range(23)), max_size=3),
    size=st.integers(1, 9),
    threads=st.integers(1, 4),
    ahead=st.integers(1, 3),
    collates=st.booleans(),
    transforms=st.sampled_from([None, float, reciprocal]),
    ends=st.sampled_from([1 << 30, 20]),
)
def test_batches_tickets_and_quarantine_are_those_of_one_thread(
    order: str, kind: Any, bad: set[int], slow: set[int], ends: int, transforms: Any, **options: Any
) -> None:
    if order == "global" and kind is Numbers:
        kind = Picking
    if kind is not Numbers:
        ends = 1 << 30  # none but a stream ends early
    size, collates = options.pop("size"), options.pop("collates")
    books = Book(quarantines=True), Book(quarantines=True)
    expected = by_one(kind(bad, ends=ends), PLANS[order], size, books[0], transforms)
    options["collate"] = as_list if collates else None
    found = by_several(kind(bad, slow, ends), PLANS[order], size, books[1], transforms, **options)
    assert found == expected
    assert books[0].said == books[1].said
    assert none_is_left()


@pytest.mark.parametrize("kind", [Numbers, Safe])
@pytest.mark.parametrize("bad", [0, 7, 1008])
def test_an_error_is_raised_in_its_turn_and_names_the_record(kind: Any, bad: int) -> None:
    plan = planned()
    seen: list[Any] = []
    reading = in_threads(kind({bad}), plan, 3, Book(quarantines=False), threads=3)
    with pytest.raises(BadRecord) as raised:
        seen.extend(reading)
    with pytest.raises(BadRecord, match=str(raised.value)):
        by_one(kind({bad}), plan, 3, Book(quarantines=False))
    before = [samples for _, samples in by_one(kind(), plan, 3, Book(quarantines=False))]
    assert seen == before[: len(seen)]
    assert bad in before[len(seen)] or bad == 1008
    assert none_is_left()
    assert list(reading) == []


@pytest.mark.parametrize("where", ["read", "transform"])
def test_ctrl_c_in_a_thread_reaches_the_loop(where: str) -> None:
    def interrupt(number: int) -> int:
        if number == 5 and where == "transform":
            raise KeyboardInterrupt
        return number

    class Interrupted(Safe):
        def read_record(self, name: str, index: int) -> int:
            if index == 5 and where == "read":
                raise KeyboardInterrupt
            return super().read_record(name, index)

    reading = in_threads(Interrupted(), planned(), 3, Book(quarantines=True), interrupt)
    assert next(reading) == [0, 1, 2]
    with pytest.raises(KeyboardInterrupt):
        next(reading)
    assert none_is_left()


def test_what_ends_the_leases_is_raised_when_what_came_before_is_read() -> None:
    plan = planned()

    def grants() -> Iterator[Grant]:
        yield from granted(plan)[:2]
        raise ServiceClosed("gone")

    seen: list[Any] = []
    reading = in_threads(Safe(), plan, 4, Book(quarantines=False), grants=grants())
    with pytest.raises(ServiceClosed, match="gone"):
        seen.extend(reading)
    assert seen == [[0, 1, 2, 3], [4, 5, 7, 8]]
    assert none_is_left()


def test_one_thread_at_a_time_reads_unless_the_reader_says_otherwise() -> None:
    reader = Picking(slow=set(range(23)))
    by_several(reader, PLANS["global"], 4, Book(quarantines=False), threads=4)
    assert reader.most == 1
    meeting = threading.Barrier(2)

    class Meeting(Safe):
        def read_record(self, name: str, index: int) -> int:
            if (name, index) in (("a", 0), ("a", 1)):
                meeting.wait(60)
            return super().read_record(name, index)

    by_several(Meeting(), PLANS["stored"], 4, Book(quarantines=False), threads=4)


@pytest.mark.parametrize("kind", [Safe, Picking])
def test_a_reader_hears_which_records_are_picked_next(kind: Any) -> None:
    expected: list[Any] = []

    class Told(kind):  # type: ignore[misc]
        def expect(self, ranges: Any, *, in_order: bool = False) -> None:
            expected.append((list(ranges), in_order))

    plan, book = PLANS["in shard"], Book(quarantines=False)
    by_several(Told(), plan, 4, book)
    found, expected = expected, []
    by_one(Told(), plan, 4, book)
    assert found == expected
    assert len(found) == len(granted(plan))


def test_a_lease_is_read_as_one_stream() -> None:
    reader = Numbers()
    by_several(reader, PLANS["stored"], 4, Book(quarantines=False))
    assert [ends for _, *ends in reader.ranges] == [[0, 6], [7, 12], [12, 18], [19, 23], [0, 6], [7, 9]]


def test_the_first_batch_is_made_in_a_thread_though_its_first_record_is_transformed_by_seed() -> None:
    book, generators = Book(quarantines=False), Generators(after_each=False)
    reading = in_threads(Safe(), PLANS["one shard"], 4, book, float, generators, collate=as_list)
    assert [isinstance(batch, Collated) for batch in reading] == [True] * 7 + [False]


def test_batches_after_a_bad_record_are_made_in_threads_again() -> None:
    book = Book(quarantines=True)
    found = list(in_threads(Safe({1}), PLANS["one shard"], 4, book, collate=as_list))
    assert [isinstance(batch, Collated) for batch in found] == [False] * 3 + [True] * 4 + [False]
    assert len(book.said) == 1


class Noting(Safe):
    """Notes what is read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[int] = []

    def read_record(self, name: str, index: int) -> int:
        self.read.append(index)
        return index


def test_threads_are_a_bounded_number_of_batches_ahead() -> None:
    reader = Noting()
    reading = in_threads(reader, planned(), 3, Book(quarantines=False), ahead=2)
    next(reading)
    wait_until(lambda: len(reader.read) >= 9 and "waiting=0" in repr(reading))
    reading.close()  # whatever a thread has begun is read to its end
    assert len(reader.read) == 9


def test_a_reading_whose_threads_cannot_start_raises_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        in_threads(Safe(), planned(), 4, Book(quarantines=False))
    gc.collect()  # nor does its finaliser fail


def test_a_reading_that_was_closed_keeps_no_sample() -> None:
    made: list[weakref.ref[Sample]] = []
    book = Book(quarantines=True)
    reading = in_threads(Safe({1}), planned(), 2, book, lambda _: noted(made), collate=as_list)
    batch = next(reading)  # of two blocks, of which a sample is left
    assert repr(reading).startswith("<ThreadedReading <ReaderThreads alive=2 of=2 waiting=")
    assert repr(reading).endswith("> blocks=2 transforms_in='all'>")
    reading.close()
    assert repr(reading) == (
        "<ThreadedReading <ReaderThreads alive=0 of=2 waiting=0> blocks=0 transforms_in='all'>"
    )
    assert list(reading) == []
    del batch
    gc.collect()
    assert len(made) >= 2
    assert not any(ref() is not None for ref in made)


class Sample:
    """What a transform makes of a record."""


def noted(made: list[weakref.ref[Sample]]) -> Sample:
    sample = Sample()
    made.append(weakref.ref(sample))
    return sample


def test_samples_live_no_longer_than_their_batch() -> None:
    made: list[weakref.ref[Sample]] = []
    gc.disable()
    try:
        book = Book(quarantines=False)
        for batch in in_threads(Safe(), planned(), 4, book, lambda _: noted(made), ahead=1):
            del batch
        wait_until(lambda: not any(ref() is not None for ref in made))
        assert len(made) == 29
    finally:
        gc.enable()


def test_batches_made_in_threads_are_kept_nowhere_else() -> None:
    made: list[weakref.ref[Sample]] = []
    reading = in_threads(
        Safe(), planned(), 4, Book(quarantines=True), collate=lambda samples, rows: noted(made)
    )
    gc.disable()
    try:
        handed = [weakref.ref(next(reading).batch) for _ in range(5)]
        assert not any(batch() is not None for batch in handed)
        reading.close()
    finally:
        gc.enable()


def test_blocks_that_were_handed_over_need_no_garbage_collector() -> None:
    """A block and its jobs know each other."""

    def alive() -> int:
        return sum(type(each) in (Block, RecordJob) for each in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = alive()
        reading = in_threads(Safe(), planned(), 4, Book(quarantines=False), collate=as_list, ahead=1)
        for _ in reading:
            pass
        del reading
        assert alive() <= before
    finally:
        gc.enable()


# Collation ------------------------------------------------------------------------------------------------

SAMPLES: dict[str, Callable[[int], Any]] = {
    "nested": lambda n: {"x": (torch.tensor([n]), np.int64(n)), "name": f"record {n}", "y": [n, float(n)]},
    "large": lambda n: torch.full((3, 400, 200), float(n)),
}


@pytest.mark.parametrize("kind", SAMPLES)
def test_batches_made_in_threads_are_those_of_the_loader(kind: str) -> None:
    plan, make, book = PLANS["global"], SAMPLES[kind], Book(quarantines=False)
    expected = [to_batch(samples) for _, samples in by_one(Safe(), plan, 4, book, make)]
    found = list(in_threads(Safe(), plan, 4, book, make, collate=to_batch))
    assert all(isinstance(batch, Collated) for batch in found[:-1])
    assert [repr(made(batch)) for batch in found] == [repr(batch) for batch in expected]


def test_large_samples_are_copied_to_their_rows_as_they_are_made() -> None:
    found: list[bool] = []

    def collate(samples: list[Any], rows: Any) -> Any:
        found.append(rows.whole(samples) is not None)
        return samples

    list(in_threads(Safe(), PLANS["global"], 4, Book(quarantines=False), SAMPLES["large"], collate=collate))
    assert found == [True] * 7


def made(batch: Any) -> Any:
    """The batch as the loader hands it over; the last one is not whole."""
    return batch.batch if isinstance(batch, Collated) else to_batch(batch)


@pytest.mark.parametrize("kind", ["long double", "sparse", "endless"])
def test_samples_that_have_no_place_are_left_to_the_loader(kind: str) -> None:
    """A thread that raised here would never be done with its record, and the loop would wait for ever."""

    def make(number: int) -> Any:
        endless: list[Any] = []
        endless.append(endless)
        kinds = {
            "long double": lambda: np.zeros(1 << 18, np.longdouble),
            "sparse": lambda: torch.eye(600).to_sparse(),
            "endless": lambda: endless,
        }
        return kinds[kind]()

    reading = in_threads(Safe(), planned(), 4, Book(quarantines=False), make, collate=to_batch)
    reading._pool.add = lambda jobs: [(job.read(), job.finish()) for job in jobs]  # type: ignore[method-assign]
    assert len(next(reading)) == 4
    reading.close()


def test_samples_that_make_no_batch_are_left_to_the_loader() -> None:
    def uneven(number: int) -> torch.Tensor:
        return torch.zeros(1 + number % 2)

    reading = in_threads(Safe(), planned(), 4, Book(quarantines=False), uneven, collate=to_batch)
    samples = next(reading)
    with pytest.raises(InvalidArgument, match="which do not make one tensor"):
        to_batch(samples)
    reading.close()


# Random numbers -------------------------------------------------------------------------------------------

DRAWS: dict[str, Callable[[], float]] = {
    "python": random.random,
    "numpy": lambda: float(np.random.randn()),
    "torch": lambda: float(torch.rand(1)),
}


def drawing(draw: Callable[[], float], numbers: Any) -> Callable[[int], tuple[int, float]]:
    def transform(number: int) -> tuple[int, float]:
        return number, draw() if number in numbers else 0.0

    return transform


def told(
    read: Callable[..., Batches],
    reader: AbstractDataReader,
    plan: Plan,
    transform: Callable[[Any], Any],
    *,
    size: int = 3,
    loop: Callable[[], float] | None = None,
    **options: Any,
) -> tuple[Batches, list[tuple[int, int, str]], list[float], GeneratorStates]:
    """Batches with their tickets, what went to quarantine, what the `loop` drew, and the generators then."""
    book, own = Book(quarantines=True), list[float]()
    after = (lambda: None) if loop is None else (lambda: own.append(loop()))
    batches = read(reader, plan, size, book, transform, Generators(after_each=False), after=after, **options)
    return batches, book.said, own, GeneratorStates()


def check_equal(
    kind: Callable[[], AbstractDataReader], plan: Plan, transform: Callable[[Any], Any], **options: Any
) -> None:
    """Several threads make what one makes, and leave the generators as it does."""
    loop, size = options.pop("loop", None), options.pop("size", 3)
    start = GeneratorStates()
    expected = told(by_one, kind(), plan, transform, size=size, loop=loop)
    start.restore()
    assert told(by_several, kind(), plan, transform, size=size, loop=loop, **options) == expected
    start.restore()


@pytest.mark.parametrize("source", DRAWS)
@pytest.mark.parametrize("at", [range(2000), {17}, {0}, {21, 1001}, set()], ids=str)
@pytest.mark.parametrize("order", ["stored", "global"])
def test_random_numbers_are_those_of_one_thread(source: str, at: Any, order: str) -> None:
    transform = drawing(DRAWS[source], at)
    for kind in (Safe, Picking):
        check_equal(kind, PLANS[order], transform, threads=3)
        check_equal(kind, PLANS[order], transform, collate=as_list)


@pytest.mark.parametrize("order", ["in shard", "windows"])
@pytest.mark.parametrize("who", ["loop", "transform"])
@pytest.mark.parametrize("bad", [set(), {9, 1004}], ids=str)
def test_records_that_are_read_once_are_read_again_where_somebody_draws_late(
    order: str, who: str, bad: set[int]
) -> None:
    """Each is let go of its window when it is picked; nothing but bad ones may go to quarantine."""
    transform = drawing(random.random, {17, 1001} if who == "transform" else ())
    loop = random.random if who == "loop" else None
    check_equal(lambda: Numbers(bad), PLANS[order], transform, loop=loop)


@pytest.mark.parametrize("source", DRAWS)
@pytest.mark.parametrize("at", [range(2000), {0}, set()], ids=str)
def test_a_loop_that_draws_gets_its_own_numbers_and_disturbs_none(source: str, at: Any) -> None:
    check_equal(Safe, PLANS["global"], drawing(DRAWS[source], at), loop=DRAWS[source])


@pytest.mark.parametrize("who", ["loop", "transform"])
@pytest.mark.parametrize("bad", [{0}, {0, 1, 2, 3, 4}, {9, 1004}, set(range(8))], ids=str)
def test_records_that_cannot_be_read_leave_the_loop_its_numbers(bad: set[int], who: str) -> None:
    """Nothing of them is transformed: to look whether that drew would seed the generators by them."""
    numbers = range(2000) if who == "transform" and bad != set(range(8)) else ()
    transform = drawing(random.random, numbers)
    check_equal(lambda: Safe(bad), planned(), transform, size=7, loop=random.random)


def test_a_transform_that_draws_late_leaves_the_loop_its_numbers() -> None:
    """Where the loop draws only later: both at once cannot be told apart."""
    steps = count()
    late = lambda: random.random() if next(steps) % 10 > 6 else 0.0  # noqa: E731  of ten batches
    check_equal(Safe, planned(), drawing(random.random, {17}), loop=late)


def test_transforms_that_draw_nothing_run_in_several_threads() -> None:
    names: set[str] = set()
    both = threading.Event()

    def transform(number: int) -> int:
        name = threading.current_thread().name
        if name.startswith("edl-read-"):  # the first is transformed in the loop's thread
            names.add(name)
            if len(names) > 1:
                both.set()
            assert both.wait(60)
        return number

    by_several(Safe(), PLANS["global"], 3, Book(quarantines=False), transform, Generators(after_each=False))
    assert {"edl-read-0", "edl-read-1"} <= names


@pytest.mark.parametrize(
    ("at", "after", "said"),
    [(set(), None, 0), (set(range(2000)), None, 1), (set(), random.random, 1), ({17}, None, 1)],
    ids=["nobody draws", "transform", "the loop", "transform, late"],
)
def test_the_log_says_once_when_one_thread_transforms(
    at: set[int], after: Callable[[], Any] | None, said: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "edl_torch.client")
    transform, generators = drawing(random.random, at), Generators(after_each=False)
    book = Book(quarantines=False)
    by_several(Safe(), PLANS["global"], 3, book, transform, generators, threads=3, after=after or list)
    assert len(caplog.messages) == said
    for message in caplog.messages:
        assert message.startswith(
            "drawing.<locals>.transform(), or the loop, drew from the global generator of random"
        )
        assert "while 3 read" in message


# Threads --------------------------------------------------------------------------------------------------


def test_a_read_that_hangs_holds_nobody_up_at_the_end() -> None:
    let_go, hangs = threading.Event(), threading.Event()

    class Hanging(Safe):
        def read_record(self, name: str, index: int) -> int:
            if index == 8:
                hangs.set()
                let_go.wait(20)
            return super().read_record(name, index)

    reading = in_threads(Hanging(), planned(), 3, Book(quarantines=False), threads=2)
    next(reading)
    assert hangs.wait(20)
    began = time.monotonic()
    reading.close()
    assert time.monotonic() - began < 15  # the read hangs for 20
    let_go.set()


@pytest.mark.parametrize("drawn", [False, True])
def test_a_reading_that_another_thread_closes_waits_no_longer(
    drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a signal handler or a watchdog does. What the threads had not begun would never be done."""
    reads, let_go = threading.Event(), threading.Event()
    waited_for = blocks_waited_for(monkeypatch)

    class Hanging(Safe):
        def read_record(self, name: str, index: int) -> int:
            if index == 8:
                reads.set()
                let_go.wait(20)
            return super().read_record(name, index)

    found: list[Any] = []
    generators = Generators(after_each=False) if drawn else None
    reading = in_threads(Hanging(), planned(), 3, Book(quarantines=False), float, generators, threads=1)

    def loop() -> None:
        for batch in reading:
            found.append(batch)
            if drawn and len(found) == 2:
                reads.wait(60)
                random.random()

    start = GeneratorStates()
    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    assert reads.wait(60)
    wait_until(lambda: len(found) == 2 and waited_for)
    reading.close()
    thread.join(15)  # the read hangs for 20
    assert not thread.is_alive()
    assert len(found) == 2
    start.restore()
    let_go.set()
    wait_until(none_is_left)  # the next test counts threads


def test_an_interrupt_while_threads_start_leaves_none_and_torch_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, start, started = torch.get_num_threads(), threading.Thread.start, []

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        started.append(thread)
        if len(started) == 2:
            raise KeyboardInterrupt

    torch.set_num_threads(3)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", interrupted)
            with pytest.raises(KeyboardInterrupt):
                ReaderThreads(3, one_reads=False)
        assert len(started) == 2
        assert none_is_left()
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


class Held:
    """A job that runs until it is let go."""

    def __init__(self) -> None:
        self.begun, self.let_go = threading.Event(), threading.Event()

    def read(self) -> None:
        self.begun.set()
        self.let_go.wait(20)

    def finish(self) -> None:
        pass


def test_no_job_begins_while_a_process_is_forked() -> None:
    pool, job = ReaderThreads(1, one_reads=False), Held()
    record_jobs._pause_all()
    pool.add([job])
    assert not job.begun.wait(0.05)
    record_jobs._all_go_on()
    assert job.begun.wait(60)
    job.let_go.set()
    pool.close()


def test_a_pool_that_is_told_to_stop_begins_no_job_any_more() -> None:
    pool, held, waiting = ReaderThreads(1, one_reads=False), Held(), Held()
    pool.add([held, waiting])
    assert held.begun.wait(60)
    pool.stop()
    assert repr(pool) == "<ReaderThreads alive=1 of=1 waiting=1>"
    held.let_go.set()
    wait_until(none_is_left)
    assert not waiting.begun.is_set()


def test_threads_end_before_the_interpreter_does() -> None:
    """It does not wait for those that it does not end itself."""
    pool = ReaderThreads(2, one_reads=False)
    own = [thread for thread in threading.enumerate() if thread.name.startswith("edl-read")]
    assert [thread.daemon for thread in own] == [True, True]
    record_jobs._close_all()
    assert repr(pool) == "<ReaderThreads alive=0 of=2 waiting=0>"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_waits_for_no_thread_of_its_parent_when_it_forks() -> None:
    pool, job = ReaderThreads(1, one_reads=False), Held()
    pool.add([job])
    assert job.begun.wait(60)
    child = os.fork()
    if not child:
        record_jobs._FORK_S = 20.0
        began = time.monotonic()
        grandchild = os.fork()
        if grandchild:
            os.waitpid(grandchild, 0)
        os._exit(time.monotonic() - began > 10)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    job.let_go.set()
    pool.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_transform_that_forks_does_not_wait_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_jobs, "_FORK_S", 20.0)
    took: list[float] = []

    def forking(number: int) -> int:
        if number == 4:
            began = time.monotonic()
            child = os.fork()
            if not child:
                os._exit(0)
            os.waitpid(child, 0)
            took.append(time.monotonic() - began)
        return number

    assert by_several(Safe(), planned(), 4, Book(quarantines=False), forking)
    assert took[0] < 10


def test_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {0: set(range(12))}
    monkeypatch.setattr("os.sched_getaffinity", own.__getitem__, raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert [thread_count(given, 0) for given in (None, 0, 3, "auto")] == [0, 0, 3, 8]
    assert [thread_count("auto", workers) for workers in (1, 2, 4, 20)] == [8, 6, 3, 1]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert thread_count("auto", 0) == 3
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    for trainers, cores, threads in (
        ("4", 5, 1),
        ("4", None, 1),
        ("4", 64, 8),
        ("1", None, 1),
        ("0", 3, 3),
        ("?", 3, 3),
    ):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", trainers)
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        assert thread_count("auto", 0) == threads
    for wrong in (-1, True, 1.5, "many"):
        with pytest.raises(InvalidArgument, match="num_threads is"):
            thread_count(wrong, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize(("size", "threads", "ahead"), [(8, 1, 4), (3, 2, 6), (1, 1, 2)])
def test_records_of_transforms_that_draw_globally_are_read_once_and_a_few_ahead(
    size: int, threads: int, ahead: int
) -> None:
    """They may be far larger than samples. The first one shows that its transform draws, and comes again."""
    reader, generators = Noting(), Generators(after_each=False)
    reading = in_threads(
        reader,
        PLANS["one shard"],
        size,
        Book(quarantines=False),
        lambda number: random.random(),
        generators,
        threads=threads,
        ahead=9,
    )
    next(reading)
    generators.put_back()
    reading._wait(*reading._blocks)
    left = len(reading._jobs)
    assert sorted(reader.read) == [0, *range(size + left + ahead)]
    reading.close()
    assert len(reading._jobs) == 0


@pytest.mark.parametrize("before", [1, 2, 3])
def test_torch_computes_by_one_thread_in_a_pool_whatever_it_does_elsewhere(before: int) -> None:
    usual = torch.get_num_threads()
    torch.set_num_threads(before)
    try:
        found = by_several(Safe(), planned(), 4, Book(quarantines=False), lambda _: torch.get_num_threads())
        assert {number for _, numbers in found for number in numbers} == {1}
        assert torch.get_num_threads() == before
        elsewhere: list[int] = []
        thread = threading.Thread(target=lambda: elsewhere.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert elsewhere == [before]
    finally:
        torch.set_num_threads(usual)


def test_a_record_that_is_read_again_is_read_alone() -> None:
    plan, reader = PLANS["one shard"], Numbers()
    grant = granted(plan)[0]
    records = StreamedRecords(reader, lambda plan, grant: lambda part: [], plan, grant)
    assert records.again(4) == 4
    assert reader.ranges == [("a", 4, 5)]
