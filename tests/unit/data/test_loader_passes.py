"""One pass is one epoch: iterators that live, that ended, and that were made too late."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
from loader_kit import all_records, elastic, flat, take, trainer

from edl_torch import ElasticDataLoader
from edl_torch.data.loop.loader_pass import in_own_words
from edl_torch.errors import (
    BadRecord,
    ConcurrentIteration,
    EdlError,
    LoaderWorkerDied,
    MasterUnavailable,
    ServiceClosed,
)
from edl_torch.testing import FakeMaster, wait_until
from edl_torch.trainer.vocabulary import Procedure


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("same_loader", [True, False])
def test_iterating_again_ends_the_older_iterator_and_takes_over_what_it_had_not_finished(
    same_loader: bool, num_workers: int
) -> None:
    with trainer(FakeMaster()) as (service, dataset):
        loader = elastic(dataset, num_workers=num_workers)
        first = iter(loader)
        done, in_hand = take(first, 2)
        second = iter(loader if same_loader else elastic(dataset, num_workers=num_workers))
        seen = [done, *take(second, 100)]
        assert sorted(flat(seen)) == all_records()
        assert set(in_hand) <= set(flat(seen[1:]))
        with pytest.raises(ConcurrentIteration, match="iterated anew, which has ended this older iterator"):
            next(first)
        assert take(first, 1) == []
        assert service.finished


def test_iterating_again_ends_the_loader_workers_of_an_older_iterator_that_is_kept() -> None:
    """As the program exits they would be killed, and torch would raise that in the trainer."""
    with trainer(FakeMaster()) as (_, dataset):
        loader = elastic(dataset, num_workers=1)
        older = iter(loader)
        take(older, 1)
        before = set(multiprocessing.active_children())
        newer = iter(loader)
        take(newer, 1)
        assert before
        assert not before & set(multiprocessing.active_children())
        with pytest.raises(ConcurrentIteration):
            next(older)
        take(newer, 100)


def test_an_older_iterator_that_is_dropped_later_takes_nothing_from_the_newer_one() -> None:
    with trainer(FakeMaster()) as (_, dataset):
        loader = elastic(dataset)
        first = iter(loader)
        done = take(first, 2)[:1]
        second = iter(loader)
        seen = done + take(second, 3)
        del first
        gc.collect()
        seen += take(second, 100)
        assert sorted(flat(seen)) == all_records()


def retried(batch: list[int]) -> list[int]:
    """The first attempt fails, and the second remembers why: an error that names the frame which has it."""
    failed: Exception | None = None
    while True:
        try:
            if failed is None:
                raise TimeoutError
            return batch
        except TimeoutError as error:
            failed = error


@pytest.mark.parametrize("plain", [False, True], ids=["same loader", "plain read"])
def test_a_loop_that_was_left_can_be_begun_again_though_garbage_still_holds_its_iterator(plain: bool) -> None:
    with trainer(FakeMaster()) as (_, dataset):
        loader = elastic(dataset, collate_fn=retried)
        gc.disable()
        try:
            for _batch in loader:
                break
            assert next(iter(dataset if plain else loader)) is not None
        finally:
            gc.enable()


def test_a_loop_whose_service_is_closed_is_told_once() -> None:
    with trainer(FakeMaster()) as (service, dataset):
        batches = iter(elastic(dataset))
        next(batches)
        service.close()
        with pytest.raises(ServiceClosed, match="was closed while its loader was being iterated"):
            next(batches)
        assert list(batches) == []


def test_an_iterator_is_none_of_a_forked_childs() -> None:
    with trainer(FakeMaster()) as (_, dataset):
        batches = iter(elastic(dataset))
        next(batches)
        batches._pid -= 1  # as a child finds it
        with pytest.raises(ServiceClosed, match="belongs to the process that this one was forked from"):
            next(batches)
        batches._pid += 1
        assert len(next(batches)) == 4


def test_a_loop_that_is_left_ends_the_threads_that_read() -> None:
    with trainer(FakeMaster()) as (_, dataset):
        loader = elastic(dataset, num_threads=2)
        batches = iter(loader)
        next(batches)
        assert any(thread.name.startswith("edl-read") for thread in threading.enumerate())
        loader.close()
        assert not any(thread.name.startswith("edl-read") for thread in threading.enumerate())


@pytest.mark.parametrize(("arguments", "ahead"), [({}, 2), ({"prefetch_factor": 3}, 3)])
def test_threads_are_two_batches_ahead_unless_told_otherwise(arguments: Any, ahead: int) -> None:
    read: list[int] = []

    def transform(number: int) -> int:
        read.append(number)
        return number

    with trainer(FakeMaster(), dataset={"transform": transform}) as (_, dataset):
        batches = iter(elastic(dataset, num_threads=2, **arguments))
        next(batches)
        wait_until(lambda: len(read) >= 4 * (1 + ahead))
        batches.close()  # whatever a thread has begun is read to its end
        assert len(read) == 4 * (1 + ahead)


class Own(EdlError):
    """An error of ours."""


DIED = r"^DataLoader worker died as it sent a batch\. It held no record; "


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (
            RuntimeError("DataLoader worker (pid 7) is gone. "),
            LoaderWorkerDied,
            r"^DataLoader.*7\) is gone\. It",
        ),
        (ConnectionResetError("peer"), LoaderWorkerDied, DIED),
        (EOFError("peer"), LoaderWorkerDied, DIED),
        (EOFError("Caught it in DataLoader worker process 0."), EOFError, "Caught it"),
        (MasterUnavailable("no answer"), MasterUnavailable, "no answer"),
    ],
    ids=repr,
)
def test_a_worker_that_dies_is_named_as_one_and_another_error_is_not(
    error: Exception, kind: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: object) -> None:
        raise error

    with trainer(FakeMaster()) as (service, dataset):
        monkeypatch.setattr(service.session.trainer, "broken_streams", nobody_broke)
        batches = iter(elastic(dataset))
        next(batches)
        batches._inner = map(fails, [0])
        with pytest.raises(kind, match=said):
            next(batches)


def nobody_broke(timeout_s: float) -> Procedure[dict[str, str]]:
    return {}
    yield


def test_an_iterator_that_was_closed_is_over_whoever_iterates_anew() -> None:
    with trainer(FakeMaster()) as (_, dataset):
        loader = elastic(dataset)
        older, newest = iter(loader), iter(loader)
        older.close()
        assert list(older) == []
        assert next(newest) is not None
        left = iter(loader)
        next(left)
        iter(elastic(dataset))
        with pytest.raises(ConcurrentIteration):
            next(left)
        assert left._inner is None, "nothing keeps what it has read"


def test_persistent_workers_are_those_of_the_pass_before_though_that_was_left() -> None:
    with ElasticDataLoader(
        range(8), 4, num_epochs=2, num_workers=1, persistent_workers=True, multiprocessing_context="fork"
    ) as loader:
        workers = []
        for batches in (1, 100, 100):
            read = iter(loader)
            assert len(take(read, batches)) == min(batches, 2)
            assert loader._inner._working is not None
            workers.append([worker.pid for worker in loader._inner._working()._workers])
            read.close()
    assert workers == [workers[0]] * 3


def fails(number: int) -> int:
    raise ValueError("no")


def test_workers_end_with_their_pass_though_an_error_keeps_their_iterator(
    own_children: Callable[[], list[BaseProcess]],
) -> None:
    with trainer(FakeMaster(), dataset={"transform": fails}) as (_, dataset):
        with pytest.raises(BadRecord, match="no") as raised:
            list(elastic(dataset, num_workers=1))
        assert not own_children()
        del raised


def test_an_error_that_a_worker_raised_is_said_in_its_own_words() -> None:
    text = f"Caught Own in DataLoader worker process 0.\nTraceback:\n  …\n{__name__}.Own: no such  \n"
    own = in_own_words(Own(text))
    assert type(own) is Own
    assert str(own) == "no such"
    for other in (Own("no such"), Own(f"\n{__name__}.Own: no such"), Own("Caught it"), ValueError(text)):
        assert in_own_words(other) is None


def end_at_seven(number: int) -> int:
    if number == 7:
        os._exit(3)
    return number


@pytest.mark.parametrize("persistent", [False, True])
def test_a_worker_that_dies_names_its_records_and_they_are_read_again(
    persistent: bool, own_children: Callable[[], list[BaseProcess]]
) -> None:
    fake = FakeMaster()
    with trainer(fake, {"a": 12}, dataset={"transform": end_at_seven}) as (service, dataset):
        loader = elastic(dataset, num_workers=2, persistent_workers=persistent)
        with pytest.raises(LoaderWorkerDied, match=r"worker \d was at .*a.*Nothing was put") as raised:
            list(loader)
        assert not own_children(), "torch would wait for the dead one in each pass to come"
        del raised
        dataset.transform = None
        assert 7 in flat(take(iter(loader), 100))
        assert service.finished
    fake.outcomes["training"].check_complete(1)


def test_gradients_are_forgotten_where_the_data_went_back() -> None:
    restarted: list[bool] = []
    with trainer(FakeMaster()) as (service, dataset):
        loader = elastic(dataset)
        loader._weights.restart = lambda: restarted.append(True)  # type: ignore[method-assign]
        beginning = service.state_dict()
        iter(loader)
        iter(loader)
        assert len(restarted) == 1
        loader.load_state_dict(beginning)
        iter(loader)
        assert len(restarted) == 2


def test_a_loader_that_is_closed_looks_for_no_notice_any_more() -> None:
    with trainer(FakeMaster()) as (_, dataset):
        loader = elastic(dataset)
        assert not loader.preempted
        assert loader.notice._listens
        loader.close()
        assert not loader.notice._listens
