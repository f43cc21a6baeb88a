"""Records that cannot be read are named; in quarantine they cost no other record its outcome."""

from __future__ import annotations

import os
import signal
import sys
from asyncio import CancelledError
from collections.abc import Iterator
from itertools import product
from typing import Any, TypeVar

import pytest
from cases import cases
from loader_kit import (
    UNEVEN,
    LookingColumnReader,
    NumberReader,
    PickingReader,
    SafeReader,
    acknowledged,
    all_records,
    elastic,
    flat,
    numbers,
    once,
    quarantined,
    run_through,
    take,
    trainer,
)
from torch.utils.data import DataLoader, get_worker_info

from edl_torch import DataShardService, ShardedDataset
from edl_torch.core.calls import Request, StatusCall
from edl_torch.errors import AccountingError, BadRecord, LoaderWorkerDied, TooManyBadRecords, Unsupported
from edl_torch.testing import FakeMaster

A = TypeVar("A")

FIRST_SHARD = range(6)


class Torn(NumberReader):
    """Raises at some records."""

    def __init__(self, bad: set[int], counts: Any = UNEVEN) -> None:
        super().__init__(counts)
        self.bad = bad

    def number(self, name: str, index: int) -> int:
        number = super().number(name, index)
        if number in self.bad:
            raise OSError(f"no byte of {number}")
        return number


class TornPicking(Torn, PickingReader):
    """With random access."""


class TornSafe(Torn, SafeReader):
    """With random access by several threads."""


class TornColumns(Torn, LookingColumnReader):
    """With columnar reads."""


BAD = [{0}, {5}, {2, 3}, set(FIRST_SHARD), {0, 5, 6, 20, 1004, 2000, 2012}, {1000, 1001, 1002, 1003, 1004}]


READING: list[tuple[Any, dict[str, Any], bool]] = [
    (Torn, {}, True),
    (TornPicking, {}, True),
    (TornColumns, {"batch_size": None}, True),
    (TornSafe, {"num_threads": 2}, True),
    (TornPicking, {"num_workers": 2}, False),
    (TornSafe, {"num_workers": 1, "num_threads": 2}, False),
]


