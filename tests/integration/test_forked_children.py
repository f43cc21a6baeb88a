"""A forked child has a copy of its trainer, embedded master included: it cannot train everything again."""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Callable

import pytest
from loader_kit import NumberReader, all_records, elastic, flat, take

from edl_torch import DataShardService, ElasticDataLoader, LocalMaster, ShardedDataset
from edl_torch.errors import ServiceClosed

COUNTS = {"a": 40}


class Trainer:
    """A service with an embedded master, a dataset, a loader, and an iterator that is under way."""

    def __init__(self) -> None:
        reader = NumberReader(COUNTS)
        self.master = LocalMaster()
        self.service = DataShardService(4, self.master, reader=reader, records_per_shard=8)
        self.dataset = ShardedDataset(self.service, reader)
        self.loader = elastic(self.dataset)
        self.iterator = iter(self.loader)
        self.first = take(self.iterator, 1)


def read_shards(trainer: Trainer) -> object:
    while trainer.service.fetch_shard() is not None:
        trainer.service.report_batch_done()
    return trainer.service.finished


def ask_master(trainer: Trainer) -> object:
    return trainer.master.status()


USES: list[Callable[[Trainer], object]] = [
    read_shards,
    ask_master,
    lambda trainer: trainer.service.finished,
    lambda trainer: trainer.service.state_dict(),
    lambda trainer: trainer.service.load_state_dict(None),
    lambda trainer: trainer.service.report_batch_done(),
    lambda trainer: trainer.service.session.readers.listen(),
    lambda trainer: list(trainer.loader),
    lambda trainer: list(trainer.iterator),
    lambda trainer: ElasticDataLoader(trainer.dataset),
]


def in_child(use: Callable[[Trainer], object], trainer: Trainer) -> str:
    """What a forked child got for it: the name of an error, or a value."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # this process has threads
        child = os.fork()
    if not child:
        try:
            result = repr(use(trainer))
        except ServiceClosed as error:
            result = f"ServiceClosed: {error}"
        except Exception:  # noqa: BLE001  the top of a process
            result = traceback.format_exc()
        os.write(write, result.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        result = pipe.read()
    os.waitpid(child, 0)
    return result


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_a_forked_child_is_refused_with_one_clear_error(use: Callable[[Trainer], object]) -> None:
    trainer = Trainer()
    with trainer.service:
        assert in_child(use, trainer).startswith("ServiceClosed: ")
        rest = take(trainer.iterator, 100)
        assert sorted(flat(trainer.first + rest)) == all_records(COUNTS)
        assert trainer.service.finished


def test_a_child_that_a_transform_forks_ends_by_its_own_error() -> None:
    parent = os.getpid()

    def fork(number: int) -> int:
        if number == 6:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # this process has threads
                child = os.fork()
            if not child:
                raise SystemExit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        return number

    with ElasticDataLoader(range(40), 4, transform=fork, master_client=LocalMaster()) as loader:
        status = 1
        try:
            seen = flat(take(iter(loader), 100))
        except SystemExit as error:
            status = int(error.code or 0)
        finally:
            if os.getpid() != parent:
                os._exit(status)
        assert sorted(seen) == list(range(40))
        assert loader.service.finished
