"""Reports of plain loops are bounded by what the loop was given: what exceeds it is refused."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
from loader_kit import NumberReader, acknowledged, all_records, numbers, once, take, trainer
from torch.utils.data import DataLoader, IterableDataset

from edl_torch import DataShardService, ShardedDataset
from edl_torch.errors import AccountingError, InvalidArgument
from edl_torch.testing import FakeMaster

COUNTS = {"a": 100}
SIZE = 10  # the service's


@pytest.fixture(autouse=True)
def _expected_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)
        warnings.filterwarnings("ignore", message="a pass over", category=UserWarning)
        yield


def told(fake: FakeMaster, service: DataShardService) -> set[int]:
    return {record for _, record in acknowledged(fake, service)}


# Another batch size than the service's --------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("batch_size", [5, 8, 12, 20, 60, None], ids=str)
def test_a_default_report_of_another_batch_size_is_refused_at_once(
    batch_size: int | None, num_workers: int
) -> None:
    fake = FakeMaster()
    with trainer(fake, COUNTS, batch_size=SIZE, records_per_shard=20) as (service, dataset):
        loop = iter(DataLoader(dataset, batch_size, num_workers=num_workers))
        next(loop)
        loaded = batch_size or 1
        with pytest.raises(
            InvalidArgument, match=rf"batch_size, 10 record.* batches have {loaded}: .*batch_size=…\)"
        ):
            service.report_batch_done()
        assert told(fake, service) == set()


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
@pytest.mark.parametrize("batch_size", [5, 8, 12, 60, None], ids=str)
def test_reports_of_each_batchs_size_are_right_for_any_batch_size(
    batch_size: int | None, num_workers: int, drop_last: bool
) -> None:
    fake = FakeMaster()
    with trainer(fake, COUNTS, batch_size=SIZE, records_per_shard=20) as (service, dataset):
        drops = {} if batch_size is None else {"drop_last": drop_last}
        trained: list[int] = []
        for batch in DataLoader(dataset, batch_size, num_workers=num_workers, **drops):
            trained += numbers(batch)
            service.report_batch_done(batch_size=len(numbers(batch)))
            if num_workers < 2:
                assert acknowledged(fake, service) == once(trained)
            assert told(fake, service) <= set(trained)
        if not drops.get("drop_last"):
            assert sorted(trained) == all_records(COUNTS)
            assert service.finished


# Reports that were made too often, or say too much --------------------------------------------------------


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_a_report_made_twice_for_one_batch_is_refused(num_workers: int, explicit: bool) -> None:
    fake = FakeMaster()
    size = SIZE if explicit else None
    with trainer(fake, COUNTS, batch_size=SIZE, records_per_shard=20) as (service, dataset):
        trained: list[int] = []
        for batch in DataLoader(dataset, SIZE, num_workers=num_workers):
            trained += numbers(batch)
            service.report_batch_done(size)
            with pytest.raises(
                AccountingError, match=r"reported as trained on, and .* delivered.*ElasticDataLoader"
            ):
                service.report_batch_done(size)
            assert told(fake, service) <= set(trained)
        assert service.finished  # what was refused changed nothing
    fake.outcomes["training"].check_complete(1)


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_a_report_of_more_records_than_were_delivered_is_refused_with_both_numbers(num_workers: int) -> None:
    fake = FakeMaster()
    with trainer(fake, COUNTS, batch_size=SIZE, records_per_shard=20) as (service, dataset):
        loop = iter(DataLoader(dataset, 12, num_workers=num_workers))
        next(loop)
        with pytest.raises(AccountingError, match=r"20 record\(s\) are reported .* of the 12 delivered"):
            service.report_batch_done(batch_size=20)
        assert told(fake, service) == set()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_remainder_that_drop_last_withholds_cannot_be_reported(num_workers: int) -> None:
    fake = FakeMaster()
    with trainer(fake, {"a": 25}, batch_size=SIZE, records_per_shard=20) as (service, dataset):
        for _ in DataLoader(dataset, SIZE, num_workers=num_workers, drop_last=True):
            service.report_batch_done()
        with pytest.raises(AccountingError, match=r"10 record.* of the 20 delivered in this pass 0"):
            service.report_batch_done()
        assert told(fake, service) == set(range(20))


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_reports_may_come_after_the_loop(num_workers: int) -> None:
    fake = FakeMaster()
    with trainer(fake, COUNTS, batch_size=SIZE, records_per_shard=20, num_epochs=2) as (service, dataset):
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


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_report_for_a_batch_of_the_pass_before_does_not_count_in_the_next_one(num_workers: int) -> None:
    fake = FakeMaster()
    with trainer(fake, COUNTS, batch_size=SIZE, records_per_shard=20) as (service, dataset):
        loader = DataLoader(dataset, SIZE, num_workers=num_workers, persistent_workers=num_workers > 0)
        take(iter(loader), 3)
        loop = iter(loader)
        trained = numbers(next(loop))
        service.report_batch_done()
        with pytest.raises(AccountingError, match="delivered in this pass"):
            service.report_batch_done()
        assert told(fake, service) <= set(trained)


# Without a DataLoader, or with something between ----------------------------------------------------------


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
    with trainer(fake, COUNTS, batch_size=SIZE, records_per_shard=20) as (service, dataset):
        trained: list[int] = []
        for pairs in DataLoader(Pairs(dataset), SIZE // 2, num_workers=num_workers):
            trained += chain.from_iterable(map(numbers, pairs))
            service.report_batch_done()
            assert acknowledged(fake, service) == once(trained)
        assert service.finished
    fake.outcomes["training"].check_complete(1)


class InPairs(ShardedDataset):
    """The same as a dataset of its own."""

    def __iter__(self) -> Iterator[Any]:
        records = super().__iter__()
        return zip(records, records, strict=True)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_dataset_of_the_users_own_may_too(num_workers: int) -> None:
    fake = FakeMaster()
    reader = NumberReader(COUNTS)
    with DataShardService(SIZE, fake.connect(), reader=reader, records_per_shard=20) as service:
        for _ in DataLoader(InPairs(service, reader), SIZE // 2, num_workers=num_workers):
            service.report_batch_done()
        assert service.finished
    fake.outcomes["training"].check_complete(1)


# Loops over shards ----------------------------------------------------------------------------------------


def test_more_than_was_fetched_cannot_be_reported() -> None:
    fake = FakeMaster()
    with trainer(fake, COUNTS, batch_size=SIZE, records_per_shard=25) as (service, _):
        service.fetch_shard()
        with pytest.raises(
            AccountingError, match=r"26 record\(s\) are reported .* of the 25 delivered .* 25 are"
        ):
            service.report_batch_done(26)
        for _ in range(3):
            service.report_batch_done()
        with pytest.raises(
            AccountingError, match=r"10 record\(s\) are reported .* pass 0 are not reported yet"
        ):
            service.report_batch_done()
        assert told(fake, service) == set(range(25))
