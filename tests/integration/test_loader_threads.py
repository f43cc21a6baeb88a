"""Loops over loaders whose threads read: each record has one outcome, whatever ends the loop."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from loader_kit import (
    UNEVEN,
    NumberReader,
    PickingReader,
    SafeReader,
    acknowledged,
    all_records,
    blocks_waited_for,
    elastic,
    flat,
    once,
    run_through,
    take,
    trainer,
)
from lockstep_kit import Rank, run_ranks
from torch.utils.data import get_worker_info

from edl_torch.errors import LoaderWorkerDied
from edl_torch.testing import FakeMaster, wait_until


def add_noise(number: int) -> torch.Tensor:
    return torch.tensor(float(number)) + torch.rand(())


@pytest.fixture(autouse=True)
def _no_thread_is_left(own_threads: Callable[[], list[threading.Thread]]) -> Iterator[None]:
    yield
    wait_until(lambda: not any(thread.name.startswith("edl-read") for thread in own_threads()))


def batches(num_threads: Any, num_workers: int = 0, epochs: int = 2, **arguments: Any) -> list[Any]:
    """All batches of a job, which must be complete."""
    dataset = {"shuffle": True, **arguments.pop("dataset", {})}
    loader_arguments = {"num_workers": num_workers, "num_threads": num_threads, **arguments}
    fake, seen = FakeMaster(), []
    reader = SafeReader(UNEVEN)
    with trainer(fake, reader, num_epochs=epochs, shuffle_shards=True, seed=3, dataset=dataset) as (
        service,
        made,
    ):
        loader = elastic(made, **loader_arguments)
        while not service.finished:
            seen += [batch.tolist() for batch in loader]
    fake.outcomes["training"].check_complete(epochs)
    return seen


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("seeds", [True, False])
def test_batches_are_those_of_one_thread(num_workers: int, seeds: bool) -> None:
    dataset = {"transform": add_noise if seeds else float, "seed_transforms": seeds}
    before = torch.get_rng_state()
    expected = batches(None, dataset=dataset)
    found = batches(3, num_workers, dataset=dataset)
    assert found == expected
    if not num_workers and not seeds:
        torch.set_rng_state(before)
        assert batches(3, dataset=dataset, prefetch_factor=4) == expected


def enlarge(number: int) -> tuple[torch.Tensor, int]:
    return torch.full((200, 1000), float(number)), number


@pytest.mark.parametrize("num_workers", [0, 1])
def test_large_batches_keep_their_records_while_others_are_read(num_workers: int) -> None:
    with trainer(FakeMaster(), SafeReader(UNEVEN), dataset={"transform": enlarge}) as (_, dataset):
        kept = list(elastic(dataset, num_workers=num_workers, num_threads=2))
    for images, labels in kept:
        assert (images == labels[:, None, None]).all()
    assert sorted(label for _, labels in kept for label in labels.tolist()) == all_records()


@pytest.mark.long
def test_workers_that_are_not_forked_have_threads_too() -> None:
    dataset = {"transform": add_noise, "seed_transforms": True}
    found = batches(2, 1, 1, dataset=dataset, multiprocessing_context="forkserver")
    assert found == batches(None, 0, 1, dataset=dataset)


@pytest.mark.parametrize("kind", [NumberReader, PickingReader, SafeReader])
def test_a_loop_that_is_left_after_a_bad_record_needs_no_garbage_collector(kind: Any) -> None:
    class Broken(kind):  # type: ignore[misc]
        def number(self, name: str, index: int) -> int:
            number: int = super().number(name, index)
            if number == 0:
                raise OSError("no byte of 0")
            return number

    fake = FakeMaster()
    dataset = {"on_bad_record": "quarantine", "transform": float, "seed_transforms": True, "shuffle": True}
    gc.disable()
    try:
        with trainer(fake, Broken({"a": 6}), max_bad_records=1, dataset=dataset) as (service, made):
            loader = elastic(made, num_threads=1)
            for _ in loader:
                break
            service.state_dict()
            assert not acknowledged(fake, service)
    finally:
        gc.enable()


def test_ctrl_c_while_reads_hang_ends_the_loop_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, hangs, let_go = count(), threading.Semaphore(0), threading.Event()
    waited_for, came_back = blocks_waited_for(monkeypatch), list[bool]()

    class Hanging(SafeReader):
        def read_record(self, name: str, index: int) -> int:
            if next(reads) >= 9:
                hangs.release()
                came_back.append(let_go.wait(60))
            return super().read_record(name, index)

    def interrupt() -> None:
        for _ in range(2):
            assert hangs.acquire(timeout=60), "a thread does not hang"
        wait_until(lambda: waited_for and not waited_for[-1].is_batch)
        os.kill(os.getpid(), signal.SIGINT)

    fake, seen = FakeMaster(), []
    with trainer(fake, Hanging(UNEVEN), dataset={"shuffle": True}) as (service, dataset):
        loader = elastic(dataset, num_threads=2)
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            run_through(loader, seen)
        assert not came_back, "it waited for reads that hang"
        let_go.set()
        assert acknowledged(fake, service) == once(flat(seen))
        assert sorted(flat(seen + take(iter(loader), 100))) == all_records()


def die_at_seven(number: int) -> int:
    if number == 7 and get_worker_info() is not None:
        os._exit(3)
    return number


def test_a_worker_that_dies_in_a_thread_names_its_records_and_loses_none() -> None:
    fake = FakeMaster()
    with trainer(fake, dataset={"transform": die_at_seven}) as (service, dataset):
        with pytest.raises(LoaderWorkerDied, match=r"worker 0 was at records .*quarantine") as failed:
            take(iter(elastic(dataset, num_workers=1, num_threads=2)), 100)
        failed.value.__traceback__ = None
        assert 7 not in {record for _, record in acknowledged(fake, service)}
        dataset.transform = None
        take(iter(elastic(dataset, num_threads=2)), 100)
        assert service.finished
    fake.outcomes["training"].check_complete(1)


def test_synchronous_ranks_with_threads_train_each_record_once() -> None:
    fake = FakeMaster()
    ranks = run_ranks(fake, 2, Rank.train, SafeReader(UNEVEN), loader={"num_threads": 2})
    assert sorted(record for rank in ranks for record in rank.seen.trained) == all_records()
    assert ranks[0].seen.steps == ranks[1].seen.steps
    fake.outcomes["training"].check_complete(1)


class Locking(SafeReader):
    """Holds a lock while it reads, as a reader with a cache may."""

    def __init__(self) -> None:
        super().__init__(UNEVEN)
        self.lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "lock": None}

    def number(self, name: str, index: int) -> int:
        with self.lock:
            time.sleep(0.001)
            return super().number(name, index)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_workers_forked_beside_threads_inherit_no_lock_that_is_held() -> None:
    reader = Locking()
    with trainer(FakeMaster(), reader) as (_, dataset), trainer(FakeMaster(), reader) as (_, other):
        for seen, batch in enumerate(elastic(dataset, num_threads=3, batch_size=4)):
            if seen % 3 == 0:
                first = take(iter(elastic(other, num_workers=1)), 1)
                assert len(first[0]) == 4
                assert len(batch)


def test_a_collate_function_of_the_users_runs_in_one_thread() -> None:
    names = set()

    def collate(samples: list[int]) -> np.ndarray[Any, Any]:
        names.add(threading.current_thread().name)
        return np.array(samples)

    with trainer(FakeMaster(), SafeReader(UNEVEN)) as (_, dataset):
        found = take(iter(elastic(dataset, num_threads=2, collate_fn=collate)), 100)
    assert sorted(flat(found)) == all_records()
    assert names == {threading.current_thread().name}
