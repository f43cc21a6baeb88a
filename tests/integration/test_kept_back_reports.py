"""Reports that a trainer keeps back from an embedded master: nobody sees that they wait."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from edl_torch import ElasticDataLoader, LocalMaster
from edl_torch.core.calls import ReportAnswer, ReportCall
from edl_torch.errors import ServiceClosed
from edl_torch.readers import MapDatasetReader

RECORDS, BATCH = 96, 4


class Patient(LocalMaster):
    """A master that would wait for ever, and counts its reports."""

    report_delay_s = 3600.0

    def __init__(self) -> None:
        super().__init__()
        self.reports = 0

    def report(self, call: ReportCall) -> ReportAnswer:
        self.reports += 1
        return super().report(call)


def loader_of(master: LocalMaster, **options: Any) -> ElasticDataLoader:
    reader = MapDatasetReader([float(number) for number in range(RECORDS)])
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
        thread.join(20)
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
