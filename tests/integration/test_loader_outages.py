"""Masters that are away, calls that are lost or repeated, and trainers that share what is left."""

from __future__ import annotations

import errno
import itertools
import random
import socket
import threading
import urllib.error
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from cases import cases
from loader_kit import (
    SOURCE_STEP,
    UNEVEN,
    LookingColumnReader,
    NumberReader,
    PickingReader,
    acknowledged,
    all_records,
    each_way,
    elastic,
    flat,
    numbers,
    once,
    run_through,
    take,
    trainer,
)
from torch.utils.data import DataLoader

from edl_torch import DataShardService, ElasticDataLoader
from edl_torch.errors import (
    BadRecord,
    ConcurrentIteration,
    DataFormatError,
    EdlError,
    InvalidArgument,
    ReaderError,
    ReaderUnavailable,
    SourceChanged,
    SourceUnavailable,
)
from edl_torch.readers.base import name_record
from edl_torch.testing import FakeMaster, Fault

QUARANTINE = {"on_bad_record": "quarantine"}


class Remote(NumberReader):
    """Its network goes down before record 1002, and one record is damaged."""

    def __init__(self) -> None:
        super().__init__(UNEVEN)
        self.down = True

    def number(self, name: str, index: int) -> int:
        number = super().number(name, index)
        if number == 3:
            raise ValueError("a damaged record")
        if self.down and number >= SOURCE_STEP + 2:
            raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
        return number


class RemotePicking(Remote, PickingReader):
    """With random access."""


class RemoteColumns(Remote, LookingColumnReader):
    """With columnar reads."""


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("reader", "shuffle", "loader_arguments"),
    [
        (Remote, False, {}),
        (Remote, True, {}),
        (RemotePicking, True, {}),
        (RemoteColumns, False, {"batch_size": None}),
    ],
    ids=["stored", "permuted", "picked", "columns"],
)
def test_an_outage_burns_no_record_and_the_next_pass_reads_what_is_left(
    reader: Any, shuffle: bool, loader_arguments: Any, num_workers: int
) -> None:
    fake = FakeMaster()
    source = reader()
    with trainer(fake, source, dataset={**QUARANTINE, "shuffle": shuffle}, max_bad_records=1) as (
        service,
        dataset,
    ):
        loader = elastic(dataset, num_workers=num_workers, **loader_arguments)
        seen: list[list[int]] = []
        with pytest.raises(
            SourceUnavailable, match=r"record \d+ of '[bc]': ConnectionResetError: .*not to blame"
        ):
            run_through(loader, seen)
        assert set(acknowledged(fake, service)) <= set(once(flat(seen)))
        told = service.progress()
        assert {record.index for record in told.quarantine} <= {3}
        assert not told.failure
        source.down = False
        done = [number for _, number in acknowledged(fake, service)]
        rest = flat(take(iter(elastic(dataset, num_workers=num_workers, **loader_arguments)), 100))
        assert sorted(done + rest) == [number for number in all_records() if number != 3]
        assert service.finished
    fake.outcomes["training"].check_complete(1)


def test_a_shard_that_is_read_whole_is_not_read_on_while_its_source_is_away() -> None:
    asked: list[tuple[str, int]] = []

    class Noting(Remote):
        def number(self, name: str, index: int) -> int:
            asked.append((name, index))
            return super().number(name, index)

    arguments = {"dataset": {**QUARANTINE, "shuffle": True}, "max_bad_records": 1}
    with (
        trainer(FakeMaster(), Noting(), **arguments) as (_, dataset),
        pytest.raises(SourceUnavailable),
    ):
        take(iter(elastic(dataset)), 100)
    assert asked[-1] == ("b", 2)
    assert asked.count(("b", 2)) == 1


def raised_from(error: Exception, cause: Exception | None) -> Exception:
    """`error` as a driver raises it, that wraps what the system says in an error of its own."""
    try:
        try:
            if cause is not None:
                raise cause
        finally:
            raise error
    except Exception as exc:  # noqa: BLE001  any
        return exc


class DriverError(Exception):
    """A storage driver's own, of no tree that we know."""


