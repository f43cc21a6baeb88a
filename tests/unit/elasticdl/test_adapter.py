"""Who gets which task until when: the adapter with the time as a number, and names of tasks."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
from by_number import TRAINING, WAIT, WireTask, get_task_request, params_request, result_request
from kit import in_virtual_time

from edl_torch.core.calls import Grant, Registration
from edl_torch.core.changes import Changes, Key
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.elasticdl.adapter import ElasticDLAdapter, ElasticDLOptions
from edl_torch.elasticdl.servicer import MARGIN_S, ElasticDLServicer
from edl_torch.elasticdl.wire import (
    MAX_INT32,
    GetTaskCall,
    TaskNames,
    TaskResult,
    TrainingParams,
    check_expressible,
)
from edl_torch.errors import InvalidArgument, TooManyBadRecords
from edl_torch.master.durable import GroupCommit
from edl_torch.master.host import MasterHost
from edl_torch.shard import DatasetSpec, Source, TaskType

PARAMS = TrainingParams(batch_size=2, num_epochs=1, dataset_size=8, num_minibatches_per_shard=1)


class Case:
    """A adapter with a timeout of 10 s over 4 tasks of 2 records."""

    def __init__(self, params: TrainingParams = PARAMS, max_bad_records: int = 0) -> None:
        self.dispatcher = Dispatcher(ledger_id="ledger", lease_timeout_s=3)
        self.adapter = ElasticDLAdapter(
            self.dispatcher, ElasticDLOptions(task_timeout_s=10, max_bad_records=max_bad_records)
        )
        self.adapter.define(params)

    def get(self, worker: int, now: float) -> Any:
        call, _ = self.adapter.ask(GetTaskCall(worker_id=worker), "training", now)
        answer = self.dispatcher.lease(call, now)
        return self.adapter.hand_out(call, answer.grants, now) if answer.grants else None

    def report(self, task: Any, now: float, error: str = "") -> bool:
        return self.adapter.report(TaskResult(task_id=task.task_id, error=error), now)

    def tend(self, now: float) -> list[tuple[str, int]]:
        """What was lost, and that no session dies while its tasks live."""
        lost, _ = self.adapter.tend(now)
        assert self.dispatcher.expire(now) == ()
        return [(task.session, task.records) for task in lost]

    @property
    def status(self) -> Any:
        return self.dispatcher.dataset_status("training")


def test_a_task_is_taken_back_after_its_time() -> None:
    case = Case()
    task = case.get(1, 0.0)
    assert case.tend(2.9) == case.tend(5.8) == case.tend(8.7) == case.tend(9.9) == []
    assert case.tend(10.0) == [("elasticdl-1", 2)]
    assert not case.report(task, 10.1)
    assert (case.status.acknowledged, case.status.todo) == (0, 8)


def test_asking_does_not_keep_a_task_whose_answer_was_lost() -> None:
    case = Case()
    case.get(1, 0.0)
    for now in (2.0, 4.0, 6.0, 8.0):
        case.get(1, now)
        assert case.tend(now) == []
    assert case.get(1, 9.0) is None
    assert case.tend(10.0) == [("elasticdl-1", 2)]


def test_a_report_gives_the_workers_other_tasks_their_full_time() -> None:
    case = Case()
    first, second, other = case.get(1, 0.0), case.get(1, 0.0), case.get(2, 0.0)
    for now in (3.0, 6.0, 9.0):
        assert case.tend(now) == []
    assert case.report(first, 9.0)
    assert case.tend(11.0) == [("elasticdl-2", 2)]
    assert case.tend(13.0) == case.tend(15.0) == case.tend(18.9) == []
    assert not case.report(other, 18.9)
    assert case.report(second, 18.9)


def test_a_worker_that_is_silent_and_holds_nothing_is_forgotten() -> None:
    case = Case()
    case.report(case.get(1, 0.0), 0.5)
    for now in (3.0, 6.0, 9.0):
        case.tend(now)
    assert case.status.trainers == 1
    case.tend(11.0)
    assert (case.status.trainers, len(case.dispatcher.members)) == (0, 0)
    assert case.get(1, 12.0) is not None  # and may come back


def test_after_a_start_of_the_master_tasks_have_their_full_time() -> None:
    case = Case()
    task = case.get(1, 0.0)
    case.adapter = ElasticDLAdapter(case.dispatcher, ElasticDLOptions(task_timeout_s=10))
    case.dispatcher.members.resume(100.0)
    case.adapter.resume(100.0)
    for now in (102.0, 104.0, 106.0, 108.0):
        assert case.tend(now) == []
    assert case.report(task, 109.0)


def test_a_failed_batch_that_is_trained_on_later_is_forgiven() -> None:
    case = Case()
    for now in (1.0, 2.0):
        assert case.report(case.get(1, now), now, "flaky")
    order = [case.get(1, 3.0) for _ in range(4)]
    assert all(case.report(task, 4.0) for task in order)
    assert (case.status.acknowledged, case.status.quarantined, case.status.finished) == (8, 0, True)


def test_the_third_failure_of_a_batch_names_its_records() -> None:
    case = Case(TrainingParams(batch_size=2, num_epochs=1, dataset_size=2))
    for now in (1.0, 2.0):
        case.report(case.get(1, now), now, "broken")
    with pytest.raises(TooManyBadRecords, match=r"record 1 of ''.*broken"):
        case.report(case.get(2, 3.0), 3.0, "broken")
    assert [bad.index for bad in case.status.quarantine] == [0, 1]


def test_with_max_bad_records_the_job_goes_on_without_a_batch_that_always_fails() -> None:
    case = Case(max_bad_records=2)
    seen: list[int] = []
    for now in range(20):
        task = case.get(1, now)
        if task is None:
            break
        seen += [] if task.start == 4 else [task.start, task.start + 1]
        assert case.report(task, now, "broken" if task.start == 4 else "")
    assert sorted(seen) == [0, 1, 2, 3, 6, 7]
    assert [bad.index for bad in case.status.quarantine] == [4, 5]
    assert (case.status.acknowledged, case.status.finished) == (6, True)


def test_parts_of_a_batch_that_are_too_many_for_one_task_wait_again() -> None:
    case = Case()
    call, _ = case.adapter.ask(GetTaskCall(worker_id=1), "training", 0.0)
    ledger = case.dispatcher.find_ledger("training")
    assert ledger is not None
    grants: tuple[Grant, ...] = ledger.lease(call.session, epoch=call.epoch, count=3)[2]
    task = case.adapter.hand_out(call, grants, 0.0)
    assert (task.start, task.end, case.status.leased, case.status.todo) == (0, 2, 2, 6)


def test_two_datasets_of_one_type_are_told_apart_by_the_usual_name() -> None:
    dispatcher = Dispatcher(ledger_id="ledger")
    adapter = ElasticDLAdapter(dispatcher)
    for name in ("mine", "yours"):
        dispatcher.define(Registration(name=name, sources=(Source(name="", count=4),)))
    with pytest.raises(InvalidArgument, match="'mine', 'yours'"):
        adapter.find(TaskType.NONE)
    dispatcher.define(Registration(name="training", sources=(Source(name="", count=4),)))
    found = adapter.find(TaskType.NONE)
    assert found is not None
    assert found.spec.name == "training"


def test_names_of_tasks_are_computed_both_ways_and_differ_from_ledger_to_ledger() -> None:
    names, others = TaskNames("a"), TaskNames("b")
    tasks = [(task, kind) for task in (1, 2, 3, 10**6, 5 * 10**8) for kind in (TaskType(1), TaskType(3))]
    given = [names.name(*task) for task in tasks]
    assert [names.resolve(name) for name in given] == tasks
    assert all(1 <= name <= MAX_INT32 for name in given)
    assert len({*given, *(others.name(*task) for task in tasks)}) == 2 * len(tasks)
    live = {(task, TaskType.TRAINING) for task in range(1, 1001)}
    assert not live & {others.resolve(names.name(*task)) for task in live}


BOTH = """
from google.protobuf import descriptor_pb2, descriptor_pool
from edl_torch.elasticdl import elasticdl_pb2
from edl_torch.rpc import edl_torch_pb2
theirs = descriptor_pb2.FileDescriptorProto()
elasticdl_pb2.DESCRIPTOR.CopyToProto(theirs)
theirs.name, theirs.package = "elasticai_api/proto/elasticai_api.proto", "proto"
for message in theirs.message_type:
    for field in (field for field in message.field if field.type_name):
        field.type_name = field.type_name.replace(".edl_torch.elasticdl.", ".proto.")
