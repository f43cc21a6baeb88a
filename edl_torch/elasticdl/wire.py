"""Conversion of ElasticDL's calls to bytes and back: derived where that protocol has our names, else by hand.

Field numbers are in `elasticdl.proto`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np
from google.protobuf.message import DecodeError

from edl_torch.elasticdl import elasticdl_pb2 as pb
from edl_torch.elasticdl.calls import ForeignTask, GetTaskCall, TaskResult, TrainingParams
from edl_torch.errors import InvalidArgument
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

V = TypeVar("V")


class ForeignMessage(Generic[V]):
    """Values of one kind as bytes and back, by functions to a message and from one."""

    def __init__(self, to_wire: Callable[[V], Any], from_wire: Callable[[Any], V], message: type) -> None:
        self._to_wire = to_wire
        self._from_wire = from_wire
        self._message = message

    def write(self, value: V) -> bytes:
        """Return the value as bytes. Raises InvalidArgument for what the message cannot hold."""
        try:
            data: bytes = self._to_wire(value).SerializeToString()
        except (TypeError, ValueError) as exc:
            raise InvalidArgument(f"this cannot be said in ElasticDL's protocol: {exc}") from exc
        return data

    def read(self, data: bytes) -> V:
        """Return the value in these bytes. Raises InvalidArgument for bytes that are none."""
        message = self._message()
        try:
            message.ParseFromString(data)
            return self._from_wire(message)
        except (DecodeError, ValueError) as exc:
            raise InvalidArgument(
                f"these {len(data)} bytes are no {self._message.__name__} of ElasticDL's protocol: {exc}"
            ) from exc


def _derived(kind: type[V], message: type[Any]) -> ForeignMessage[V]:
    wire: Wire[V, Any] = Wire(kind, message)
    return ForeignMessage(wire.to_wire, wire.from_wire, message)


def _result_to_wire(result: TaskResult) -> pb.ReportTaskResultRequest:
    counters = {_FAIL_COUNT: result.failed_records} if result.failed_records else {}
    return pb.ReportTaskResultRequest(
        task_id=result.task_id, err_message=result.error, exec_counters=counters
    )


def _result_from_wire(message: pb.ReportTaskResultRequest) -> TaskResult:
    failed = max(0, message.exec_counters.get(_FAIL_COUNT, 0))  # other counters are passed over
    return TaskResult(task_id=message.task_id, error=message.err_message, failed_records=failed)


def _task_to_wire(task: ForeignTask) -> pb.Task:
    """It always has a shard, as those of ElasticDL's master have."""
    indices = () if task.numbers is None else task.numbers.tolist()
    return pb.Task(
        task_id=task.task_id,
        type=int(task.type),  # type: ignore[arg-type]
        shard=pb.Shard(name=task.name, start=task.start, end=task.end, indices=indices),
        extended_config={} if task.epoch is None else {_EPOCH: str(task.epoch)},
    )


def _task_from_wire(message: pb.Task) -> ForeignTask:
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


CALL = _derived(GetTaskCall, pb.GetTaskRequest)
RESULT = ForeignMessage(_result_to_wire, _result_from_wire, pb.ReportTaskResultRequest)
PARAMS = _derived(TrainingParams, pb.ReportTrainingParamsRequest)
TASK = ForeignMessage(_task_to_wire, _task_from_wire, pb.Task)