@cases(
    "reading, bad",
    [*product(READING[:4], BAD), *product(READING[4:], BAD[2:5:2])],  # workers are dear
    product(READING, BAD),
    ids=str,
)
def test_quarantine_goes_on_and_every_record_has_one_outcome(
    reading: tuple[Any, dict[str, Any], bool], bad: set[int]
) -> None:
    reader, options, in_process = reading
    fake = FakeMaster()
    dataset_arguments = {"on_bad_record": "quarantine", "shuffle": issubclass(reader, TornPicking | TornSafe)}
    arguments = {"max_bad_records": 10, "in_process": in_process, "dataset": dataset_arguments}
    with trainer(fake, reader(bad), **arguments) as (service, dataset):
        loader = elastic(dataset, **options)
        seen = take(iter(loader), 2)
        assert acknowledged(fake, service) == once(flat(seen[:1]))
        seen = seen[:1] + take(iter(loader), 100)
        assert sorted(flat(seen)) == [r for r in all_records() if r not in bad]
        assert quarantined(fake, service) == once(bad)
        assert service.finished
        for record in service.progress().quarantine:
            assert f"record {record.index} of {record.name!r}: OSError: no byte of" in record.reason
    fake.outcomes["training"].check_complete(1)


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "quarantine" in record.message]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_log_names_ten_bad_records_once_and_counts_the_others(
    num_workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    reader = Torn(set(range(7, 30)), {"a": 40})
    arguments = {"dataset": {"on_bad_record": "quarantine"}, "max_bad_records": 30, "num_epochs": 2}
    with trainer(FakeMaster(), reader, **arguments) as (_service, dataset):
        loader = elastic(dataset, num_workers=num_workers)
        for _ in loader.epochs():
            for _batch in loader:
                pass
        assert {(bad.name, bad.index) for bad in loader.quarantined()} == {("a", n) for n in range(7, 30)}
        assert len(loader.quarantined()) == 23, "once each, though two epochs met them"
        assert " quarantined=46 " in repr(loader.progress())
        assert all("OSError: no byte of" in bad.reason for bad in loader.quarantined())
    *named, tenth, twenty, last = logged(caplog)
    assert len({*named, tenth}) == 10
    if not num_workers:
        lines = [f"record {n} of 'a': OSError: no byte of {n}" for n in range(7, 17)]
        said = [line.removeprefix("dataset training: in quarantine: ") for line in (*named, tenth)]
        assert [line.partition(";")[0] for line in said] == lines
    assert tenth.endswith("; others are counted here, and listed by loader.quarantined()")
    assert (twenty, last) == (
        "dataset training: 20 records in quarantine",
        "dataset training: 23 records in quarantine",
    )


def test_a_batch_that_cannot_be_trained_on_is_named_too(caplog: pytest.LogCaptureFixture) -> None:
    with trainer(FakeMaster(), max_bad_records=4) as (service, dataset):
        iterator = iter(loader := elastic(dataset))
        batch = next(iterator)
        service.report_batch_done(err_msg="NaN")
        assert [bad.index for bad in loader.quarantined()] == numbers(batch)
    assert logged(caplog) == [f"dataset training: in quarantine: record {n} of 'a': NaN" for n in range(4)]


class WithoutStatus(FakeMaster):
    """As ElasticDL's masters, which tell a trainer of its dataset alone."""

    def call(self, request: Request[A], wait_s: float = 0.0) -> A:
        if request == StatusCall():
            raise Unsupported("there is no status to read")
        return super().call(request, wait_s)


def test_a_short_quarantine_is_listed_without_the_masters_whole_status() -> None:
    reader = Torn({1, 2})
    with DataShardService(4, WithoutStatus(), reader=reader, max_bad_records=9) as service:
        loader = elastic(ShardedDataset(service, reader, on_bad_record="quarantine"))
        take(iter(loader), 100)
        assert [bad.index for bad in loader.quarantined()] == [1, 2]


def test_what_is_in_quarantine_can_be_listed_when_the_job_has_failed() -> None:
    arguments = {"dataset": {"on_bad_record": "quarantine"}, "max_bad_records": 1}
    with trainer(FakeMaster(), Torn({1, 2, 9}), **arguments) as (_service, dataset):
        loader = elastic(dataset)
        with pytest.raises(TooManyBadRecords, match=r"2 bad record\(s\), max_bad_records is 1"):
            take(iter(loader), 100)
        assert [bad.index for bad in loader.quarantined()] == [1, 2]


@pytest.mark.parametrize("order", ["stored", "shuffled", "picked", "picked by threads"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_raising_reader_names_the_record_and_nothing_is_lost(order: str, num_workers: int) -> None:
    fake = FakeMaster()
    reader = {"picked": TornPicking, "picked by threads": TornSafe}.get(order, Torn)({2003})
    with trainer(fake, reader, dataset={"shuffle": order != "stored"}) as (service, dataset):
        threads = {"num_threads": 3} if order == "picked by threads" else {}
        loader = elastic(dataset, num_workers=num_workers, **threads)
        seen: list[list[int]] = []
        with pytest.raises(BadRecord, match=r"^record 3 of 'c': OSError: no byte of 2003$") as raised:
            run_through(loader, seen)
        if num_workers:  # the worker's traceback is not lost, but it is not the message
            assert "Original Traceback" in str(raised.value.__cause__)
        assert acknowledged(fake, service) == once(flat(seen))
        assert service.record_count == 0
        reader.bad.clear()
        rest = take(iter(loader), 100)
        assert sorted(flat(seen + rest)) == all_records()
    fake.outcomes["training"].check_complete(1)


def refuse_seven(number: int) -> int:
    if number == 7:
        raise ValueError("seven")
    return number


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_raising_transform_is_a_bad_record_too(num_workers: int) -> None:
    fake = FakeMaster()
    arguments = {"transform": refuse_seven, "on_bad_record": "quarantine", "seed_transforms": True}
    with trainer(fake, dataset=arguments, max_bad_records=1) as (service, dataset):
        records = flat(take(iter(elastic(dataset, num_workers=num_workers)), 100))
        assert sorted(records) == [r for r in all_records() if r != 7]
        assert quarantined(fake, service) == once([7])
        assert service.finished


def stop_at_seven(number: int) -> int:
    if number == 7:
        raise StopIteration
    return number


def test_a_transform_that_raises_stop_iteration_ends_nothing_silently() -> None:
    with (
        trainer(FakeMaster(), dataset={"transform": stop_at_seven}) as (_, dataset),
        pytest.raises(BadRecord, match=r"record 7 of 'a'"),
    ):
        take(iter(elastic(dataset)), 100)


def refuse_batch(samples: list[int]) -> list[int]:
    if 7 in samples:
        raise ValueError("a batch with a seven")
    return samples


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_raising_collate_ends_the_loop_and_its_records_go_back(num_workers: int) -> None:
    fake = FakeMaster()
    with trainer(fake) as (service, dataset):
        seen: list[list[int]] = []
        with pytest.raises(ValueError, match="a batch with a seven"):
            run_through(elastic(dataset, num_workers=num_workers, collate_fn=refuse_batch), seen)
        assert acknowledged(fake, service) == once(flat(seen))
        rest = take(iter(elastic(dataset)), 100)
        assert sorted(flat(seen + rest)) == all_records()


def test_a_dataset_that_drops_samples_by_itself_is_an_accounting_error() -> None:
    class Filtering(ShardedDataset):
        def __iter__(self) -> Iterator[Any]:
            return (sample for sample in super().__iter__() if sample != 2)

    reader = NumberReader(UNEVEN)
    with (
        DataShardService(4, FakeMaster(), reader=reader) as service,
        pytest.raises(AccountingError, match="4 samples was drawn from 5 positions"),
    ):
        take(iter(elastic(Filtering(service, reader))), 2)


class OneByOne(ShardedDataset):
    """A user's dataset that does something to each sample."""

    def __iter__(self) -> Iterator[Any]:
        return (sample + 0 for sample in super().__iter__())


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_quarantine_under_an_iteration_of_the_users_own_is_exact(bad: set[int]) -> None:
    fake = FakeMaster()
    reader = Torn(bad)
    with DataShardService(
        4, fake.connect(), reader=reader, records_per_shard=6, max_bad_records=10
    ) as service:
        loader = elastic(OneByOne(service, reader, on_bad_record="quarantine"))
        seen = take(iter(loader), 2)
        assert acknowledged(fake, service) == once(flat(seen[:1]))
        seen = seen[:1] + take(iter(loader), 100)
        assert sorted(flat(seen)) == [r for r in all_records() if r not in bad]
        assert quarantined(fake, service) == once(bad)
        assert service.finished
    fake.outcomes["training"].check_complete(1)


# Workers that die -------------------------------------------------------------------------------------------


def die_at_seven(number: int) -> int:
    if number == 7 and get_worker_info() is not None:
        os._exit(3)
    return number


def be_killed_at_seven(number: int) -> int:
    if number == 7 and get_worker_info() is not None:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def exit_at_seven(number: int) -> int:
    if number == 7 and get_worker_info() is not None:
        sys.exit(3)
    return number


def be_cancelled_at_seven(number: int) -> int:
    if number == 7 and get_worker_info() is not None:
        raise CancelledError
    return number


@pytest.mark.parametrize("in_process", [True, False], ids=["embedded", "remote"])
@pytest.mark.parametrize(
    ("transform", "why"),
    [
        (die_at_seven, ""),
        (be_killed_at_seven, ""),
        (exit_at_seven, r" as SystemExit\(3\) ended it"),
        (be_cancelled_at_seven, r" as CancelledError\(\) ended it"),
    ],
)
def test_a_loader_worker_that_dies_names_what_it_was_at(
    transform: Any, why: str, in_process: bool, caplog: pytest.LogCaptureFixture
) -> None:
    fake = FakeMaster()
    with trainer(fake, in_process=in_process, dataset={"transform": transform}) as (service, dataset):
        with pytest.raises(
            LoaderWorkerDied, match=rf"worker 0 was at records 6 to 11 of 'a'.*{why}\. Nothing.*quarantine"
        ) as failed:
            take(iter(elastic(dataset, num_workers=1)), 100)
        assert isinstance(failed.value, RuntimeError)
        assert ("ended it" in str(failed.value)) == bool(why)
        assert "DataLoader worker (pid" in str(failed.value.__cause__)
        assert any("loader worker 0 ended before its pass" in record.message for record in caplog.records)
        told = acknowledged(fake, service)
        assert 7 not in {record for _, record in told}
        assert service.progress().quarantined == 0
        failed.value.__traceback__ = None
        dataset.transform = None
        take(iter(elastic(dataset, num_workers=2)), 100)
        assert service.finished
    fake.outcomes["training"].check_complete(1)


def test_a_worker_that_ends_in_good_order_is_no_dead_one(caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeMaster()
    with trainer(fake, num_epochs=3) as (service, dataset):
        take(iter(elastic(dataset, num_workers=2)), 3)
        take(iter(elastic(dataset, num_workers=2)), 100)
        for _ in DataLoader(dataset, 4, num_workers=2):
            service.report_batch_done()
        take(iter(DataLoader(dataset, 4, num_workers=2)), 1)
    assert not [record for record in caplog.records if "loader worker" in record.getMessage()]