pool = descriptor_pool.Default()
pool.AddSerializedFile(theirs.SerializeToString())
print(pool.FindMessageTypeByName("proto.Task").file.name, elasticdl_pb2.Task.DESCRIPTOR.full_name)
"""


def test_both_projects_messages_live_in_one_process() -> None:
    done = subprocess.run([sys.executable, "-c", BOTH], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.stdout.split() == ["elasticai_api/proto/elasticai_api.proto", "edl_torch.elasticdl.Task"]


class Held(GroupCommit):
    """A journal on a disk that does not answer until it is let `go`."""

    def __init__(self, changes: Changes, collect: Callable[[tuple[Key, ...]], Callable[[], None]]) -> None:
        super().__init__(changes, collect)
        self.go = asyncio.Event()
        self.asked = asyncio.Event()

    async def committed(self) -> None:
        self.asked.set()
        await self.go.wait()


class Context:
    """What a servicer needs of grpc's."""

    def time_remaining(self) -> None:
        return None


async def cancelled(dispatcher: Dispatcher) -> tuple[int, int]:
    commits = Held(Changes(), lambda keys: lambda: None)
    adapter = ElasticDLAdapter(dispatcher)
    adapter.define(PARAMS)
    servicer = ElasticDLServicer(MasterHost(dispatcher, commits=commits), adapter)
    call = asyncio.create_task(servicer.get_task(get_task_request(1), Context()))  # type: ignore[arg-type]
    await asyncio.wait_for(commits.asked.wait(), 10)
    leased = dispatcher.dataset_status("training").leased
    assert not call.done()
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    commits.go.set()
    await commits.close()
    return leased, dispatcher.dataset_status("training").leased


