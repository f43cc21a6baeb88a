"""Tokens under all that is in flight: many trainers, gradient accumulation, other datasets, old leases."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from loader_kit import acknowledged, all_records, each_way, elastic, flat, numbers, once, take, trainer

from edl_torch import DataShardService, ElasticDataLoader
from edl_torch.core.calls import (
    NEW_PASS,
    Acknowledgement,
    ConfirmCall,
    Fence,
    LeaseCall,
    ReportCall,
)
from edl_torch.errors import StaleLease, TokenError
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


# Gradient accumulation --------------------------------------------------------------------------------------


def optimizer() -> torch.optim.Optimizer:
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)  # a step on no gradient is on no batch
    return torch.optim.SGD([parameter], lr=0.1)


@each_way
@pytest.mark.parametrize("saved_after", [1, 2, 3, 4, 5, 9, 10])
def test_a_token_in_an_accumulation_window_counts_exactly_the_batches_stepped_on(
    saved_after: int, num_workers: int, in_process: bool
) -> None:
    every, fake = 3, FakeMaster()
    window: list[int] = []
    model: list[int] = []
    with trainer(fake, in_process=in_process) as (service, dataset):
        sgd = optimizer()
        service.attach(sgd)
        for count, batch in enumerate(elastic(dataset, num_workers=num_workers), 1):
            window += numbers(batch)
            if count % every == 0:
                sgd.step()
                model, window = model + window, []
            if count == saved_after:
                state = service.state_dict()
                assert acknowledged(fake, service) == once(model)
                break
    with trainer(FakeMaster()) as (service, dataset):
        service.load_state_dict(state)
        assert service.progress().acknowledged == len(model)
        model += flat(take(iter(elastic(dataset)), 100))
        assert sorted(model) == all_records()


def test_going_back_in_an_accumulation_window_forgets_the_window() -> None:
    fake = FakeMaster()
    with trainer(fake) as (service, dataset):
        sgd = optimizer()
        service.attach(sgd)
        loader = elastic(dataset, num_workers=2)
        loop = iter(loader)
        model = flat(take(loop, 2))
        sgd.step()
        take(loop, 2)  # gradients without a step
        state = service.state_dict()
        service.load_state_dict(state)
        sgd.step()  # of gradients that the restored model has not: it must count nothing
        assert acknowledged(fake, service) == once(model)
        for batch in loader:
            sgd.step()
            model += numbers(batch)
        sgd.step()
        assert sorted(model) == all_records()
        assert service.finished


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


# Tokens of other data ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "other", "fields"),
    [
        ({"a": 21, "b": 5, "c": 12}, {}, ["size: registered 39, asked 38"]),
        ({"a": 21, "b": 5, "x": 13}, {}, ["names of sources ("]),
        ({"a": 39}, {}, ["sources (", "names of sources (", "num_sources: registered 3, asked 1"]),
        (None, {"seed": 7}, ["seed: registered 0, asked 7"]),
        (None, {"records_per_shard": 5}, ["records_per_shard: registered 6, asked 5"]),
        (None, {"shuffle_shards": True}, ["shuffle_shards: registered False, asked True"]),
        (None, {"shuffle": True}, ["shuffle: registered False, asked True"]),
        (None, {"dataset": {"shuffle": True}}, ["shuffle_in_shard: registered False, asked True"]),
        (None, {"seed": 7, "shuffle_shards": True}, ["seed: registered 0, asked 7", "shuffle_shards: "]),
    ],
)
def test_a_foreign_token_is_refused_by_the_names_of_its_fields_and_changes_nothing(
    counts: dict[str, int] | None, other: dict[str, Any], fields: list[str]
) -> None:
    given = {"a": 21, "b": 5, "c": 13}
    with trainer(FakeMaster(), counts or given, **other) as (service, dataset):
        if "shuffle" not in other:  # a reader without random access cannot shuffle globally
            take(iter(elastic(dataset)), 2)
        state = service.state_dict()
    fake = FakeMaster()
    with trainer(fake, given) as (service, dataset):
        loop = iter(elastic(dataset))
        trained = flat(take(loop, 3))
        with pytest.raises(TokenError) as refused:
            service.load_state_dict(state)
        said = str(refused.value)
        assert all(field in said for field in fields), said
        assert said.count(": registered ") == len(fields)
        trained += flat(take(loop, 100))
        while not service.finished:
            trained += flat(take(iter(elastic(dataset)), 100))
        assert sorted(trained) == all_records(given)


@pytest.mark.parametrize("change", ["version", "cursor", "overlap", "beyond", "count"])
def test_a_damaged_token_is_refused_and_changes_nothing(change: str) -> None:
    fake = FakeMaster()
    with trainer(fake) as (service, dataset):
        loop = iter(elastic(dataset))
        take(loop, 2)
        token = json.loads(service.state_dict()["token"])
        before = fake.token("training")
        match change:
            case "version":
                token["version"] = 99
            case "cursor":
                token["cursor"] = [0, 10**6, 0]
            case "overlap":
                token["open"] = [*token["open"], *token["open"]]
            case "beyond":
                token["open"] = [[0, 5, 0, 6]]
            case "count":
                token["acknowledged"] = -1
        with pytest.raises(TokenError):
            service.load_state_dict({"token": json.dumps(token)})
        assert fake.token("training") == before


# Leases of before -------------------------------------------------------------------------------------------


def test_all_that_was_lent_before_a_restore_is_void_for_every_trainer() -> None:
    fake = FakeMaster()
    with ExitStack() as stack:
        eight = loops(stack, fake, 8, {})
        for loop in eight:
            loop.begin()
            loop.step(Counter())
        eight[0].service.load_state_dict(None)
        for loop in eight[1:]:
            with pytest.raises(StaleLease, match="lineage"):
                loop.service.report_batch_done()
        assert fake.dataset_status("training").acknowledged == 0
        trained: Counter[tuple[int, int]] = Counter()
        eight[0].finish(trained)
        assert trained == whole()


def test_calls_of_an_earlier_lineage_are_refused_each_by_itself() -> None:
    fake = FakeMaster()
    with trainer(fake) as (service, dataset):
        take(iter(elastic(dataset)), 1)
        session = service.session.id
        grants = fake.call(lease_call(session, 1, 2)).grants  # after the one of the loop
        fake.go_back("training", None)
        done = tuple(Acknowledgement(task=g.task, attempt=g.attempt, upto=g.slice.stop) for g in grants)
        held = tuple((g.task, g.attempt) for g in grants)
        common: dict[str, Any] = {"session": session, "dataset": "training"}
        for lineage in (1, 3):
            with pytest.raises(StaleLease, match="lineage 2"):
                fake.call(lease_call(session, lineage, 3))
            with pytest.raises(StaleLease, match="lineage 2"):
                fake.call(ReportCall(**common, fence=fence_of(lineage), request=1000, acknowledgements=done))
            with pytest.raises(StaleLease, match="lineage 2"):
                fake.call(ConfirmCall(**common, fence=fence_of(lineage), leases=held))
        # Even under the new lineage's name the old leases are nobody's.
        told = fake.call(ReportCall(**common, fence=fence_of(2), request=1001, acknowledgements=done))
        assert set(told.stale) == {grant.task for grant in grants}
        assert fake.call(ConfirmCall(**common, fence=fence_of(2), leases=held)).void == told.stale
        assert fake.dataset_status("training").acknowledged == 0


def fence_of(lineage: int) -> Fence:
    return Fence(ledger="fake", lineage=lineage, member=1)


def lease_call(session: str, lineage: int, request: int) -> LeaseCall:
    return LeaseCall(
        session=session,
        dataset="training",
        fence=fence_of(lineage),
        request=request,
        epoch=NEW_PASS,
        count=2,
    )
