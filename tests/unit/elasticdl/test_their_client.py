"""ElasticDL's workers under our master, over real grpc, by field number."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from by_number import EVALUATION, PREDICTION, TRAINING, WAIT, WireTask
from kit import Server

from edl_torch import DataShardService, ShardedDataset
from edl_torch.client.grpc.client import MasterClient
from edl_torch.core.calls import Registration
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.errors import DatasetConflict
from edl_torch.master.durable import DurableState
from edl_torch.readers import MapDatasetReader
from edl_torch.shard import Source, TaskType
from edl_torch.testing import wait_until

SIZE = 100
PARAMS = {"batch_size": 5, "num_epochs": 2, "dataset_size": SIZE, "num_minibatches_per_shard": 4}
EACH_ONCE = Counter({(epoch, number): 1 for epoch in range(2) for number in range(SIZE)})


def refused(call: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as error:
        call()
    return error.value.code(), error.value.details()


@pytest.mark.parametrize("order", ["", "shuffle", "shuffle_shards"])
def test_two_epochs_with_a_failed_task_and_a_wait_give_each_record_once(server: Server, order: str) -> None:
    first, second = server.worker(0), server.worker(1)
    options = {order: True} if order else {}
    first.params(**PARAMS, **options)
    second.params(**PARAMS, **options)  # each worker says so
    failed, kept = first.get(), second.get()
    assert failed.type == kept.type == TRAINING
    first.report(failed, "out of memory")
    seen: Counter[tuple[int, int]] = Counter()
    # `second` trains on one task all the while, so that `first` must wait once nothing else is left
    while server.training.todo or server.training.epoch < 2:
        task = first.get()
        seen.update((task.epoch, number) for number in task.numbers)
        first.report(task)
    answer = first.later()
    assert not server.training.finished
    # It holds a task: two such must not wait for each other. (A call with a deadline is told WAIT anyway.)
    assert WireTask.decode(second.later().result(60)).type == WAIT
    assert not answer.done()  # this one holds none: it waits in the call
    seen.update((kept.epoch, number) for number in kept.numbers)
    second.report(kept)
    assert WireTask.decode(answer.result(20)).is_end
    assert second.get().is_end
    assert seen == EACH_ONCE
    status = server.training
    assert (status.acknowledged, status.quarantined, status.dropped) == (2 * SIZE, 0, 0)
    assert status.finished


def test_the_orders_are_those_that_were_asked_for(start_server: Callable[..., Server]) -> None:
    orders = {}
    for order in ("", "shuffle", "shuffle_shards"):
        worker = start_server(Dispatcher(ledger_id=f"ledger {order}")).worker()
        worker.params(**PARAMS, **({order: True} if order else {}))
        tasks = []
        while (task := worker.get()).type == TRAINING:
            tasks.append(task)
            worker.report(task)
        orders[order] = [task for task in tasks if task.epoch == 0]
        assert all(len(task.numbers) == task.end - task.start for task in tasks)
        assert bool(tasks[0].indices) == (order == "shuffle")
    starts = {order: [task.start for task in tasks] for order, tasks in orders.items()}
    assert starts[""] == sorted(starts[""])
    assert starts["shuffle_shards"] != sorted(starts["shuffle_shards"])
    numbers = [number for task in orders["shuffle"] for number in task.numbers]
    assert (
        sum(abs(place - number) for place, number in enumerate(numbers)) > SIZE * SIZE / 5
    )  # n²/3 is random


def test_a_report_that_is_repeated_counts_once(server: Server) -> None:
    worker = server.worker()
    worker.params(**PARAMS)
    first, second = worker.get(), worker.get()
    for _ in range(3):
        worker.report(first)
    assert server.training.acknowledged == 20
    worker.report(second)
    worker.report(first)  # after another one, and as a failure: the record has its outcome
    worker.report(first, "failed after all")
    assert (server.training.acknowledged, server.training.leased) == (40, 0)


def test_the_batch_that_fails_is_found_named_and_stops_the_job_loudly(server: Server) -> None:
    worker = server.worker()
    worker.params(batch_size=5, num_epochs=1, dataset_size=40, num_minibatches_per_shard=8)
    attempts: list[int] = []
    details = ""
    while not details:
        task = worker.get()
        if 17 not in task.numbers:
            worker.report(task)
            continue
        attempts.append(len(task.numbers))
        try:
            worker.report(task, "record 17 is broken")
        except grpc.RpcError as error:
            code, details = error.code(), error.details()
    assert attempts == [20, 10, 5, 5, 5]  # 20: so much is lent when 40 wait for one worker
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "max_bad_records" in details
    assert {bad.index for bad in server.training.quarantine} == {15, 16, 17, 18, 19}
    assert "record 17 is broken" in server.training.quarantine[0].reason
    assert refused(worker.get)[0] is grpc.StatusCode.FAILED_PRECONDITION


def test_a_task_with_counted_failures_is_not_taken_for_trained(server: Server) -> None:
    worker = server.worker()
    worker.params(batch_size=5, num_epochs=1, dataset_size=5)
    task = worker.get()
    worker.report(task, fail_count=2)
    assert server.training.acknowledged == 0
    again = worker.get()
    assert again.numbers == task.numbers
    worker.report(again)
    assert worker.get().is_end


def test_another_size_is_refused_and_other_wishes_are_not(server: Server) -> None:
    worker = server.worker()
    worker.params(**PARAMS)
    code, details = refused(lambda: worker.params(**PARAMS | {"dataset_size": SIZE + 1}))
    assert code is grpc.StatusCode.ALREADY_EXISTS
    assert f"{SIZE} records here" in details
    worker.params(**PARAMS | {"batch_size": 7, "shuffle": True})
    ledger = server.dispatcher.find_ledger("training")
    assert ledger is not None
    assert (ledger.spec.shuffle, ledger.spec.epoch_barrier) == (False, False)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"dataset_size": -3}, "dataset_size is -3"),
        ({"num_minibatches_per_shard": -1}, "num_minibatches_per_shard is -1"),
        ({"dataset_size": 2**31 - 1, "num_minibatches_per_shard": 2**28, "shuffle": True}, "64 MiB"),
    ],
)
def test_unusable_parameters_are_refused_with_a_remedy(
    server: Server, change: dict[str, int], word: str
) -> None:
    code, details = refused(lambda: server.worker().params(**PARAMS | change))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert word in details
    assert not tuple(server.dispatcher.ledgers)


def test_num_epochs_of_0_and_less_is_endless(server: Server) -> None:
    worker = server.worker()
    worker.params(**PARAMS | {"num_epochs": -1})
    for _ in range(3 * SIZE // 20):
        task = worker.get()
        worker.report(task)
    assert task.epoch == 2


def test_rubbish_is_refused(server: Server) -> None:
    worker = server.worker()
    code, details = refused(lambda: worker._params(b"\x08", timeout=5))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "ReportTrainingParamsRequest" in details
    assert refused(lambda: worker.get(task_type=77))[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert refused(lambda: worker.get(task_type=WAIT))[0] is grpc.StatusCode.INVALID_ARGUMENT
    worker.report(0)
    worker.report(-5)
    worker.report(2**31 - 1)


def test_a_worker_waits_for_the_data_to_be_described(server: Server) -> None:
    early = server.worker(1)
    answer = early.later()
    wait_until(lambda: not answer.done())
    server.worker(0).params(**PARAMS)
    assert WireTask.decode(answer.result(60)).type == TRAINING


def test_more_than_four_megabytes_of_indices(server: Server) -> None:
    worker = server.worker()
    size, records = 900_000, 2**30  # numbers of five bytes
    worker.params(
        batch_size=size, num_epochs=1, dataset_size=records, num_minibatches_per_shard=1, shuffle=True
    )
    task = worker.get()
    assert len(task.indices) == len(set(task.indices)) == size
    assert 0 <= min(task.indices) < 2**28 < max(task.indices) < records
    worker.report(task)
    assert server.training.acknowledged == size


# Datasets of the command line ---------------------------------------------------------------------------


def define(name: str, kind: TaskType, *sources: Source, **options: object) -> Dispatcher:
    dispatcher = Dispatcher(ledger_id="ledger")
    dispatcher.define(Registration(name=name, sources=sources, task_type=kind, **options))  # type: ignore[arg-type]
    return dispatcher


def test_tasks_of_windows_carry_the_indices_of_one_storage(start_server: Callable[..., Server]) -> None:
    shuffled = {"shuffle_shards": True, "shuffle_window": 3, "records_per_shard": 4}
    a, b = Source(name="a.rec", start=3, count=40), Source(name="b.rec", count=5)
    server = start_server(define("training", TaskType.TRAINING, a, **shuffled))
    worker = server.worker()
    worker.params(**PARAMS | {"dataset_size": 40})
    tasks = []
    while sum(len(task.numbers) for task in tasks) < 40:
        tasks.append(worker.get())
    assert {task.name for task in tasks} == {"a.rec"}
    assert [task.end - task.start for task in tasks] == [len(task.numbers) for task in tasks]
    assert sorted(number for task in tasks for number in task.numbers) == list(range(3, 43))
    several = start_server(define("training", TaskType.TRAINING, a, b, **shuffled)).worker()
    several.params(**PARAMS | {"dataset_size": 45})
    with pytest.raises(Exception, match="instead of --shuffle_window, or one storage"):
        several.get()


def test_shards_of_named_storages(start_server: Callable[..., Server]) -> None:
    a, b = Source(name="a.rec", start=3, count=4), Source(name="b.rec", count=5)
    server = start_server(define("training", TaskType.TRAINING, a, b, records_per_shard=4, num_epochs=2))
    worker = server.worker()
    worker.params(**PARAMS | {"dataset_size": 9})  # its epochs and shard sizes are those of the master
    first = [worker.get() for _ in range(3)]
    assert sorted((t.name, t.start, t.end) for t in first) == [
        ("a.rec", 3, 7),
        ("b.rec", 0, 4),
        ("b.rec", 4, 5),
    ]
    second = worker.get()  # no barrier: the next epoch, before the first was reported
    assert second.epoch == 1
    for task in (*first, second):
        worker.report(task)
    assert server.training.acknowledged == 13


def test_evaluation_and_prediction_have_tasks_of_their_own(start_server: Callable[..., Server]) -> None:
    dispatcher = define("training", TaskType.TRAINING, Source(name="t", count=4), records_per_shard=4)
    for kind in (TaskType.EVALUATION, TaskType.PREDICTION):
        source = Source(name=kind.name, count=4)
        dispatcher.define(
            Registration(name=kind.name.lower(), sources=(source,), task_type=kind, records_per_shard=4)
        )
    worker = start_server(dispatcher).worker()
    tasks = [worker.get(kind) for kind in (TRAINING, EVALUATION, PREDICTION)]
    assert [(task.name, task.type) for task in tasks] == [("t", 1), ("EVALUATION", 2), ("PREDICTION", 3)]
    assert len({task.task_id for task in tasks}) == 3
    for task in tasks:
        worker.report(task)
    assert all(worker.get(kind).is_end for kind in (TRAINING, EVALUATION, PREDICTION))


def test_without_evaluation_data_a_worker_waits_for_the_training_to_end(server: Server) -> None:
    worker = server.worker()
    worker.params(batch_size=5, num_epochs=1, dataset_size=5)
    assert worker.get(EVALUATION).type == WAIT
    worker.report(worker.get())
    assert worker.get(EVALUATION).is_end


# Beside trainers of ours, and across a restart ------------------------------------------------------------


def test_a_worker_and_a_trainer_of_ours_share_a_dataset(server: Server) -> None:
    worker = server.worker()
    worker.params(**PARAMS)
    seen: Counter[tuple[int, int]] = Counter()
    task = worker.get()
    with (
        MasterClient(server.address, "ours") as client,
        DataShardService(5, client, epoch_barrier=False) as ours,
    ):
        for _ in range(4):
            shard = ours.fetch_shard()
            assert shard is not None
            seen.update((shard.epoch, number) for _, number in shard.indices())
            for _ in range(len(shard) // 5):
                ours.report_batch_done()
        assert ours.progress().acknowledged == sum(seen.values())
    seen.update((task.epoch, number) for number in task.numbers)
    worker.report(task)
    assert worker.drain(seen).is_end
    assert seen == EACH_ONCE


def test_a_reader_of_named_sources_must_come_before_a_worker_that_knows_a_size_alone(
    start_server: Callable[..., Server],
) -> None:
    """What docs/elasticdl.md says of it."""
    reader = MapDatasetReader(range(SIZE), name="numbers")

    def join(server: Server) -> int:
        with (
            MasterClient(server.address, "ours") as client,
            DataShardService(5, client, reader=reader, records_per_shard=20) as ours,
        ):
            return len(ShardedDataset(ours, reader))

    late = start_server()
    late.worker().params(**PARAMS)
    with pytest.raises(DatasetConflict, match="sources"):
        join(late)
    source = Source(name="numbers", count=SIZE)
    for server in (
        start_server(),
        start_server(define("training", TaskType.TRAINING, source, records_per_shard=20)),
    ):
        assert join(server) == SIZE
        worker = server.worker()
        worker.params(**PARAMS)
        assert worker.get().name == "numbers"
        assert join(server) == SIZE


def test_tasks_outlive_a_restart_with_a_journal(start_server: Callable[..., Server], tmp_path: Path) -> None:
    state = DurableState(tmp_path, now=0.0)
    server = start_server(state.dispatcher, state.group_commit)
    worker = server.worker(3)
    worker.params(**PARAMS)
    held, done = worker.get(), worker.get()
    worker.report(done)
    server.run(server.server.stop())
    state.close()
    resumed = DurableState(tmp_path, now=0.0, lease_timeout_s=0.1)  # of trainers, who have heartbeats
    again = start_server(resumed.dispatcher, resumed.group_commit)
    worker = again.worker(3)
    waited = threading.Event()
    for _ in range(3):
        assert not waited.wait(0.1)
        assert again.training.leased == 20
    worker.report(held)
    worker.report(done)  # not heard of the answer: it says so again
    assert again.training.acknowledged == 40
    seen = Counter((task.epoch, number) for task in (held, done) for number in task.numbers)
    assert worker.drain(seen).is_end
    assert seen == EACH_ONCE
    again.run(again.server.stop())
    resumed.close()


def test_ids_of_a_master_that_forgot_all_mean_nothing_to_the_next(
    start_server: Callable[..., Server],
) -> None:
    old = start_server(Dispatcher(ledger_id="old")).worker()
    old.params(**PARAMS)
    stale = old.get()
    server = start_server(Dispatcher(ledger_id="new"))
    worker = server.worker()
    worker.params(**PARAMS)
    assert worker.get().start == stale.start
    worker.report(stale)
    assert (server.training.acknowledged, server.training.leased) == (0, 20)