REFUSED = ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (TimeoutError("timed out"), SourceUnavailable),
        (OSError(errno.EHOSTUNREACH, "No route to host"), SourceUnavailable),
        (OSError(errno.ESTALE, "Stale file handle"), SourceUnavailable),
        (OSError(errno.EMFILE, "Too many open files"), SourceUnavailable),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), SourceUnavailable),
        (raised_from(DriverError("could not connect"), REFUSED), SourceUnavailable),
        (raised_from(urllib.error.URLError("refused"), REFUSED), SourceUnavailable),
        (
            raised_from(BadRecord("image 'a.jpg' cannot be read"), OSError(errno.EIO, "")),
            SourceUnavailable,
        ),
        (ReaderError("reading rows 3 to 7 of p.t failed after 8 retries"), SourceUnavailable),
        (InvalidArgument("p.t has no column 'x'"), SourceUnavailable),
        (SourceChanged("the table p.t was written to"), SourceChanged),
        (ReaderUnavailable("reader 'parquet' needs pyarrow"), ReaderUnavailable),
        (BadRecord("image 'a.jpg' is empty"), BadRecord),
        (raised_from(BadRecord("'a.mp4' took too long"), TimeoutError("10 s")), BadRecord),
        (raised_from(BadRecord("image 'a.jpg' is missing"), FileNotFoundError(2, "No such file")), BadRecord),
        (DataFormatError("chunk 3 is damaged"), BadRecord),
        (BrokenPipeError(errno.EPIPE, "the decoder hung up"), BadRecord),
        (PermissionError(errno.EACCES, "Permission denied"), BadRecord),
        (ValueError("no number"), BadRecord),
        (OSError("no byte"), BadRecord),
    ],
    ids=lambda value: "" if isinstance(value, type) else f"{type(value).__name__}-{value}"[:40],
)
def test_who_is_to_blame(error: Exception, named: type[EdlError]) -> None:
    found = name_record(error, "a", 7)
    assert type(found) is named
    assert str(found).startswith("record 7 of 'a': ")
    assert str(error) in str(found)
    assert found.__cause__ is error


# Calls and answers that get lost or arrive twice change nothing in what was trained on ----------------------


FAULTS = [Fault.LOSE_CALL, Fault.LOSE_ANSWER, Fault.REPEAT]


@each_way
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.lower())
def test_every_call_may_suffer_once(num_workers: int, fault: Fault, in_process: bool) -> None:
    fake = FakeMaster()
    for call in ("register", "lease", "report", "snapshot"):
        fake.faults.plan(call, *[fault] * 1000)
    with trainer(fake, in_process=in_process, num_epochs=2) as (service, dataset):
        loader = elastic(dataset, num_workers=num_workers)
        seen = take(iter(loader), 4)
        assert acknowledged(fake, service) == once(flat(seen[:3]))
        service.state_dict()
        seen = seen[:3] + take(iter(loader), 100)
        assert sorted(flat(seen)) == all_records()
        assert sorted(flat(take(iter(loader), 100))) == all_records()
        assert service.finished
    fake.outcomes["training"].check_complete(2)


@cases("seed", range(3), range(6))
def test_random_faults_in_a_loop_that_stops_at_random(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    fake = FakeMaster()
    for call in ("lease", "report"):
        fake.faults.plan(call, *rng.choices([None, *FAULTS], k=500))
    finished: list[int] = []
    with trainer(fake, in_process=bool(seed % 2), shuffle_shards=True, dataset={"shuffle": True}) as (
        service,
        dataset,
    ):
        while not service.finished:
            seen = take(iter(elastic(dataset, num_workers=rng.randrange(3))), stop := rng.randrange(1, 8))
            finished += flat(seen[:-1] if len(seen) == stop else seen)
            assert acknowledged(fake, service) == once(finished)
    assert sorted(finished) == all_records()
    fake.outcomes["training"].check_complete(1)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.lower())
def test_a_plain_loop_suffers_too(fault: Fault) -> None:
    fake = FakeMaster()
    for call in ("lease", "report"):
        fake.faults.plan(call, *[None, fault] * 500)
    with trainer(fake, in_process=False) as (service, dataset):
        done: list[int] = []
        for batch in DataLoader(dataset, 4, num_workers=1):
            done += numbers(batch)
            service.report_batch_done()
            assert acknowledged(fake, service) == once(done)
        assert service.finished
    fake.outcomes["training"].check_complete(1)


# Two `ElasticDataLoader`s in one loop: when one ends, the other gives back what the loop did not get --------


LONG, SHORT = 39, 10  # records; batches of 4

Pair = tuple[DataShardService, ElasticDataLoader]


@contextmanager
def two(fake: FakeMaster, num_workers: int, **more: object) -> Iterator[tuple[Pair, Pair]]:
    """Loaders over a long and a short dataset of one master."""
    with ExitStack() as stack:

        def make(name: str, size: int) -> Pair:
            entered = trainer(fake, {name: size}, dataset_name=name, **more)  # type: ignore[arg-type]
            service, dataset = stack.enter_context(entered)
            return service, elastic(dataset, num_workers=num_workers)

        yield make("long", LONG), make("short", SHORT)


def rest_of(loader: ElasticDataLoader, seen: list[int]) -> list[int]:
    """All that has been seen once the loader's epoch is over."""
    for batch in loader:
        seen += numbers(batch)
    return sorted(seen)


@each_way
@pytest.mark.timeout(60)
def test_the_batch_that_zip_threw_away_comes_again(num_workers: int, in_process: bool) -> None:
    fake = FakeMaster()
    with two(fake, num_workers, in_process=in_process) as ((long, loader), (short, other)):
        pairs = [(numbers(a), numbers(b)) for a, b in zip(loader, other, strict=False)]
        assert [len(pairs), len(loader)] == [3, 10]  # zip drew a fourth batch of the long one, and dropped it
        seen = list(itertools.chain(*(a for a, _ in pairs)))
        assert long.record_count == short.record_count == 0
        assert acknowledged(fake, long) == once(seen)
        assert acknowledged(fake, short) == once(range(SHORT))
        assert (short.finished, long.finished) == (True, False)
        assert list(zip(loader, other, strict=False)) == []  # the short one is over: one more is dropped
        assert acknowledged(fake, long) == once(seen)
        assert rest_of(loader, seen) == list(range(LONG))
        assert long.finished
    fake.outcomes["long"].check_complete(1)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.timeout(60)
