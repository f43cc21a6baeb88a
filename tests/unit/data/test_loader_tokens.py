"""A token and the model are the same instant: what was counted is not read again, what was not is."""

from __future__ import annotations

from typing import Any

import pytest
from loader_kit import all_records, elastic, flat, numbers, take, trainer

from edl_torch.testing import FakeMaster

ORDERS: list[Any] = [
    pytest.param({}, {}, id="stored"),
    pytest.param({"shuffle_shards": True}, {"shuffle": True}, id="shuffled"),
]


@pytest.mark.parametrize(("service_order", "dataset_order"), ORDERS)
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("save_after", [1, 5, 9])
def test_saved_and_resumed_runs_together_train_each_record_once(
    save_after: int, num_workers: int, service_order: Any, dataset_order: Any
) -> None:
    trained: list[int] = []
    with trainer(FakeMaster(), num_epochs=2, dataset=dataset_order, **service_order) as (service, dataset):
        for count, batch in enumerate(elastic(dataset, num_workers=num_workers), 1):
            trained += numbers(batch)
            if count == save_after:
                state = service.state_dict()
                break
    assert list(state) == ["token"]
    with trainer(FakeMaster(), num_epochs=2, dataset=dataset_order, **service_order) as (service, dataset):
        service.load_state_dict(state)
        assert service.epoch == 0
        loader = elastic(dataset, num_workers=num_workers)
        trained += flat(take(iter(loader), 100))
        assert sorted(trained) == all_records()
        assert service.epoch == 1
        assert sorted(flat(take(iter(loader), 100))) == all_records()
        assert service.finished


def test_the_service_is_stateful_for_torch() -> None:
    from torch.distributed.checkpoint.stateful import Stateful

    with trainer(FakeMaster()) as (service, dataset):
        assert isinstance(service, Stateful)
        take(iter(elastic(dataset)), 2)
        state = service.state_dict()
        assert len(state["token"]) < 2000
        service.load_state_dict(dict(state))
