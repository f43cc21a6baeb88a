"""Iterations over plain DataLoaders are told apart, and the reports of their loops are bounded.

That they acknowledge nothing early the generated loops show.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import chain
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from loader_kit import UNEVEN, acknowledged, all_records, elastic, flat, numbers, once, take, trainer
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from edl_torch import DataShardService, ShardedDataset
from edl_torch.errors import AccountingError, ConcurrentIteration, InvalidArgument, LoaderWorkerDied
from edl_torch.testing import FakeMaster, wait_until

COUNTS = {"a": 40}
LONG = pytest.mark.long
STARTED = ("spawn", "forkserver")  # methods of which each worker is a new interpreter
OwnChildren = Callable[[], list[BaseProcess]]


@pytest.fixture(autouse=True)
def _expected_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)
        warnings.filterwarnings("ignore", message="a pass over", category=UserWarning)
        yield


def train_through(service: DataShardService, loader: Any, passes: int) -> list[list[int]]:
    """The records of each pass, reported batch by batch."""
    seen = []
    for _ in range(passes):
        torch.manual_seed(0)
        trained: list[int] = []
        for batch in loader:
            trained += numbers(batch)
            service.report_batch_done()
        seen.append(sorted(trained))
    return seen


# The same random numbers before each pass -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "num_workers", "persistent"),
    [
        *[("fork", 1, False), ("fork", 2, False), ("fork", 1, True), ("fork", 2, True)],
        ("forkserver", 2, True),
        *(pytest.param("spawn", *rest, marks=LONG) for rest in itertools.product((1, 2), (False, True))),
        *(pytest.param("forkserver", *rest, marks=LONG) for rest in [(1, False), (1, True), (2, False)]),
    ],
)
def test_passes_that_begin_with_one_seed_read_everything_each(
    method: str, num_workers: int, persistent: bool
) -> None:
    fake = FakeMaster()
    with trainer(fake, COUNTS, num_epochs=3) as (service, dataset):
        loader = DataLoader(
            dataset,
            4,
            num_workers=num_workers,
            multiprocessing_context=multiprocessing.get_context(method),
            persistent_workers=persistent,
        )
        assert train_through(service, loader, 3) == [all_records(COUNTS)] * 3
        assert service.finished
    fake.outcomes["training"].check_complete(3)


# A worker of torch's that ends while its queue's daemon thread is in C++ may abort ("terminate called without
# an active exception"), and torch's finalizer says so.
@pytest.mark.filterwarnings("ignore:Exception ignored in.*__del__:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("method", ["fork", *(pytest.param(other, marks=LONG) for other in STARTED)])
def test_a_pass_given_up_does_not_spoil_the_next_one_of_the_same_seed(method: str) -> None:
    fake = FakeMaster()
    with trainer(fake, COUNTS) as (service, dataset):
        for left_after in (1, 2):
            torch.manual_seed(0)
            take(iter(DataLoader(dataset, 4, num_workers=2, multiprocessing_context=method)), left_after)
        loader = DataLoader(dataset, 4, num_workers=2, multiprocessing_context=method)
        assert train_through(service, loader, 1) == [all_records(COUNTS)]
        assert service.finished
    fake.outcomes["training"].check_complete(1)


def test_two_loaders_take_turns_over_one_dataset_with_persistent_workers() -> None:
    fake = FakeMaster()
    with trainer(fake, COUNTS, num_epochs=6) as (service, dataset):
        one, two = (DataLoader(dataset, 4, num_workers=n, persistent_workers=True) for n in (2, 1))
        for loader in (one, two, one, one, two, two):
            assert train_through(service, loader, 1) == [all_records(COUNTS)]
        assert service.finished
    fake.outcomes["training"].check_complete(6)


# Workers that come late -------------------------------------------------------------------------------------


class SlowStart:
    """Lets worker 1 begin only when `gate` is there."""

    def __init__(self, gate: Path) -> None:
        self.gate = gate

    def __call__(self, worker: int) -> None:
        if worker == 1:
            while not self.gate.exists():
                time.sleep(0.01)


@pytest.mark.parametrize("method", ["fork", *(pytest.param(other, marks=LONG) for other in STARTED)])
def test_workers_that_start_at_very_unequal_times_share_one_pass(method: str, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    fake = FakeMaster()
    with trainer(fake, COUNTS, num_epochs=2) as (service, dataset):
        for _ in range(2):
            torch.manual_seed(0)
            loader = DataLoader(
                dataset,
                4,
                num_workers=2,
                in_order=False,
                multiprocessing_context=method,
                worker_init_fn=SlowStart(gate),
            )
            trained: list[int] = []
            for batch in loader:
                gate.touch()
                trained += numbers(batch)
                service.report_batch_done()
            gate.unlink()
            assert sorted(trained) == all_records(COUNTS)
        assert service.finished
    fake.outcomes["training"].check_complete(2)


class StartLate(SlowStart):
    """Lets no worker begin before `gate` is there."""

    def __call__(self, worker: int) -> None:
        super().__call__(1)


def test_late_workers_of_an_older_iteration_get_no_records(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    fake = FakeMaster()
    with trainer(fake, COUNTS) as (service, dataset):
        torch.manual_seed(0)
        old = iter(DataLoader(dataset, 4, num_workers=2, worker_init_fn=StartLate(gate)))
        torch.manual_seed(0)
        trained: list[int] = []
        for batch in DataLoader(dataset, 4, num_workers=2):
            if not trained:
                gate.touch()
                assert list(old) == []  # though none of its workers had begun when the newer one did
            trained += numbers(batch)
            service.report_batch_done()
        assert sorted(trained) == all_records(COUNTS)
        assert service.finished
    fake.outcomes["training"].check_complete(1)


# Workers that are killed ------------------------------------------------------------------------------------


class KillOnce:
    """Kills its loader worker at record 7, when `armed` is there; takes it away."""

    def __init__(self, armed: Path) -> None:
        self.armed = armed

    def __call__(self, number: int) -> int:
        if number == 7 and get_worker_info() is not None and self.armed.exists():
            self.armed.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return number


def test_a_loop_goes_on_with_new_workers_after_a_persistent_one_was_killed(
    tmp_path: Path, own_children: OwnChildren
) -> None:
    armed = tmp_path / "armed"
    armed.touch()
    fake = FakeMaster()
    with trainer(fake, num_epochs=2, dataset={"transform": KillOnce(armed)}) as (service, dataset):
        loader = elastic(dataset, num_workers=2, persistent_workers=True)
        with pytest.raises((LoaderWorkerDied, RuntimeError)):  # torch's own, where it strikes in the loop
            take(iter(loader), 100)
        assert not armed.exists()
        take(iter(loader), 100)
        workers = {process.pid for process in own_children()}
        assert sorted(flat(take(iter(loader), 100))) == all_records()
        assert {process.pid for process in own_children()} == workers  # they persist
        assert service.finished
    fake.outcomes["training"].check_complete(2)


def kill(victim: BaseProcess) -> None:
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()


@pytest.mark.parametrize("kind", ["elastic", "plain"])
def test_a_persistent_worker_killed_between_passes_is_replaced(kind: str, own_children: OwnChildren) -> None:
    fake = FakeMaster()
    with trainer(fake, num_epochs=2) as (service, dataset):
        make: Callable[..., Any] = elastic if kind == "elastic" else DataLoader
        size = {} if kind == "elastic" else {"batch_size": 4}
        loader = make(dataset, num_workers=2, persistent_workers=True, **size)
        for _ in loader:
            service.report_batch_done()
        kept = loader._inner.loader if kind == "elastic" else loader
        before = kept._iterator
        assert before is not None
        kill(own_children()[0])
        wait_until(lambda: kept._iterator is not before)
        trained: list[int] = []
        for batch in loader:
            trained += numbers(batch)
            service.report_batch_done()
        assert sorted(trained) == all_records()
        assert service.finished
    fake.outcomes["training"].check_complete(2)


def test_a_plain_loop_goes_on_with_new_workers_after_a_persistent_one_was_killed(
    tmp_path: Path, own_children: OwnChildren
) -> None:
    armed = tmp_path / "armed"
    armed.touch()
    fake = FakeMaster()
    with trainer(fake, dataset={"transform": KillOnce(armed)}) as (service, dataset):
        loader = DataLoader(dataset, 4, num_workers=2, persistent_workers=True)
        # Torch raises as SIGCHLD comes, wherever that is; the worker's socket may tell of its death before.
        with contextlib.suppress(RuntimeError, OSError, EOFError):
            take(iter(loader), 100)
        with contextlib.suppress(RuntimeError):
            wait_until(lambda: not armed.exists() and len(own_children()) < 2)
        wait_until(lambda: loader._iterator is None)
        assert train_through(service, loader, 1) == [all_records()]
        assert service.finished
    fake.outcomes["training"].check_complete(1)


# Reports of plain loops are bounded by what the loop was given: what exceeds it is refused ------------------


REPORTED = {"a": 100}
SIZE = 10  # the service's


def told(fake: FakeMaster, service: DataShardService) -> set[int]:
    return {record for _, record in acknowledged(fake, service)}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("batch_size", [8, 60, None], ids=str)
def test_a_default_report_of_another_batch_size_is_refused_at_once(
    batch_size: int | None, num_workers: int
) -> None:
    fake = FakeMaster()
    with trainer(fake, REPORTED, batch_size=SIZE, records_per_shard=20) as (service, dataset):
        loop = iter(DataLoader(dataset, batch_size, num_workers=num_workers))
        next(loop)
        loaded = batch_size or 1
        with pytest.raises(
            InvalidArgument, match=rf"batch_size, 10 record.* batches have {loaded}: .*batch_size=…\)"
        ):
            service.report_batch_done()
        assert told(fake, service) == set()


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_reports_may_come_after_the_loop(num_workers: int) -> None:
    fake = FakeMaster()
    with trainer(fake, REPORTED, batch_size=SIZE, records_per_shard=20, num_epochs=2) as (service, dataset):
        loader = DataLoader(dataset, SIZE, num_workers=num_workers)
        for _ in range(2):
            batches = sum(1 for _ in loader)
            assert told(fake, service) <= set(range(100))
            for _ in range(batches):
                service.report_batch_done()
            with pytest.raises(AccountingError, match="delivered in this pass"):
                service.report_batch_done()
        assert service.finished
    fake.outcomes["training"].check_complete(2)


def test_samples_drawn_one_by_one_bound_the_reports() -> None:
    fake = FakeMaster()
    with trainer(fake, {"a": 25}, batch_size=SIZE, records_per_shard=20) as (service, dataset):
        trained: list[int] = []
        for number in dataset:
            trained.append(number)
            if len(trained) % SIZE == 5:
                with pytest.raises(AccountingError, match=r"of the 5|of the 15|of the 25 delivered"):
                    service.report_batch_done()
            elif len(trained) % SIZE == 0:
                service.report_batch_done()
                assert acknowledged(fake, service) == once(trained)
        service.report_batch_done()  # the last batch, which is short
        assert service.finished
    fake.outcomes["training"].check_complete(1)


class Pairs(IterableDataset[Any]):
    """Two records make a sample."""

    def __init__(self, records: ShardedDataset) -> None:
        self.records = records

    def __iter__(self) -> Iterator[tuple[int, int]]:
        records = iter(self.records)
        return zip(records, records, strict=True)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_dataset_between_may_make_one_sample_of_several_records(num_workers: int) -> None:
    fake = FakeMaster()
    with trainer(fake, REPORTED, batch_size=SIZE, records_per_shard=20) as (service, dataset):
        trained: list[int] = []
        for pairs in DataLoader(Pairs(dataset), SIZE // 2, num_workers=num_workers):
            trained += chain.from_iterable(map(numbers, pairs))
            service.report_batch_done()
            assert acknowledged(fake, service) == once(trained)
        assert service.finished
    fake.outcomes["training"].check_complete(1)


# Passes of several kinds -----------------------------------------------------------------------------------


def test_a_loop_over_shards_with_partial_batches() -> None:
    fake = FakeMaster()
    with trainer(fake, batch_size=4, records_per_shard=6) as (service, _):
        done: list[int] = []
        names = list(UNEVEN)
        while not service.finished:
            while (shard := service.fetch_shard()) is not None:
                records = [1000 * names.index(name) + index for name, index in shard.indices()]
                for first in range(0, len(records), 4):
                    done += records[first : first + 4]
                    completed = service.report_batch_done()
                    assert completed == (first + 4 >= len(records))
                    assert acknowledged(fake, service) == once(done)
        assert sorted(done) == all_records()
    fake.outcomes["training"].check_complete(1)


@pytest.mark.parametrize("num_workers", [None, 0, 2], ids=["fetch_shard", "plain", "plain, 2 workers"])
def test_an_elastic_loop_ends_where_the_data_are_read_otherwise(num_workers: int | None) -> None:
    with trainer(FakeMaster()) as (service, dataset):
        loop = iter(elastic(dataset))
        take(loop, 1)
        if num_workers is None:
            assert service.fetch_shard() is not None
        else:
            context = "fork" if num_workers else None
            plain = iter(DataLoader(dataset, 4, num_workers=num_workers, multiprocessing_context=context))
            next(plain)
        with pytest.raises(ConcurrentIteration, match="iterated anew"):
            next(loop)


def test_a_loop_that_can_never_end_says_why_and_stops() -> None:
    """A plain loader's drop_last hides a remainder that no report can ever tell of."""
    fake = FakeMaster()
    with trainer(fake) as (service, dataset), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="a pass over", category=UserWarning)
        loader = DataLoader(dataset, 4, drop_last=True)

        def read() -> None:
            while not service.finished:
                for _ in loader:
                    service.report_batch_done()

        with pytest.raises(AccountingError, match=r"3 record\(s\) were read each time.*drop_last"):
            read()
