"""One pass is one epoch: iterators that live, that ended, and that were made too late."""

from __future__ import annotations

import gc
import warnings

import pytest
from loader_kit import all_records, elastic, flat, take, trainer

from edl_torch.errors import ConcurrentIteration, ServiceClosed
from edl_torch.testing import FakeMaster


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


def test_an_iterator_that_ended_stays_at_its_end() -> None:
    with trainer(FakeMaster(), num_epochs=2) as (_, dataset):
        loader = elastic(dataset)
        first = iter(loader)
        take(first, 100)
        second = iter(loader)
        assert take(first, 1) == []
        assert sorted(flat(take(second, 100))) == all_records()


def test_a_loader_over_a_finished_dataset_yields_nothing() -> None:
    fake = FakeMaster()
    with trainer(fake) as (service, dataset):
        take(iter(elastic(dataset)), 100)
        assert service.finished
        assert service.epoch == 1
        assert take(iter(elastic(dataset, num_workers=2)), 1) == []
    with trainer(fake) as (_, dataset):
        assert take(iter(elastic(dataset)), 1) == []


def test_endless_epochs() -> None:
    with trainer(FakeMaster(), {"a": 6}, num_epochs=0) as (service, dataset):
        loader = elastic(dataset)
        for epoch in range(5):
            assert service.epoch == epoch
            assert sorted(flat(take(iter(loader), 100))) == list(range(6))
        assert not service.finished


def test_without_a_barrier_one_pass_runs_through_all_epochs() -> None:
    fake = FakeMaster()
    with trainer(fake, num_epochs=3, epoch_barrier=False) as (service, dataset):
        records = flat(take(iter(elastic(dataset, num_workers=2)), 1000))
        assert sorted(records) == sorted(3 * all_records())
        assert service.finished
    fake.outcomes["training"].check_complete(3)


def test_a_closed_service_says_so() -> None:
    with trainer(FakeMaster()) as (service, dataset):
        loader = elastic(dataset)
    with pytest.raises(ServiceClosed, match="make a new one"):
        iter(loader)
    with pytest.raises(ServiceClosed):
        service.fetch_shard()
    service.close()


def test_more_workers_than_shards() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        with trainer(FakeMaster(), {"a": 3}) as (service, dataset):
            assert flat(take(iter(elastic(dataset, num_workers=3)), 10)) == [0, 1, 2]
            assert service.finished
