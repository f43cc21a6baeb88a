"""Iterations over plain DataLoaders are told apart: when seeds repeat, workers come late, or are killed."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from loader_kit import all_records, elastic, flat, numbers, take, trainer
from torch.utils.data import DataLoader, get_worker_info

from edl_torch import DataShardService
from edl_torch.errors import LoaderWorkerDied
from edl_torch.testing import FakeMaster, wait_until

COUNTS = {"a": 40}
LONG = pytest.mark.long
STARTED = ("spawn", "forkserver")  # methods of which each worker is a new interpreter


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


def test_loaders_with_a_generator_of_one_seed_read_everything_each() -> None:
    fake = FakeMaster()
    with trainer(fake, COUNTS, num_epochs=3) as (service, dataset):
        for _ in range(3):
            generator = torch.Generator().manual_seed(0)
            loader = DataLoader(dataset, 4, num_workers=2, generator=generator)
            assert train_through(service, loader, 1) == [all_records(COUNTS)]
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


def test_late_workers_get_no_records_after_a_pass_without_workers_began(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    fake = FakeMaster()
    with trainer(fake, COUNTS) as (service, dataset):
        old = iter(DataLoader(dataset, 4, num_workers=1, worker_init_fn=StartLate(gate)))
        loop = iter(DataLoader(dataset, 4))
        gate.touch()
        assert list(old) == []
        assert train_through(service, loop, 1) == [all_records(COUNTS)]
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


def test_a_loop_goes_on_with_new_workers_after_a_persistent_one_was_killed(tmp_path: Path) -> None:
    armed = tmp_path / "armed"
    armed.touch()
    fake = FakeMaster()
    with trainer(fake, num_epochs=2, dataset={"transform": KillOnce(armed)}) as (service, dataset):
        loader = elastic(dataset, num_workers=2, persistent_workers=True)
        with pytest.raises(LoaderWorkerDied):
            take(iter(loader), 100)
        assert not armed.exists()
        take(iter(loader), 100)
        workers = {process.pid for process in multiprocessing.active_children()}
        assert sorted(flat(take(iter(loader), 100))) == all_records()
        assert {process.pid for process in multiprocessing.active_children()} == workers  # they persist
        assert service.finished
    fake.outcomes["training"].check_complete(2)


def kill_one_worker() -> None:
    victim = multiprocessing.active_children()[0]
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()


@pytest.mark.parametrize("kind", ["elastic", "plain"])
def test_a_persistent_worker_killed_between_passes_is_replaced(kind: str) -> None:
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
        kill_one_worker()
        wait_until(lambda: kept._iterator is not before)
        trained: list[int] = []
        for batch in loader:
            trained += numbers(batch)
            service.report_batch_done()
        assert sorted(trained) == all_records()
        assert service.finished
    fake.outcomes["training"].check_complete(2)


def test_a_plain_loop_goes_on_with_new_workers_after_a_persistent_one_was_killed(tmp_path: Path) -> None:
    armed = tmp_path / "armed"
    armed.touch()
    fake = FakeMaster()
    with trainer(fake, dataset={"transform": KillOnce(armed)}) as (service, dataset):
        loader = DataLoader(dataset, 4, num_workers=2, persistent_workers=True)
        with pytest.raises(RuntimeError, match="DataLoader worker"):
            take(iter(loader), 100)
        wait_until(lambda: loader._iterator is None)
        assert train_through(service, loader, 1) == [all_records()]
        assert service.finished
    fake.outcomes["training"].check_complete(1)
