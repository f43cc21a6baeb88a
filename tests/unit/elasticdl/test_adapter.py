"""Who gets which task until when: the adapter with the time as a number, and names of tasks."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from by_number import get_task_request

from edl_torch.core.calls import Grant, Registration
from edl_torch.core.changes import Changes, Key
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.elasticdl.adapter import ElasticDLAdapter, ElasticDLOptions
from edl_torch.elasticdl.servicer import ElasticDLServicer
from edl_torch.elasticdl.wire import MAX_INT32, GetTaskCall, TaskNames, TaskResult, TrainingParams
from edl_torch.errors import InvalidArgument, TooManyBadRecords
from edl_torch.master.durable import GroupCommit
from edl_torch.master.host import MasterHost
from edl_torch.shard import Source, TaskType

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
    for nonsense in (0, -1, -(2**31), 2**31):
        assert names.resolve(nonsense) == (0, TaskType.NONE)
    with pytest.raises(InvalidArgument, match="--records_per_task"):
        names.name(2**30, TaskType.TRAINING)


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
