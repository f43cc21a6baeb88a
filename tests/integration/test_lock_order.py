"""Whatever a trainer does, it takes its locks in one order, and the garbage collector may run at any time."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

import preloaded
import pytest
import torch
from cases import cases
from checked_locks import CheckedLock, LockOrderViolated, Watch, checked_locks
from loader_kit import NumberReader, acknowledged, elastic, flat, once, take, trainer
from torch.utils.data import DataLoader

from edl_torch import DataShardService, LocalMaster, MasterClient, ShardedDataset
from edl_torch.core.calls import MasterApi
from edl_torch.master.server import ThreadedMaster
from edl_torch.testing import FakeMaster

COUNTS = {"a": 40, "b": 30}

Connect: TypeAlias = Callable[[str], MasterApi]
Masters: TypeAlias = Callable[[Path], AbstractContextManager[Connect]]


@contextmanager
def embedded(folder: Path) -> Iterator[Connect]:
    """Both trainers share a master in their process."""
    master = LocalMaster()
    yield lambda name: master


@contextmanager
def fake(folder: Path) -> Iterator[Connect]:
    master = FakeMaster()
    yield lambda name: master.connect(name)


@contextmanager
def fake_remote(folder: Path) -> Iterator[Connect]:
    """Leases are fetched ahead and reports sent by threads."""
    master = FakeMaster()
    yield lambda name: master.connect(name, in_process=False)


@contextmanager
def over_grpc(folder: Path) -> Iterator[Connect]:
    master = ThreadedMaster("127.0.0.1:0", state=folder)
    clients: list[MasterClient] = []

    def connect(name: str) -> MasterClient:
        clients.append(MasterClient(master.address, name, master_timeout_s=20.0))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()
    master.stop()


MASTERS = [embedded, fake, fake_remote, over_grpc]

NESTED = {  # under the session's lock no other one is taken but that of a fake clock
    ("LocalMaster._lock", "FakeClock._lock"),
    ("Session._lock", "FakeClock._lock"),
}


def assert_not_nested(watch: Watch) -> None:
    """No lock was taken under another."""
    assert watch.order <= NESTED


def leave_in_a_cycle(loader: Any, batches: int) -> None:
    """Take some batches, and leave the iterator to the garbage collector, in a cycle of references."""
    cycle: list[Any] = [iter(loader)]
    cycle.append(cycle)
    take(cycle[0], batches)


def service_of(master: MasterApi, folder: Path, **arguments: Any) -> tuple[DataShardService, ShardedDataset]:
    reader = NumberReader(COUNTS)
    service = DataShardService(
        4, master, reader=reader, records_per_shard=6, num_epochs=3, audit_dir=folder / "audit", **arguments
    )
    return service, ShardedDataset(service, reader)


def elastic_life(service: DataShardService, dataset: ShardedDataset, num_workers: int) -> None:
    """Breaks, iterators left in cycles, steps, a token and the way back, to the end of the data."""
    loader = elastic(dataset, num_workers=num_workers)
    for _ in loader:
        break
    leave_in_a_cycle(loader, 1)
    token = service.state_dict()
    assert service.progress().epoch < 3
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    service.attach(optimizer)
    leave_in_a_cycle(loader, 2)
    weight.sum().backward()
    optimizer.step()
    service.load_state_dict(token)
    for _ in loader:
        service.report_batch_done(err_msg="a bad batch")
        break
    leave_in_a_cycle(loader, 1)
    while not service.finished:
        for _ in loader:
            optimizer.step()


def plain_life(service: DataShardService, dataset: ShardedDataset, num_workers: int) -> None:
    """The same with torch's own loader and reports."""
    context = "fork" if num_workers else None
    loader = DataLoader(dataset, 4, num_workers=num_workers, multiprocessing_context=context)
    for _ in loader:
        service.report_batch_done()
        break
    service.abandon_pass()
    leave_in_a_cycle(loader, 1)
    service.abandon_pass()
    for _ in loader:
        service.report_batch_done()
    service.abandon_pass()
    service.fetch_shard()
    service.abandon_pass()
    service.load_state_dict(None)
    for batch in loader:
        service.report_batch_done(len(batch))


LIVES = [elastic_life, plain_life]


@pytest.fixture(autouse=True, scope="module")
def warm() -> None:
    """What is imported at first use is old when the first test's collections begin: those are quick then."""
    weight = torch.nn.Parameter(torch.ones(1))
    weight.sum().backward()
    torch.optim.SGD([weight], lr=0.1).step()


@pytest.mark.parametrize("life", LIVES, ids=lambda life: life.__name__)
@cases(
    "master, num_workers",
    [(embedded, 0), (fake_remote, 0), (over_grpc, 2)],
    product(MASTERS, [0, 2]),
    ids=lambda value: getattr(value, "__name__", None),
)
@pytest.mark.filterwarnings("ignore:a pass over|a plain DataLoader:UserWarning")
@pytest.mark.filterwarnings("ignore:an optimizer stepped on gradients of:UserWarning")
def test_no_lock_is_taken_under_another_with_the_collector_at_each(
    master: Masters,
    life: Callable[..., None],
    num_workers: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # torch's own finaliser waits so long for a worker that waits for a lock of the thread that collects.
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)
    with checked_locks(collects=True) as watch, master(tmp_path / "state") as connect:
        service, dataset = service_of(connect("first"), tmp_path, max_bad_records=50)
        with service:
            life(service, dataset, num_workers)
    assert watch.acquisitions > 100
    assert "Session._lock" in watch.names
    assert_not_nested(watch)