def test_a_task_whose_worker_hung_up_before_the_answer_waits_again() -> None:
    assert asyncio.run(cancelled(Dispatcher(ledger_id="ledger"))) == (2, 0)


# ElasticDL's calls as values --------------------------------------------------------------------------------


SPEC = DatasetSpec(name="d", sources=(Source(name="a", count=100),), records_per_shard=10)
TWO = (Source(name="a", count=100), Source(name="empty", count=0), Source(name="b", count=100))
KINDS = [TaskType.NONE, TaskType.TRAINING, TaskType.EVALUATION, TaskType.PREDICTION]
IN_WINDOWS = {"shuffle_shards": True, "shuffle_in_shard": True, "shuffle_window": 2}


def test_ids_never_change() -> None:
    assert TaskNames("L").name(1, TaskType.TRAINING) == 379_056_163


def test_ids_reach_from_one_to_the_largest_of_32_bits() -> None:
    names = TaskNames("L")
    last, kind = divmod(MAX_INT32 - 1, 4)
    assert names.resolve(names.name(last, TaskType(kind))) == (last, TaskType(kind))
    with pytest.raises(InvalidArgument, match=r"has no id.*--records_per_task"):
        names.name(last, TaskType(kind + 1))
    for outside in (0, -1, -(2**31), MAX_INT32 + 1):
        assert names.resolve(outside) == (0, TaskType.NONE)
    for inside in (1, MAX_INT32):
        task, kind_inside = names.resolve(inside)
        assert names.name(task, kind_inside) == inside


@pytest.mark.parametrize(
    ("result", "failure"),
    [
        ({}, ""),
        ({"error": "torn"}, "torn"),
        ({"error": "torn", "failed_records": 2}, "torn"),
        ({"failed_records": 2}, "the trainer counted 2 failed record(s) and gave no reason"),
    ],
)
def test_a_result_fails_by_its_error_or_by_its_count(result: dict[str, Any], failure: str) -> None:
    assert TaskResult(task_id=1, **result).failure == failure


@pytest.mark.parametrize(
    "fits",
    [
        {},
        {"sources": TWO},
        {"sources": TWO, "shuffle_shards": True},
        {"sources": TWO, "shuffle_in_shard": True},
        {"shuffle": True},
        IN_WINDOWS,
        {"records_per_shard": 10**9, "sources": (Source(name="a", count=10**9),)},  # a name, two numbers
    ],
)
def test_shards_of_one_storage_are_expressible(fits: dict[str, Any]) -> None:
    check_expressible(replace(SPEC, **fits))


@pytest.mark.parametrize(("mixed", "remedy"), [({"shuffle": True}, "--shuffle,"), (IN_WINDOWS, "_window,")])
def test_records_of_two_storages_have_no_name_together(mixed: dict[str, Any], remedy: str) -> None:
    with pytest.raises(InvalidArgument, match=f"of 2 storages together.* instead of .*{remedy}"):
        check_expressible(replace(SPEC, sources=TWO, **mixed))


