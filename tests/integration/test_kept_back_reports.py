"""Reports that a trainer keeps back from an embedded master: nobody sees that they wait."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edl_torch import ElasticDataLoader, LocalMaster
from edl_torch.core.calls import ReportCall, Request
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.errors import EdlError, ServiceClosed
from edl_torch.readers import MapDatasetReader

A = TypeVar("A")

RECORDS, BATCH = 96, 4


class Patient(LocalMaster):
    """A master that would wait for ever, and counts its reports."""

    report_delay_s = 3600.0

    def __init__(self) -> None:
        super().__init__()
        self.reports = 0

    def call(self, request: Request[A], wait_s: float = 0.0) -> A:
        self.reports += isinstance(request, ReportCall)
        return super().call(request, wait_s)


def loader_of(master: LocalMaster, records: int = RECORDS, **options: Any) -> ElasticDataLoader:
    reader = MapDatasetReader([float(number) for number in range(records)])
    options = {"records_per_shard": 8 * BATCH, "collate_fn": len} | options
    return ElasticDataLoader(reader, BATCH, master_client=master, **options)


def test_who_asks_hears_of_every_batch_and_the_master_of_few_reports() -> None:
    master = Patient()
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    with loader_of(master) as loader:
        loader.attach(optimizer)
        for steps, _ in enumerate(loader, start=1):
            optimizer.step()
            if steps == 5:
                assert master.dataset_status("training").acknowledged == 5 * BATCH
            if steps == 6:
                assert loader.progress().acknowledged == 6 * BATCH
        assert master.reports <= 10, "of 24 batches: two were asked for, and each lease takes one or two"
        assert master.status().datasets[0].acknowledged == RECORDS


def test_a_token_has_every_batch() -> None:
    master = Patient()
    with loader_of(master) as loader:
        batches = iter(loader)
        for _ in range(5):
            next(batches)
        position = loader.state_dict()
    with loader_of(LocalMaster()) as loader:
        loader.load_state_dict(position)
        assert loader.progress().acknowledged == 5 * BATCH


def test_trainers_of_one_process_do_not_wait_for_what_another_keeps_back() -> None:
    master = Patient()
    trained: list[int] = []

    def train() -> None:
        with loader_of(master, num_epochs=20) as loader:
            for _ in loader.epochs():
                trained.extend(loader)

    threads = [threading.Thread(target=train, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert sum(trained) == 20 * RECORDS
    assert master.dataset_status("training").finished


def test_what_is_kept_back_is_told_when_the_master_is_closed() -> None:
    master = Patient()
    loader = loader_of(master)
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    master.close()
    assert master._dispatcher.dataset_status("training").acknowledged == 3 * BATCH
    with pytest.raises(ServiceClosed, match="embedded master"):
        loader.close()


class Trainer:
    """A trainer that does what it is told, and says what it saw."""

    def __init__(self, stack: ExitStack, master: LocalMaster, *, steps: bool) -> None:
        self.loader = stack.enter_context(
            loader_of(master, records=2000, collate_fn=list, records_per_shard=3 * BATCH)
        )
        weight = torch.zeros(1, requires_grad=True)
        weight.grad = torch.zeros(1)  # as if each batch had left one
        self.optimizer = torch.optim.SGD([weight])
        if steps:
            self.loader.attach(self.optimizer)
        self.batches = iter(self.loader)

    def do(self, what: str) -> Any:
        if what == "train":
            batch = next(self.batches)
            self.optimizer.step()
            return batch
        if what == "read":
            return next(self.batches)
        if what == "begin anew":
            self.batches = iter(self.loader)
        if what == "save":
            return self.loader.state_dict()
        if what == "look":
            return self.loader.progress().acknowledged
        if what == "give back":
            self.loader.give_back()
        return None


def told(delay_s: float, steps: list[bool], program: list[tuple[int, str]]) -> list[Any]:
    """Run a program of several trainers of one process. Returns all that was to be seen."""
    master = LocalMaster(dispatcher=Dispatcher(ledger_id="ledger"))
    master.report_delay_s = delay_s
    seen: list[Any] = []
    with ExitStack() as stack:
        trainers = [Trainer(stack, master, steps=each) for each in steps]
        for number, what in program:
            try:
                seen.append((what, trainers[number].do(what)))
            except EdlError as error:
                seen.append((what, type(error)))
    status = master.dataset_status("training")
    return [*seen, status.acknowledged, status.given_back, status.returned_records]


@pytest.mark.filterwarnings("ignore::UserWarning")  # of loops that never step, and the like
@given(
    steps=st.lists(st.booleans(), min_size=2, max_size=2),
    program=st.lists(
        st.tuples(
            st.integers(0, 1),
            st.sampled_from(["train", "train", "train", "read", "begin anew", "save", "look", "give back"]),
        ),
        max_size=30,
    ),
)
def test_what_is_kept_back_changes_nothing_that_anybody_sees(
    steps: list[bool], program: list[tuple[int, str]]
) -> None:
    assert told(3600.0, steps, program) == told(0.0, steps, program)
