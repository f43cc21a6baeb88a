"""ElasticDL's workers under our master, which is killed and comes back."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from by_number import TRAINING, WAIT, WireTask
from kit import Worker
from master_kit import MasterProcess

SIZE, EPOCHS = 600, 2
PARAMS = {"batch_size": 4, "num_epochs": EPOCHS, "dataset_size": SIZE, "num_minibatches_per_shard": 2}
FAILED = "flaky"


@pytest.fixture
def master(tmp_path: Path) -> Iterator[MasterProcess]:
    # A task whose answer died with the master comes back after its time: that must be soon here.
    process = MasterProcess(tmp_path, "--elasticdl_task_timeout_s", "5", state=tmp_path / "state")
    process.start()
    yield process
    process.close()


def insist(call: Callable[[], Any]) -> Any:
    """As a patient client does: an error is no answer."""
    while True:
        try:
            return call()
        except grpc.RpcError as error:
            if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise
            threading.Event().wait(0.02)


class FirstTime:
    """Whether records may fail: each once, for the third time would quarantine them."""

    def __init__(self) -> None:
        self._failed: set[tuple[int, int]] = set()
        self._lock = threading.Lock()

    def __call__(self, task: WireTask) -> bool:
        with self._lock:
            first = self._failed.isdisjoint(records(task))
            self._failed.update(records(task))
        return first


def train(
    worker: Worker, reported: Counter[tuple[int, int]], lock: threading.Lock, may_fail: FirstTime
) -> None:
    chance = random.Random(worker.worker_id)
    while not (task := insist(lambda: worker.get(timeout_s=5))).is_end:
        if task.type == WAIT:
            continue
        assert task.type == TRAINING
        if chance.random() < 0.05 and may_fail(task):
            insist(lambda task=task: worker.report(task, FAILED))  # type: ignore[misc]
            continue
        insist(lambda task=task: worker.report(task))  # type: ignore[misc]
        with lock:
            reported.update(records(task))


def records(task: WireTask) -> list[tuple[int, int]]:
    return [(task.epoch, number) for number in task.numbers]


def test_each_record_once_through_many_lives_of_the_master(master: MasterProcess) -> None:
    workers = [Worker(master.address, number) for number in range(3)]
    insist(lambda: workers[0].params(**PARAMS))
    reported: Counter[tuple[int, int]] = Counter()
    lock = threading.Lock()
    may_fail = FirstTime()
    threads = [
        threading.Thread(target=train, args=(worker, reported, lock, may_fail), daemon=True)
        for worker in workers
    ]
    for thread in threads:
        thread.start()
    for life in range(3):
        while len(reported) < (life + 1) * SIZE * EPOCHS // 5:
            threads[0].join(0.01)
        master.kill()
        master.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for worker in workers:
        worker.close()
    assert set(reported) == {(epoch, number) for epoch in range(EPOCHS) for number in range(SIZE)}
    assert set(reported.values()) == {1}