@pytest.mark.parametrize(
    ("start", "count", "most"),
    [
        (0, 2**27, (2**26 - 2**16) // 4),
        (0, 2**28, (2**26 - 2**16) // 5),
        (2**27, 2**27, (2**26 - 2**16) // 5),
    ],
)
def test_the_indices_of_a_shard_fit_into_a_message(start: int, count: int, most: int) -> None:
    """Seven bits of an index are a byte."""
    sources = (Source(name="a", start=start, count=count),)
    spec = replace(SPEC, sources=sources, shuffle_in_shard=True, records_per_shard=most)
    check_expressible(spec)
    with pytest.raises(InvalidArgument, match=f"must fit into 64 MiB, so {most} is the most"):
        check_expressible(replace(spec, records_per_shard=most + 1))


# How long ElasticDL's workers wait for what: on a loop with a time of its own, without grpc -----------------


TASK_TIMEOUT_S = 300.0
ONE_TASK = {"batch_size": 5, "num_epochs": 1, "dataset_size": 5}


class Refused(Exception):
    """What a caller would be told."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(code, details)
        self.code, self.details = code, details


class Call:
    """One call: how long its caller still waits, None for ever."""

    def __init__(self, remaining_s: float | None) -> None:
        self._remaining_s = remaining_s

    def time_remaining(self) -> float | None:
        return self._remaining_s

    async def abort(self, code: grpc.StatusCode, details: str, metadata: object) -> None:
        raise Refused(code, details)


class Adapters:
    """A master that workers ask without a network."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        clock = asyncio.get_running_loop().time
        self.host = MasterHost(dispatcher, clock=clock)
        adapter = ElasticDLAdapter(dispatcher, ElasticDLOptions(task_timeout_s=TASK_TIMEOUT_S))
        self.servicer = ElasticDLServicer(self.host, adapter)

    async def get(self, worker: int, *, within_s: float | None = None) -> WireTask:
        answer = await self.servicer.get_task(get_task_request(worker, 0), Call(within_s))  # type: ignore[arg-type]
        return WireTask.decode(answer)

    async def params(self, **params: int) -> None:
        await self.servicer.report_training_params(params_request(**params), Call(None))  # type: ignore[arg-type]

    async def report(self, task: WireTask, why: str = "") -> None:
        await self.servicer.report_task_result(result_request(task.task_id, why, None), Call(None))  # type: ignore[arg-type]

    @property
    def training(self) -> tuple[int, int, int]:
        """Records acknowledged, leased and in quarantine."""
        status = self.dispatcher.dataset_status("training")
        return status.acknowledged, status.leased, len(status.quarantine)


@asynccontextmanager
async def adapters(**options: float) -> AsyncIterator[Adapters]:
    made = Adapters(Dispatcher(ledger_id="ledger", **options))  # type: ignore[arg-type]
    made.host.start()
    made.servicer.start()
    yield made
    await made.servicer.close()
    await made.host.close()


def now() -> float:
    return asyncio.get_running_loop().time()


@in_virtual_time
async def test_where_nobody_describes_the_data_the_call_ends_in_an_error_that_says_so() -> None:
    async with adapters() as master:
        with pytest.raises(Refused) as refused:
            await master.get(0)
        assert now() == pytest.approx(TASK_TIMEOUT_S)
        assert refused.value.code is grpc.StatusCode.NOT_FOUND
        assert "--training_data" in refused.value.details


@in_virtual_time
async def test_a_call_with_a_deadline_is_told_before_it_to_ask_again() -> None:
    async with adapters() as master:
        assert (await master.get(0, within_s=10.0)).type == WAIT  # nobody has described the data
        assert now() == pytest.approx(10.0 - MARGIN_S)
        await master.params(**ONE_TASK)
        assert (await master.get(0)).type == TRAINING
        assert (await master.get(1, within_s=10.0)).type == WAIT  # another one has all of it
        assert now() == pytest.approx(2 * (10.0 - MARGIN_S))


@in_virtual_time
async def test_an_overdue_task_goes_to_another_and_its_late_report_is_ignored() -> None:
    async with adapters() as master:
        await master.params(**ONE_TASK | {"batch_size": 10, "dataset_size": 20})
        late = await master.get(0)
        assert late.numbers == list(range(10))
        await master.report(await master.get(1))
        again = await master.get(1)  # waits in the call until the time of the other is over
        assert TASK_TIMEOUT_S <= now() <= TASK_TIMEOUT_S + 11
        assert again.numbers == late.numbers
        assert again.task_id != late.task_id
        await master.report(late)
        await master.report(late, "it failed, too")
        assert master.training == (10, 10, 0)
        await master.report(again)
        assert (await master.get(1)).is_end
        assert master.training == (20, 0, 0)


@in_virtual_time
async def test_deaths_are_never_counted_against_a_task() -> None:
    async with adapters() as master:
        await master.params(**ONE_TASK)
        for number in range(4):
            assert (await master.get(number)).type == TRAINING  # and is never heard of again
        task = await master.get(7)
        await master.report(task)
        assert (await master.get(7)).is_end
        assert master.training == (5, 0, 0)
