"""ElasticDL's own client against our master, which is killed and comes back."""

from __future__ import annotations

import inspect
import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import preloaded
import pytest
from by_number import TRAINING, WAIT, WireTask
from kit import Server, Worker

SIZE, EPOCHS = 600, 2
PARAMS = {"batch_size": 4, "num_epochs": EPOCHS, "dataset_size": SIZE, "num_minibatches_per_shard": 2}
FAILED = "flaky"


class MasterProcess:
    """A master on one port, through all its lives."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._command = [sys.executable, "-m", "edl_torch", "master", "--state", str(folder / "state")]
        self._command += arguments
        self._log = folder / "log"
        self.address = "127.0.0.1:0"
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = preloaded.Popen(
                [*self._command, "--addr", self.address], stdout=subprocess.PIPE, stderr=log, text=True
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("ready on "), self._log.read_text()
        self.address = line.split()[-1]

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


@pytest.fixture
def master(tmp_path: Path) -> Iterator[MasterProcess]:
    # A task whose answer died with the master comes back after its time: that must be soon here.
    process = MasterProcess(tmp_path, "--elasticdl_task_timeout_s", "5")
    process.start()
    yield process
    process.kill()


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


# ElasticDL's own, unmodified client under our master, where it is installed ---------------------------------


service_module = pytest.importorskip(
    "elasticai_api.common.data_shard_service", reason="ElasticDL's client is missing"
)
client_module = pytest.importorskip("elasticai_api.common.master_client")
channel_module = pytest.importorskip("elasticai_api.util.grpc_utils")

if list(inspect.signature(client_module.MasterClient.__init__).parameters)[1:] != ["channel", "worker_id"]:
    pytest.skip("elasticai_api is a descendant of ElasticDL's client", allow_module_level=True)

RECORDS = 100


@pytest.mark.parametrize("order", ["", "shuffle", "shuffle_shards"])
def test_two_unmodified_clients_drain_our_master(server: Server, order: str) -> None:
    seen: Counter[int] = Counter()
    options = {order: True} if order else {}
    services = [
        service_module.DataShardService(
            client_module.MasterClient(channel_module.build_channel(server.address), worker),
            batch_size=5,
            num_epochs=2,
            dataset_size=RECORDS,
            num_minibatches_per_shard=4,
            **options,
        )
        for worker in range(2)
    ]
    while services:
        for service in list(services):
            shard = service.fetch_shard()
            if shard is None:
                services.remove(service)
                continue
            numbers = list(shard.indices) or list(range(shard.start, shard.end))
            seen.update(numbers)
            for first in range(0, len(numbers), 5):
                service.report_batch_done(len(numbers[first : first + 5]))
    assert seen == Counter(list(range(RECORDS)) * 2)
    assert server.training.finished


def test_its_record_index_service(server: Server) -> None:
    service = service_module.RecordIndexService(
        client_module.MasterClient(channel_module.build_channel(server.address), 0),
        batch_size=5,
        num_epochs=1,
        dataset_size=20,
        shuffle=True,
    )
    seen = Counter(service.fetch_record_index() for _ in range(10))
    service.report_batch_done()
    service.report_batch_done()
    seen.update(service.fetch_record_index() for _ in range(10))
    service.report_batch_done()
    service.report_batch_done()
    assert seen == Counter(range(20))
    assert server.training.finished
