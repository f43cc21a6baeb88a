"""Which iteration of a plain DataLoader is meant, whether it is over, and what it has delivered."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from edl_torch.data.reading.iterations import (
    Iteration,
    Iterations,
    _asked_by,
    _persistent_loader,
    _yields_records,
)


class Numbers(IterableDataset[int]):
    """Ten numbers; asks `table` which iteration begins, as a ShardedDataset does."""

    makes_lists = True

    def __init__(self, table: Iterations) -> None:
        super().__init__()
        self._table = table
        self.begun: list[Iteration | None] = []

    def __iter__(self) -> Iterator[int]:
        self.begun.append(self._table.beginning())
        assert self._table.beginning() is self.begun[-1], "asked again it is the same one"
        return iter(range(10))


class Wrapped(Numbers):
    """What it yields need not be records."""

    makes_lists = False


def begun(table: Iterations, dataset: Numbers | None = None, **arguments: Any) -> tuple[Any, Iteration]:
    """An iterator of a DataLoader, and what is known of it."""
    dataset = Numbers(table) if dataset is None else dataset
    iterator = iter(DataLoader(dataset, **{"batch_size": 4, **arguments}))
    iteration = dataset.begun[-1]
    assert iteration is not None
    return iterator, iteration


def test_iterations_are_numbered_in_the_order_in_which_they_begin() -> None:
    table = Iterations()
    assert table.newest == 0
    dataset = Numbers(table)
    first, second = begun(table, dataset), begun(table, dataset)
    assert [iteration.number for _, iteration in (first, second)] == [1, 2]
    assert table.newest == 2
    assert table.number(first[1].run) == 1
    assert repr(table) == "<Iterations newest=2 alive=2>"


def test_an_iteration_of_another_process_has_no_number() -> None:
    table = Iterations()
    for run in ("", f"{os.getpid() + 1}:3", str(os.getpid()), f"{os.getpid()}:"):
        assert table.number(run) == 0
        assert not table.is_over(run), "nobody here can know"
        assert table.deliveries(run) is None
        table.check(run)
        table.worker_died(run)


def test_it_counts_the_batches_that_were_handed_out() -> None:
    table = Iterations()
    iterator, iteration = begun(table)
    assert (iteration.batches, iteration.batch_size) == (0, 4)
    next(iterator)
    assert iteration.batches == 1
    assert table.deliveries(iteration.run) is iteration
    assert repr(iteration) == f"<Iteration {os.getpid()}:1 batches=1 going on>"


def test_an_iterator_that_is_being_made_has_delivered_nothing() -> None:
    """torch begins to count last."""
    table = Iterations()
    begun: list[Iteration | None] = []

    class Asking:
        def __iter__(self) -> Iterator[list[int]]:
            begun.append(table.beginning())
            assert begun[0] is not None
            assert begun[0].batches == 0
            return iter([[0], [1]])

    iterator = iter(DataLoader(["a", "b"], batch_sampler=Asking()))  # type: ignore[arg-type]
    next(iterator)
    assert begun[0] is not None
    assert begun[0].batches == 1


def test_an_iterator_that_is_gone_is_over_and_its_count_is_remembered() -> None:
    table = Iterations()
    iterator, iteration = begun(table)
    next(iterator)
    assert not table.is_over(iteration.run)
    del iterator
    gc.collect()
    assert table.is_over(iteration.run)
    assert iteration.batches == 1
    assert iteration._state == {"_num_yielded": 1}, "nothing that its queues held is kept"
    assert repr(iteration).endswith("batches=1 over>")
    run = iteration.run
    del iteration
    gc.collect()
    assert table.is_over(run), "though nothing is known of it any more"


@pytest.mark.parametrize(("drop_last", "least"), [(False, 6), (True, 8)])
def test_where_the_last_batch_is_dropped_none_may_be_short(drop_last: bool, least: int) -> None:
    iterator, iteration = begun(Iterations(), drop_last=drop_last)
    next(iterator), next(iterator)
    streams = [SimpleNamespace(granted=granted, ended=True) for granted in (6, 4)]
    assert iteration.records(streams) == (least, 8)


class OwnIterator(_SingleProcessDataLoaderIter):
    """Makes batches in a way of its own."""


class OwnLoader(DataLoader[int]):
    def _get_iterator(self) -> Any:
        return OwnIterator(self)


def test_what_an_iterator_of_another_make_delivers_cannot_be_seen() -> None:
    table = Iterations()
    dataset = Numbers(table)
    iterator = iter(OwnLoader(dataset, batch_size=4))
    (iteration,) = dataset.begun
    assert iteration is not None
    assert (iteration.batch_size, iteration.counts_records) == (0, False)
    assert table.deliveries(iteration.run) is None
    del iterator


def test_samples_of_a_dataset_between_are_no_records() -> None:
    table = Iterations()
    iterator, iteration = begun(table, Wrapped(table))
    assert not iteration.counts_records
    assert not _yields_records(object())
    assert table.deliveries(iteration.run) is None
    assert not table.is_over(iteration.run)
    del iterator


def test_outside_of_an_iterator_none_begins() -> None:
    table = Iterations()
    assert table.beginning() is None
    assert table.beginning_run == ""
    assert _asked_by(None) == ""
    assert _persistent_loader(None) is None


def test_a_forked_worker_serves_the_iteration_that_starts_it() -> None:
    table = Iterations()

    class Forks(Numbers):
        def __iter__(self) -> Iterator[int]:
            table.before_fork()
            return super().__iter__()

    assert table.served == ""
    _, iteration = begun(table, Forks(table))
    assert table.served == "", "the process that forks serves none"
    table.after_fork()
    assert table.served == iteration.run


def test_a_process_forked_for_something_else_serves_none() -> None:
    table = Iterations()
    table.before_fork()
    table.after_fork()
    assert table.served == ""
    other = Iterations()
    other.after_fork()  # another thread has forked
    assert other.served == ""


def test_a_spawned_worker_serves_the_iteration_that_its_dataset_came_with() -> None:
    table = Iterations()
    table.unpickled("12:3")
    table.unpickled("")
    assert table.served == "12:3"


def test_a_loader_whose_persistent_worker_died_starts_new_ones() -> None:
    class Loader:
        _iterator: object = None

    table = Iterations()
    iterator, iteration = begun(table)
    loader = Loader()
    iteration._loader = lambda: loader  # type: ignore[assignment]
    loader._iterator = another = object()
    table.worker_died(iteration.run)
    assert loader._iterator is another, "that of a later iteration is left alone"
    loader._iterator = iterator
    table.worker_died(iteration.run)
    assert loader._iterator is None
    iteration._loader = lambda: None
    table.worker_died(iteration.run)


class Looks(DataLoader[int]):
    """Notes which loader an iterator that is made here belongs to."""

    found: Any = None

    def _get_iterator(self) -> Any:
        def starts_a_worker() -> Any:
            return _persistent_loader(sys._getframe())

        self.found = starts_a_worker()
        return iter(())


@pytest.mark.parametrize("persistent", [True, False])
def test_a_loader_that_keeps_its_workers_is_known(persistent: bool) -> None:
    loader = Looks(Numbers(Iterations()), num_workers=1, persistent_workers=persistent)
    iter(loader)
    assert loader.found is (loader if persistent else None)
