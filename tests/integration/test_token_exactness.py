"""Tokens under all that is in flight: of many trainers, and with a window that is open."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from loader_kit import acknowledged, all_records, elastic, flat, numbers, take, trainer

from edl_torch import DataShardService, ElasticDataLoader
from edl_torch.testing import FakeMaster

SOURCES = {"a": 411, "b": 7, "c": 340}  # so many that no trainer has to wait for another one
EPOCHS = 2
ORDERS: list[Any] = [
    pytest.param({}, {}, id="stored"),
    pytest.param({"shuffle_shards": True}, {"shuffle": True}, id="shuffled"),
]


def whole(epochs: int = EPOCHS) -> Counter[tuple[int, int]]:
    return Counter((epoch, record) for epoch in range(epochs) for record in all_records(SOURCES))


class Loop:
    """One trainer's loop, a batch at a time, through all epochs that there are."""

    def __init__(self, service: DataShardService, loader: ElasticDataLoader) -> None:
        self.service = service
        self._loader = loader
        self._batches: Iterator[Any] = iter(())
        self._epoch = -1

    def step(self, trained: Counter[tuple[int, int]]) -> bool:
        """Train on one batch; notes its records. False where this trainer has none now."""
        for batch in self._batches:
            trained.update((self._epoch, record) for record in numbers(batch))
            return True
        return False

    def begin(self) -> None:
        """Another pass."""
        self._epoch = self.service.epoch
        self._batches = iter(self._loader)

    def finish(self, trained: Counter[tuple[int, int]]) -> None:
        """Train alone until the data is finished."""
        while not self.service.finished:
            self.begin()
            while self.step(trained):
                pass


def loops(
    stack: ExitStack, fake: FakeMaster, count: int, dataset: Any, num_workers: int = 0, **arguments: Any
) -> list[Loop]:
    made = []
    for _ in range(count):
        service, data = stack.enter_context(
            trainer(fake, SOURCES, dataset=dataset, num_epochs=EPOCHS, **arguments)
        )
        made.append(Loop(service, elastic(data, num_workers=num_workers)))
    return made


@pytest.mark.parametrize(("service_order", "dataset_order"), ORDERS)
@pytest.mark.parametrize(
    ("steps", "num_workers"), [(0, 0), (9, 0), (20, 0), pytest.param(14, 2, marks=pytest.mark.long)]
)
def test_a_token_of_eight_trainers_restores_on_three_and_every_record_counts_once(
    steps: int, num_workers: int, service_order: Any, dataset_order: Any
) -> None:
    seed = 1000 * steps + num_workers
    print(f"seed {seed}")
    chance = random.Random(seed)
    trained: Counter[tuple[int, int]] = Counter()
    fake = FakeMaster()
    with ExitStack() as stack:
        eight = loops(stack, fake, 8, dataset_order, num_workers if steps else 0, **service_order)
        for loop in eight:
            loop.begin()
        for _ in range(steps):
            chance.choice(eight).step(trained)
        eight[0].service.report_batch_done()
        eight[0].service.close()  # what it gave back waits when the token is taken
        for loop in eight[1:]:
            state = loop.service.state_dict()  # the last one is taken when all are counted
        assert acknowledged(fake, eight[1].service) == trained
    with ExitStack() as stack:
        three = loops(stack, FakeMaster(), 3, dataset_order, **service_order)
        three[0].service.load_state_dict(state)
        assert three[0].service.progress().acknowledged == trained.total()
        for loop in three:
            loop.begin()
        for _ in range(6):
            chance.choice(three).step(trained)
        for loop in three[1:]:  # what they hold and did not train on goes to the first one
            loop.service.report_batch_done()
            loop.service.close()
        while three[0].step(trained):
            pass
        three[0].finish(trained)
        assert trained == whole()


def test_a_token_taken_while_others_have_batches_in_hand_counts_none_of_those() -> None:
    fake = FakeMaster()
    trained: Counter[tuple[int, int]] = Counter()
    with ExitStack() as stack:
        eight = loops(stack, fake, 8, {})
        for loop in eight:
            loop.begin()
            loop.step(Counter())  # in hand
        eight[3].service.report_batch_done()
        state = eight[5].service.state_dict()
        counted = acknowledged(fake, eight[0].service)
        assert 0 < counted.total() <= 2 * 4  # the one that reported, and the one that saved
    trained += counted
    with ExitStack() as stack:
        three = loops(stack, FakeMaster(), 3, {})
        three[2].service.load_state_dict(state)
        three[1].finish(trained)
        assert trained == whole()


def optimizer() -> torch.optim.Optimizer:
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)  # a step on no gradient is on no batch
    return torch.optim.SGD([parameter], lr=0.1)


def test_a_token_at_the_end_of_an_epoch_leaves_the_open_window_to_the_restored_run() -> None:
    fake = FakeMaster()
    arguments: dict[str, Any] = {"num_epochs": 2}
    with trainer(fake, {"a": 24}, **arguments) as (service, dataset):
        sgd = optimizer()
        service.attach(sgd)
        batches = []
        for batch in elastic(dataset):
            batches.append(numbers(batch))
            if len(batches) == 4:
                sgd.step()
        assert len(batches) == 6
        state = service.state_dict()  # two batches of the epoch wait for a step in the next one
    with trainer(FakeMaster(), {"a": 24}, **arguments) as (service, dataset):
        service.load_state_dict(state)
        assert service.epoch == 0
        first = flat(take(iter(elastic(dataset)), 100))
        assert sorted(first) == sorted(flat(batches[4:]))
        assert sorted(flat(take(iter(elastic(dataset)), 100))) == list(range(24))
        assert service.finished
