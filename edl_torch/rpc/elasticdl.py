"""Conversion of ElasticDL's calls to bytes and back: derived where that protocol has our names, else by hand.

Field numbers are in `elasticdl.proto`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message

from edl_torch.core.elasticdl import ForeignTask, GetTaskCall, TaskResult, TrainingParams
from edl_torch.errors import InvalidArgument
from edl_torch.rpc import elasticdl_pb2 as pb
from edl_torch.rpc.convert import Wire
from edl_torch.shard import TaskType

SERVICE = "proto.Master"
GET_TASK, REPORT_TASK_RESULT, REPORT_TRAINING_PARAMS = (
    "get_task",
    "report_task_result",
    "report_training_params",
)
EMPTY = b""  # google.protobuf.Empty

_FAIL_COUNT = "fail_count"  # the key of `exec_counters` that ElasticDL's clients use
_EPOCH = "epoch"  # a key of `extended_config` that its clients pass over

_GET_TASK = Wire(GetTaskCall, pb.GetTaskRequest)
_PARAMS = Wire(TrainingParams, pb.ReportTrainingParamsRequest)

M = TypeVar("M", bound=Message)
T = TypeVar("T")


def _parsed(message: M, data: bytes, convert: Callable[[M], T]) -> T:
    try:
        message.ParseFromString(data)
        return convert(message)
    except (DecodeError, ValueError) as exc:
        name = type(message).__name__
        raise InvalidArgument(
            f"these {len(data)} bytes are no {name} of ElasticDL's protocol: {exc}"
        ) from exc


def _written(make: Callable[[], Message]) -> bytes:
    try:
        return make().SerializeToString()
    except (TypeError, ValueError) as exc:
        raise InvalidArgument(f"this cannot be said in ElasticDL's protocol: {exc}") from exc


# What a worker asks ------------------------------------------------------------------------------------


def get_task_to_wire(call: GetTaskCall) -> bytes:
    """Return a `GetTaskRequest` as bytes."""
    return _written(lambda: _GET_TASK.to_wire(call))


def get_task_from_wire(data: bytes) -> GetTaskCall:
    """Return the call in a `GetTaskRequest`."""
    return _parsed(pb.GetTaskRequest(), data, _GET_TASK.from_wire)


def result_to_wire(result: TaskResult) -> bytes:
    """Return a `ReportTaskResultRequest` as bytes."""
    counters = {_FAIL_COUNT: result.failed_records} if result.failed_records else {}
    return _written(
        lambda: pb.ReportTaskResultRequest(
            task_id=result.task_id, err_message=result.error, exec_counters=counters
        )
    )


def result_from_wire(data: bytes) -> TaskResult:
    """Return the result in a `ReportTaskResultRequest`; counters other than `fail_count` are passed over."""
    return _parsed(
        pb.ReportTaskResultRequest(),
        data,
        lambda m: TaskResult(
            task_id=m.task_id, error=m.err_message, failed_records=max(0, m.exec_counters.get(_FAIL_COUNT, 0))
        ),
    )


def params_to_wire(params: TrainingParams) -> bytes:
    """Return a `ReportTrainingParamsRequest` as bytes."""
    return _written(lambda: _PARAMS.to_wire(params))


def params_from_wire(data: bytes) -> TrainingParams:
    """Return the description in a `ReportTrainingParamsRequest`."""
    return _parsed(pb.ReportTrainingParamsRequest(), data, _PARAMS.from_wire)


# What it is answered -----------------------------------------------------------------------------------


def task_to_wire(task: ForeignTask) -> bytes:
    """Return a `Task`; it always has a shard, as those of ElasticDL's master have."""
    return _written(
        lambda: pb.Task(
            task_id=task.task_id,
            type=int(task.type),  # type: ignore[arg-type]
            shard=pb.Shard(
                name=task.name,
                start=task.start,
                end=task.end,
                indices=() if task.numbers is None else task.numbers.tolist(),
            ),
            extended_config={} if task.epoch is None else {_EPOCH: str(task.epoch)},
        )
    )


def task_from_wire(data: bytes) -> ForeignTask:
    """Return the task in a `Task`."""
    return _parsed(pb.Task(), data, _task)


def _task(message: pb.Task) -> ForeignTask:
    shard = message.shard
    numbers = np.array(shard.indices, dtype=np.int64) if shard.indices else None
    if shard.end < shard.start or (numbers is not None and len(numbers) != shard.end - shard.start):
        count = "no" if numbers is None else len(numbers)
        raise ValueError(f"records {shard.start}..{shard.end} with {count} indices")
    epoch = message.extended_config.get(_EPOCH, "")
    return ForeignTask(
        task_id=message.task_id,
        type=TaskType(message.type),
        name=shard.name,
        start=shard.start,
        end=shard.end,
        numbers=numbers,
        epoch=int(epoch) if epoch.isdecimal() else None,
    )
