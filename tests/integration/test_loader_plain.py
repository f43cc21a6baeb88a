"""A plain `torch.utils.data.DataLoader`, and loops over `fetch_shard`: nothing is acknowledged early."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from loader_kit import (
    UNEVEN,
    acknowledged,
    all_records,
    elastic,
    flat,
    numbers,
    once,
    take,
    trainer,
)
from torch.utils.data import DataLoader

from edl_torch.errors import AccountingError, ConcurrentIteration, InvalidArgument
from edl_torch.testing import FakeMaster


@pytest.fixture(autouse=True)
def _many_workers_are_fine() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)
        yield


def full_size(batch: Any) -> dict[str, int]:
    return {}


def own_size(batch: Any) -> dict[str, int]:
    return {"batch_size": len(batch)}


@pytest.mark.parametrize("size", [full_size, own_size])
@pytest.mark.parametrize(("num_workers", "in_process"), [(0, True), (1, False), (2, True), (3, False)])
def test_nothing_is_acknowledged_early_and_all_at_the_end(
    num_workers: int, size: Callable[[Any], dict[str, int]], in_process: bool
) -> None:
    fake = FakeMaster()
    with trainer(fake, in_process=in_process, num_epochs=2) as (service, dataset):
        loader = DataLoader(dataset, 4, num_workers=num_workers)
        for epoch in range(2):
            trained: list[int] = []
            for batch in loader:
                trained += numbers(batch)
                service.report_batch_done(**size(batch))
                told = {record for e, record in acknowledged(fake, service) if e == epoch}
                assert told <= set(trained)
                if num_workers < 2:
                    assert told == set(trained)
            assert sorted(trained) == all_records()
            assert {record for e, record in acknowledged(fake, service) if e == epoch} == set(trained)
        assert service.finished
    fake.outcomes["training"].check_complete(2)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_persistent_workers_over_several_epochs(num_workers: int) -> None:
    fake = FakeMaster()
    with trainer(fake, num_epochs=3) as (service, dataset):
        loader = DataLoader(dataset, 4, num_workers=num_workers, persistent_workers=num_workers > 0)
        while not service.finished:
            for _ in loader:
                service.report_batch_done()
    fake.outcomes["training"].check_complete(3)


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_what_was_not_reported_is_read_again_after_a_warning(num_workers: int) -> None:
    fake = FakeMaster()
    with trainer(fake) as (service, dataset):
        first = take(iter(DataLoader(dataset, 4, num_workers=num_workers)), 100)
        assert sorted(flat(first)) == all_records()
        assert not acknowledged(fake, service)
        assert not service.finished
        with pytest.warns(UserWarning, match=r"39 record\(s\) that were not reported.*report_batch_done"):
            again = take(iter(elastic(dataset)), 100)
        assert sorted(flat(again)) == all_records()
        assert service.finished


def test_a_pass_broken_off_is_given_back_by_the_next_one() -> None:
    fake = FakeMaster()
    with trainer(fake) as (service, dataset), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="a pass over", category=UserWarning)
        done: list[int] = []
        for workers in (2, 1, 3, 0, 2):
            for number, batch in enumerate(DataLoader(dataset, 4, num_workers=workers)):
                if number == 2:
                    break
                done += numbers(batch)
                service.report_batch_done()
                assert {record for _, record in acknowledged(fake, service)} <= set(done)
        loader = DataLoader(dataset, 4, num_workers=2)
        while not service.finished:
            for batch in loader:
                done += numbers(batch)
                service.report_batch_done()
                assert {record for _, record in acknowledged(fake, service)} <= set(done)
    fake.outcomes["training"].check_complete(1)


def test_a_second_pass_with_more_workers_is_a_pass_of_its_own() -> None:
    fake = FakeMaster()
    with trainer(fake, num_epochs=4) as (service, dataset):
        for workers in (1, 2, 3, 0):
            trained = []
            for batch in DataLoader(dataset, 4, num_workers=workers):
                trained += numbers(batch)
                service.report_batch_done()
            assert sorted(trained) == all_records()
        assert service.finished


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


def test_explicit_sizes_may_cross_shards() -> None:
    fake = FakeMaster()
    with trainer(fake, {"a": 12}, batch_size=4, records_per_shard=4) as (service, _):
        assert [len(service.fetch_shard() or ()) for _ in range(3)] == [4, 4, 4]
        assert service.record_count == 12
        assert service.report_batch_done(3) is False
        assert service.report_batch_done(3) is True
        assert acknowledged(fake, service) == once(range(6))
        assert service.report_batch_done(6) is True
        assert service.finished


def test_a_batch_that_failed_goes_to_quarantine() -> None:
    fake = FakeMaster()
    with trainer(fake, {"a": 8}, batch_size=4, records_per_shard=4, max_bad_records=4) as (service, _):
        service.fetch_shard()
        assert service.report_batch_done(err_msg="NaN") is False
        service.fetch_shard()
        assert service.report_batch_done() is True
        assert service.finished
        assert service.progress().quarantined == 4
        assert {bad.reason for bad in service.progress().quarantine} == {"NaN"}


def test_with_several_workers_a_failed_batch_cannot_be_named() -> None:
    with trainer(FakeMaster()) as (service, dataset):
        loop = iter(DataLoader(dataset, 4, num_workers=2))
        take(loop, 2)  # the second is the other worker's
        with pytest.raises(InvalidArgument, match="use ElasticDataLoader"):
            service.report_batch_done(err_msg="NaN")


def test_with_several_workers_sizes_are_given_always_or_never() -> None:
    with trainer(FakeMaster(), in_process=False) as (service, dataset):
        loop = iter(DataLoader(dataset, 4, num_workers=2))
        take(loop, 2)
        service.report_batch_done()
        with pytest.raises(InvalidArgument, match="always or never"):
            service.report_batch_done(4)


def test_a_token_of_a_plain_loop_with_workers_is_not_exact_and_says_so() -> None:
    with trainer(FakeMaster()) as (service, dataset):
        take(iter(DataLoader(dataset, 4, num_workers=2)), 12)
        with pytest.warns(UserWarning, match="use ElasticDataLoader"):
            service.state_dict()


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


def test_a_dataset_serves_a_plain_loader_after_an_elastic_one() -> None:
    fake = FakeMaster()
    with trainer(fake, num_epochs=2) as (service, dataset):
        take(iter(elastic(dataset)), 100)
        for _ in DataLoader(dataset, 4):
            service.report_batch_done()
        assert service.finished
    fake.outcomes["training"].check_complete(2)


@pytest.mark.parametrize("seed", range(4))
def test_reports_late_and_in_bursts_stay_exact_for_one_worker(seed: int) -> None:
    rng = random.Random(seed)
    fake = FakeMaster()
    with trainer(fake, in_process=False) as (service, dataset):
        waiting: list[list[int]] = []
        done: list[int] = []
        for batch in DataLoader(dataset, 4, num_workers=1):
            waiting.append(numbers(batch))
            for _ in range(rng.randrange(len(waiting) + 1)):
                done += waiting.pop(0)
                service.report_batch_done()
            assert acknowledged(fake, service) == once(done)
        for _ in waiting:
            service.report_batch_done()
        assert service.finished


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


def test_looking_into_a_plain_loader_is_no_silent_pass() -> None:
    fake = FakeMaster()
    with trainer(fake) as (service, dataset), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="a pass over", category=UserWarning)
        loader = DataLoader(dataset, 4)
        for _ in range(5):
            next(iter(loader))
        for _ in loader:
            service.report_batch_done()
        assert service.finished