def test_no_lock_is_taken_under_another_where_two_trainers_share_the_data(tmp_path: Path) -> None:
    """One holds records, by an iterator that is collected, while the other one waits for them."""
    for number, master in enumerate(MASTERS):
        folder = tmp_path / str(number)
        with checked_locks(collects=True), master(folder / "state") as connect:
            first, dataset = service_of(connect("first"), folder)
            second, others = service_of(connect("second"), folder)
            with first, second:
                leave_in_a_cycle(elastic(dataset), 1)
                assert second.progress().epoch == 0
                assert len(flat(take(iter(elastic(others)), 100))) == sum(COUNTS.values())


def collected_under(name: str, folder: Path, *, in_process: bool) -> Watch:
    """A life in which an iterator is collected where the lock is taken first after two batches."""
    master = FakeMaster()
    with checked_locks() as watch:
        service, dataset = service_of(master.connect(in_process=in_process), folder)
        with service:
            loader = elastic(dataset)
            abandoned = [iter(loader)]
            first, _ = take(abandoned[0], 2)

            def collect(acquired: str, held: tuple[str, ...]) -> None:
                if acquired == name and abandoned:
                    with watch.as_finaliser():
                        abandoned.clear()

            watch.on_acquired = collect
            service.progress()
            service.state_dict()
            service.report_batch_done()
            service.progress()
            collect(name, ())
            assert service.record_count == 0
            done = acknowledged(master, service)
            assert set(once(first)) <= set(done)
            rest = flat(batch for _ in range(3) for batch in take(iter(loader), 100))
            assert len(rest) + sum(done.values()) == 3 * sum(COUNTS.values())
            assert service.finished
    master.outcomes["training"].check_complete(3)
    return watch


@pytest.mark.parametrize("in_process", [True, False], ids=["embedded", "remote"])
def test_an_iterator_collected_under_any_lock_gives_its_records_back(
    in_process: bool, tmp_path: Path
) -> None:
    found = collected_under("none", tmp_path / "none", in_process=in_process).names
    assert "Session._lock" in found
    for name in sorted(found):
        collected_under(name, tmp_path / name, in_process=in_process)


def test_a_collection_under_the_sessions_lock_does_not_wait_for_the_thread_that_calls() -> None:
    """The schedule in which a finaliser that waits for the other thread waits for ever."""
    script = Path(__file__).with_name("collected_under_lock.py")
    environment = {**os.environ, "PYTHONPATH": str(script.parent.parent)}
    done = preloaded.run(
        [sys.executable, script], env=environment, timeout=120, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


# An iterator that is no more --------------------------------------------------------------------------


def test_records_of_a_lost_iterator_go_to_a_trainer_that_waits_for_them() -> None:
    """Though the one that held them asks for nothing."""
    fake = FakeMaster()
    with trainer(fake, {"a": 12}) as (first, dataset), trainer(fake, {"a": 12}) as (_, others):
        iterator = iter(elastic(dataset))
        take(iterator, 1)
        del iterator
        assert sorted(flat(take(iter(elastic(others)), 100))) == list(range(12))
        assert first.record_count == 0


def test_a_generator_over_an_epoch_that_is_collected_takes_no_lock(tmp_path: Path) -> None:
    with checked_locks() as watch:
        service, dataset = service_of(FakeMaster(), tmp_path)
        with service:
            batches = [elastic(dataset).through(0)]
            take(batches[0], 1)
            with watch.as_finaliser():
                batches.clear()
            assert service.record_count == 0


# What the checked locks see ---------------------------------------------------------------------------


def lock_of(watch: Watch, name: str, *, reentrant: bool = False) -> CheckedLock:
    return CheckedLock(watch, name, reentrant=reentrant)


def test_two_orders_are_a_fault_though_nobody_waits() -> None:
    watch = Watch()
    a, b, c = (lock_of(watch, name) for name in "abc")
    for first, then in ((a, b), (b, c), (c, a)):
        with first, then:
            pass
    with pytest.raises(LockOrderViolated, match="a → b → c → a"):
        watch.check()


def test_one_order_is_none() -> None:
    watch = Watch()
    a, b = lock_of(watch, "a", reentrant=True), lock_of(watch, "b")
    with a, b, a:
        pass
    with a, b:
        pass
    watch.check()


def test_a_lock_taken_twice_is_a_fault_where_it_would_wait_for_itself() -> None:
    watch = Watch()
    a = lock_of(watch, "a")
    with pytest.raises(LockOrderViolated, match="a is taken again"), a, a:
        pass


def test_waiting_for_a_condition_with_another_lock_held_is_a_fault() -> None:
    watch = Watch()
    condition = threading.Condition(lock_of(watch, "a", reentrant=True))  # type: ignore[arg-type]
    with lock_of(watch, "b"), condition:
        condition.wait(0.001)
    with pytest.raises(LockOrderViolated, match=r"a is awaited while the thread holds \('b',\)"):
        watch.check()


def test_a_lock_of_a_finaliser_is_a_fault() -> None:
    watch = Watch(collects=True)
    a = lock_of(watch, "a")

    class Careless:
        def __del__(self) -> None:
            with a:
                pass

    cycle: list[object] = [Careless()]
    cycle.append(cycle)
    del cycle
    with lock_of(watch, "b"):
        pass
    with pytest.raises(LockOrderViolated, match=r"a finaliser takes a while its thread holds \('b',\)"):
        watch.check()
