"""Calls and answers that get lost or arrive twice change nothing in what was trained on."""

from __future__ import annotations

import random

import pytest
from loader_kit import acknowledged, all_records, elastic, flat, numbers, once, take, trainer
from torch.utils.data import DataLoader

from edl_torch.testing import FakeMaster, Fault

FAULTS = [Fault.LOSE_CALL, Fault.LOSE_ANSWER, Fault.REPEAT]


@pytest.mark.parametrize("in_process", [True, False], ids=["embedded", "remote"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.lower())
@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_call_may_suffer_once(num_workers: int, fault: Fault, in_process: bool) -> None:
    fake = FakeMaster()
    for call in ("register", "lease", "report", "snapshot"):
        fake.faults.plan(call, *[fault] * 1000)
    with trainer(fake, in_process=in_process, num_epochs=2) as (service, dataset):
        loader = elastic(dataset, num_workers=num_workers)
        seen = take(iter(loader), 4)
        assert acknowledged(fake, service) == once(flat(seen[:3]))
        service.state_dict()
        seen = seen[:3] + take(iter(loader), 100)
        assert sorted(flat(seen)) == all_records()
        assert sorted(flat(take(iter(loader), 100))) == all_records()
        assert service.finished
    fake.outcomes["training"].check_complete(2)


@pytest.mark.parametrize("seed", range(6))
def test_random_faults_in_a_loop_that_stops_at_random(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    fake = FakeMaster()
    for call in ("lease", "report"):
        fake.faults.plan(call, *rng.choices([None, *FAULTS], k=500))
    finished: list[int] = []
    with trainer(fake, in_process=bool(seed % 2), shuffle_shards=True, dataset={"shuffle": True}) as (
        service,
        dataset,
    ):
        while not service.finished:
            seen = take(iter(elastic(dataset, num_workers=rng.randrange(3))), stop := rng.randrange(1, 8))
            finished += flat(seen[:-1] if len(seen) == stop else seen)
            assert acknowledged(fake, service) == once(finished)
    assert sorted(finished) == all_records()
    fake.outcomes["training"].check_complete(1)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.lower())
def test_a_plain_loop_suffers_too(fault: Fault) -> None:
    fake = FakeMaster()
    for call in ("lease", "report"):
        fake.faults.plan(call, *[None, fault] * 500)
    with trainer(fake, in_process=False) as (service, dataset):
        done: list[int] = []
        for batch in DataLoader(dataset, 4, num_workers=1):
            done += numbers(batch)
            service.report_batch_done()
            assert acknowledged(fake, service) == once(done)
        assert service.finished
    fake.outcomes["training"].check_complete(1)
