"""What a loop is handed while the trainer's presence is in doubt, against a fake master."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from loader_kit import (
    AWAY,
    acknowledged,
    cut_off,
    elastic,
    flat,
    numbers,
    once,
    stalled,
    stopped,
    take,
    trainer,
)
from torch.utils.data import DataLoader

from edl_torch import DataShardService
from edl_torch.errors import InvalidArgument, MasterUnavailable
from edl_torch.testing import FakeMaster, Fault

COUNTS = {"a": 100, "b": 37}
BATCH = 4


@pytest.fixture
def fake() -> FakeMaster:
    return FakeMaster(**AWAY)


@pytest.mark.parametrize("away", [stopped, cut_off, stalled])
def test_without_an_optimizer_the_batch_in_hand_is_doubled_and_no_other(
    fake: FakeMaster, away: Callable[[FakeMaster, str], None]
) -> None:
    with trainer(fake, COUNTS, in_process=False) as (service, dataset):
        loop = iter(elastic(dataset))
        seen = take(loop, 5)
        away(fake, service.session.id)
        assert acknowledged(fake, service) == once(flat(seen[:4]))
        seen += take(loop, 1000)
        assert len(flat(seen)) == 137 + len(seen[4])
        assert service.finished
    fake.outcomes["training"].check_complete(1)


def test_whoever_comes_back_in_time_keeps_everything() -> None:
    fake = FakeMaster(lease_timeout_s=30.0, grace_s=1.0)
    with trainer(fake, COUNTS, in_process=False) as (service, dataset):
        seen: list[list[int]] = []
        for number, batch in enumerate(elastic(dataset)):
            seen.append(numbers(batch))
            if number % 5 == 0:
                fake.break_stream(service.session.id)
                fake.clock.advance(0.9)
            elif number % 5 == 1:
                fake.clock.advance(29.0)
            assert not fake.expire()
        assert sorted(flat(seen)) == [*range(100), *range(1000, 1037)]
    fake.outcomes["training"].check_complete(1)


@pytest.mark.parametrize("fault", list(Fault))
def test_presenting_leases_may_fail_on_the_way(fake: FakeMaster, fault: Fault) -> None:
    with trainer(fake, COUNTS) as (service, dataset):
        loop = iter(elastic(dataset))
        seen = take(loop, 3)
        fake.break_stream(service.session.id)
        fake.faults.plan("confirm", fault, fault)
        seen += take(loop, 1000)
        assert len(flat(seen)) == 137
    fake.outcomes["training"].check_complete(1)


# Loops of a plain DataLoader ------------------------------------------------------------------------------


def plain(service: DataShardService, loader: DataLoader[Any]) -> Iterator[list[int]]:
    while not service.finished:
        for batch in loader:
            yield numbers(batch)
            service.report_batch_done()


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("away", [stopped, cut_off, stalled])
def test_a_plain_loop_acknowledges_nothing_of_a_void_lease(
    fake: FakeMaster, away: Callable[[FakeMaster, str], None], num_workers: int
) -> None:
    with trainer(fake, COUNTS, in_process=False) as (service, dataset):
        context = "fork" if num_workers else None
        loader = DataLoader(dataset, BATCH, num_workers=num_workers, multiprocessing_context=context)
        trained: set[int] = set()
        for number, batch in enumerate(plain(service, loader)):
            trained |= set(batch)
            if number == 6:
                away(fake, service.session.id)
            assert {record for _, record in acknowledged(fake, service)} <= trained
    fake.outcomes["training"].check_complete(1)


def test_a_plain_loop_waits_while_presence_is_in_doubt(fake: FakeMaster) -> None:
    with trainer(fake, COUNTS) as (service, dataset):
        loop = iter(DataLoader(dataset, BATCH))
        next(loop)
        fake.break_stream(service.session.id)
        fake.faults.plan("confirm", Fault.REPEAT)
        service.report_batch_done()
        assert repr(fake.faults) == "<Faults {}>"
        for _ in loop:
            service.report_batch_done()
    fake.outcomes["training"].check_complete(1)


# Options --------------------------------------------------------------------------------------------------


def test_the_timeout_of_a_master_client_is_set_at_the_client(fake: FakeMaster) -> None:
    with pytest.raises(InvalidArgument, match="MasterClient"):
        DataShardService(4, fake, dataset_size=8, master_timeout_s=3.0)


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_how_long_a_master_may_be_away_is_set_at_the_service(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDL_MASTER_ADDR", "127.0.0.1:1")
    monkeypatch.setenv("EDL_MASTER_TIMEOUT_S", "0.1" if how == "environment" else "500")
    timeout_s = 0.1 if how == "argument" else None
    with (
        DataShardService(4, dataset_size=8, master_timeout_s=timeout_s) as service,
        pytest.raises(MasterUnavailable, match=r"127\.0\.0\.1:1 within 0\.1 s"),
    ):
        service.fetch_shard()