def test_with_an_optimizer_zip_is_exact_whichever_comes_first(num_workers: int) -> None:
    fake = FakeMaster()
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    with two(fake, num_workers) as ((long, loader), (short, other)):
        long.attach(optimizer)
        short.attach(optimizer)
        seen: list[int] = []
        for batch, more in zip(other, loader, strict=False):  # ends before it asks the long one again
            seen += numbers(more)
            assert numbers(batch)
            optimizer.step()
        assert len(seen) == 12
        assert acknowledged(fake, long) == once(seen)
        assert short.finished
        for (batch,) in zip(loader, strict=True):
            seen += numbers(batch)
            optimizer.step()
        assert sorted(seen) == list(range(LONG))
        assert long.finished
    fake.outcomes["long"].check_complete(1)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.timeout(60)
def test_a_loop_that_draws_from_two_loaders_may_break_where_one_ends(num_workers: int) -> None:
    fake = FakeMaster()
    with two(fake, num_workers) as ((long, loader), (short, other)):
        seen: list[int] = []
        shorter = iter(other)
        for batch in loader:
            if next(shorter, None) is None:
                break  # the batch in hand was not trained on
            seen += numbers(batch)
        assert acknowledged(fake, long) == once(seen)
        assert short.finished
        assert rest_of(loader, seen) == list(range(LONG))
    fake.outcomes["long"].check_complete(1)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.timeout(60)
def test_a_loop_that_begins_the_shorter_one_again_reads_both_to_their_ends(num_workers: int) -> None:
    fake = FakeMaster()
    with two(fake, num_workers, num_epochs=4) as ((long, loader), (short, other)):
        shorter = iter(other)
        seen: list[int] = []
        for batch in loader:
            pair = next(shorter, None)
            if pair is None:
                shorter = iter(other)
                pair = next(shorter)
            seen += numbers(batch)
        assert sorted(seen) == list(range(LONG))
        assert (long.epoch, short.epoch) == (1, 3)
        del shorter
        list(other)
        list(other)
        fake.outcomes["short"].check_complete(4)


@contextmanager
def of_one_dataset(fake: FakeMaster, num_workers: int, **more: object) -> Iterator[tuple[Pair, Pair]]:
    """Two loaders that share the long dataset, each with a trainer of its own."""
    with ExitStack() as stack:

        def make() -> Pair:
            service, dataset = stack.enter_context(trainer(fake, {"a": LONG}, **more))  # type: ignore[arg-type]
            return service, elastic(dataset, num_workers=num_workers)

        yield make(), make()


@pytest.mark.usefixtures("quick_questions")
@each_way
@pytest.mark.timeout(60)
def test_loaders_of_one_dataset_in_one_loop_are_told_that_they_wait_for_each_other(
    num_workers: int, in_process: bool
) -> None:
    fake = FakeMaster()
    seen: list[int] = []
    with of_one_dataset(fake, num_workers, in_process=in_process) as ((service, loader), (_, other)):
        pairs = zip(loader, other, strict=False)
        with pytest.raises(ConcurrentIteration, match=r"'training'.*same thread.*dataset_name.*close\(\)"):
            seen.extend(number for pair in pairs for batch in pair for number in numbers(batch))
        assert len(seen) == len(set(seen))
        other.close()  # what it holds goes back
        assert set(range(LONG)) == {*seen, *rest_of(loader, [])}
        assert service.finished
    fake.outcomes["training"].check_complete(1)


@pytest.mark.usefixtures("quick_questions")
@pytest.mark.timeout(60)
def test_a_loader_that_was_left_with_its_iterator_is_named_to_the_one_after_it() -> None:
    """As where a notebook cell is run again."""
    fake = FakeMaster()
    with of_one_dataset(fake, 0) as ((_, loader), (service, again)):
        left = iter(loader)
        held = numbers(next(left))  # of a lease of 6
        with pytest.raises(ConcurrentIteration, match=r"6 record\(s\)"):
            list(again)
        loader.close()
        assert set(held) <= set(rest_of(again, []))
        assert service.finished


@pytest.mark.usefixtures("quick_questions")
@pytest.mark.timeout(60)
def test_loaders_of_one_dataset_in_threads_of_their_own_wait_for_each_other() -> None:
    fake = FakeMaster()
    with of_one_dataset(fake, 0) as ((_, loader), (_, other)):
        left = iter(loader)
        held = numbers(next(left))
        rest: list[int] = []
        thread = threading.Thread(target=rest_of, args=(other, rest))
        thread.start()
        thread.join(0.2)  # longer than several questions to the master wait
        assert thread.is_alive()
        held += [number for batch in left for number in numbers(batch)]
        thread.join(50)
        assert not thread.is_alive()
        assert sorted(held + rest) == list(range(LONG))
