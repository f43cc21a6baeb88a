"""How the public names look to a type checker: checked by mypy in `make check`, never run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, assert_type

import torch

from edl_torch import (
    AbstractDataReader,
    DataShardService,
    ElasticDataLoader,
    ElasticDLMasterClient,
    ImageDataset,
    LocalMaster,
    MasterClient,
    Shard,
    ShardedDataset,
    Task,
    TaskType,
    build_channel,
)
from edl_torch.core.calls import MasterApi
from edl_torch.testing import FakeMaster, check_reader


class Rows(AbstractDataReader):
    """A reader as users write it."""

    def create_shards(self, mode: TaskType = TaskType.TRAINING) -> dict[str, int]:
        return {"rows": 10}

    def read_records(self, task: Task) -> Iterator[int]:
        yield from range(task.start, task.end)

    def read_record(self, name: str, index: int) -> int:
        return index


def masters(fake: FakeMaster, local: LocalMaster, address: str) -> list[MasterApi]:
    """Each is a `master_client`."""
    return [
        fake,
        fake.connect("b"),
        local,
        MasterClient(build_channel(address), "worker"),
        MasterClient(address),
        ElasticDLMasterClient(address, 3),
    ]


def train(reader: Rows, optimizer: torch.optim.Optimizer) -> None:
    """The whole public path."""
    check_reader(Rows)
    with DataShardService(batch_size=4, reader=reader, task_type=TaskType.EVALUATION) as service:
        service.attach(optimizer)
        dataset: ShardedDataset = ImageDataset(service, reader, shuffle=True, transform=torch.from_numpy)
        loader = ElasticDataLoader(dataset, num_workers=2, pin_memory=True)
        assert_type(service.finished, bool)
        assert_type(service.epoch, int)
        assert_type(len(loader), int)
        assert_type(loader.records[0], tuple[str, int])
        assert_type(loader.preempted, bool)
        loader.preempt()
        assert_type(loader.through(3), Iterator[Any])
        assert_type(service.fetch_shard(), Shard | None)
        assert_type(service.report_batch_done(3), bool)
        assert_type(service.state_dict(), dict[str, str])
        service.load_state_dict(service.state_dict())
        service.load_state_dict(None)
        assert_type(loader.weigh(torch.ones(()), count=3), torch.Tensor)
        loader.scale_gradients(optimizer, optimizer)
        service.detach(optimizer)
        for batch in loader:
            assert_type(batch, Any)
