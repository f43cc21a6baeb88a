"""Whatever a trainer does, its locks are taken in one order, and the garbage collector may run at any time."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from checked_locks import LockOrderViolated, Watch, checked_locks
from loader_kit import NumberReader, elastic, take
from torch.utils.data import DataLoader

from edl_torch import DataShardService, LocalMaster, MasterClient, ShardedDataset
from edl_torch.client.port import MasterPort
from edl_torch.master.threaded import ThreadedMaster
from edl_torch.testing import FakeMaster

COUNTS = {"a": 40, "b": 30}
JOIN_S = 60.0

Connect: TypeAlias = Callable[[str], MasterPort]
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


def leave_in_a_cycle(loader: Any, batches: int) -> None:
    """Take some batches, and leave the iterator to the garbage collector, in a cycle of references."""
    cycle: list[Any] = [iter(loader)]
    cycle.append(cycle)
    take(cycle[0], batches)


def service_of(master: MasterPort, folder: Path, **arguments: Any) -> tuple[DataShardService, ShardedDataset]:
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


def peer(master: MasterPort, folder: Path, stop: threading.Event) -> None:
    """Another trainer of the same data: it asks for records that the first one holds."""
    service, dataset = service_of(master, folder)
    with service:
        loader = elastic(dataset)
        while not (stop.is_set() or service.finished):
            for _ in loader:
                if stop.is_set():
                    break


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("life", LIVES, ids=lambda life: life.__name__)
@pytest.mark.parametrize("master", MASTERS, ids=lambda master: master.__name__)
@pytest.mark.filterwarnings("ignore:a pass over|a plain DataLoader:UserWarning")
def test_locks_are_taken_in_one_order_with_the_collector_at_each(
    master: Masters, life: Callable[..., None], num_workers: int, tmp_path: Path
) -> None:
    with checked_locks(collects=True) as watch, master(tmp_path / "state") as connect:
        service, dataset = service_of(connect("first"), tmp_path, max_bad_records=50)
        with service:
            life(service, dataset, num_workers)
    assert watch.acquisitions > 100
    assert {"Book.lock", "LeaseSource._changed", "AuditLog._lock"} <= watch.names
