"""By which way a dataset asks for leases: in its trainer's process, in a loader worker, in another child."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
from loader_kit import trainer

from edl_torch.client.workers.links import DirectLink
from edl_torch.data import dataset as module
from edl_torch.data.dataset import IterationSetup
from edl_torch.data.reading.threaded_reading import Threading
from edl_torch.errors import ServiceClosed
from edl_torch.testing import FakeMaster


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was made to reach the trainer from another process."""
    calls: list[Any] = []
    monkeypatch.setattr(module, "SocketLink", lambda handle, stream, run: calls.append((stream, run)))
    monkeypatch.setattr(module, "end_with_parent", lambda: calls.append("ends with its parent"))
    monkeypatch.setattr(module, "tell_what_ends_worker", lambda link: None)
    monkeypatch.setattr(module.iterations, "_served", "12:3")
    return calls


def test_in_its_trainers_process_it_asks_directly(told: list[Any]) -> None:
    with trainer(FakeMaster()) as (_, dataset):
        assert isinstance(dataset._connect(), DirectLink)
    assert told == []


def test_a_loader_worker_serves_an_iteration_and_ends_with_its_trainer(
    told: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with trainer(FakeMaster()) as (_, dataset):
        monkeypatch.setattr(module, "get_worker_info", lambda: SimpleNamespace(id=2))
        assert dataset._connect() is dataset._connect()
    assert told == ["ends with its parent", ("worker 2", "12:3")]


def test_what_reading_imports_is_imported_before_workers_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[Any] = []
    monkeypatch.setattr(module, "import_for_reading", imported.append)
    with trainer(FakeMaster()) as (_, dataset):
        assert imported == [dataset.reader]


def test_another_child_serves_none(told: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with trainer(FakeMaster()) as (_, dataset):
        for pid in (7, 7, 8):
            with monkeypatch.context() as child:
                child.setattr(os, "getpid", lambda pid=pid: pid)
                dataset._connect()
    assert told == [("process 7", ""), ("process 8", "")]


def test_what_is_wrong_is_raised_at_once_where_the_loop_is_and_as_it_reads_in_a_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch brings the trainer what a worker raises as it reads."""

    def fails() -> Any:
        raise ServiceClosed("gone")

    with trainer(FakeMaster()) as (_, dataset):
        monkeypatch.setattr(dataset, "_begin", fails)
        with pytest.raises(ServiceClosed, match="gone"):
            iter(dataset)
        monkeypatch.setattr(module, "get_worker_info", lambda: SimpleNamespace(id=2))
        records = iter(dataset)
        with pytest.raises(ServiceClosed, match="gone"):
            next(records)


@pytest.mark.parametrize("list_size", [0, 4])
def test_an_iteration_begins_with_nothing_counted_and_nothing_timed(list_size: int) -> None:
    with trainer(FakeMaster()) as (_, dataset):
        setup = IterationSetup(columnar=False, list_size=list_size)
        setup.tally.start(7, 0)[2] = 3
        setup.times.begin()
        dataset.bind(setup)
        iter(dataset)
        assert setup.tally.take() == IterationSetup(columnar=False, list_size=0).tally.take()
        assert not setup.times.timing


def test_an_iteration_ends_the_threads_of_the_one_before() -> None:
    """A persistent loader worker begins anew, and nobody tells it that the pass before is over."""
    threading = Threading(threads=1, ahead=1, batch_size=4, collate=None)
    with trainer(FakeMaster()) as (_, dataset):
        dataset.bind(IterationSetup(columnar=False, list_size=4, threading=threading))
        first_batches = iter(dataset)
        first = dataset._reading()
        assert "alive=1" in repr(first)
        second_batches = iter(dataset)
        assert "alive=0" in repr(first)
        second = dataset._reading()
        assert "alive=1" in repr(second)
        assert first_batches is not second_batches
        dataset.end_reading()
        assert "alive=0" in repr(second)
