"""Calls of ElasticDL clients and their answers, as values and as bytes; the ids of their tasks.

Conversion is derived where that protocol has our names, else by hand. Field numbers are in `elasticdl.proto`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from google.protobuf.message import DecodeError

from edl_torch.core.limits import MESSAGE_BYTES
from edl_torch.core.permutation import Permutation, derive_key
from edl_torch.elasticdl import elasticdl_pb2 as pb
from edl_torch.errors import InvalidArgument
from edl_torch.rpc.convert import Wire
from edl_torch.shard import DatasetSpec, IndexArray, Shuffle, TaskType

MAX_INT32 = 2**31 - 1
_OTHER_BYTES = 64 << 10  # of a task: all but its indices


@dataclass(frozen=True, slots=True, kw_only=True)
class GetTaskCall:
    """Call of a worker for a task; NONE as the type means training."""

    worker_id: int
    task_type: TaskType = TaskType.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignTask:
    """Task of ElasticDL: records `start` to `end` of `name`, or those of `numbers`, in order.

    WAIT means: ask again. NONE without a record means: the data is finished. `epoch` is None where the master
    does not tell it.
    """

    task_id: int = 0
    type: TaskType = TaskType.NONE
    name: str = ""
    start: int = 0
    end: int = 0
    numbers: IndexArray | None = None
    epoch: int | None = None

    @property
    def is_end(self) -> bool:
        """Whether it says that the data is finished."""
        return self.type is TaskType.NONE and self.start == self.end


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResult:
    """Report of a worker on a task, with an `error` if it failed; `failed_records` could not be used."""

    task_id: int
    error: str = ""
    failed_records: int = 0

    @property
    def failure(self) -> str:
        """What went wrong; '' when nothing did."""
        if self.error or not self.failed_records:
            return self.error
        return f"the trainer counted {self.failed_records} failed record(s) and gave no reason"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingParams:
    """Description of the training data by a worker: size and cut. 0 minibatches: the master decides."""

    batch_size: int
    num_epochs: int
    dataset_size: int
    shuffle: bool = False
    shuffle_shards: bool = False
    num_minibatches_per_shard: int = 0


class TaskNames:
    """Task ids of 31 bits for the tasks of one ledger: computed both ways, so that none is ever stored.

    That protocol's reports name neither worker nor master. The id is therefore a permutation, keyed by the
    ledger, of task number and type: one that another ledger gave out names a live task of this one only by a
    chance of (live tasks) in 2**31.
    """

    def __init__(self, ledger_id: str) -> None:
        self.ledger_id = ledger_id
        self._permutation = Permutation(MAX_INT32, derive_key(0, 0, f"elasticdl tasks of {ledger_id}"))

    def name(self, task: int, kind: TaskType) -> int:
        """Return the id of a task. Raises InvalidArgument where there are none left."""
        number = 4 * task + kind
        if number >= MAX_INT32:
            raise InvalidArgument(
                f"task {task} has no id in ElasticDL's protocol, which has 32 bits for it: make fewer and "
                f"larger tasks (--records_per_task, num_minibatches_per_shard)"
            )
        return 1 + self._permutation(number)

    def resolve(self, task_id: int) -> tuple[int, TaskType]:
        """Return the task and its type; of an id that was never given out, some task that there never was."""
        if not 1 <= task_id <= MAX_INT32:
            return 0, TaskType.NONE
        task, kind = divmod(self._permutation.inverse(task_id - 1), 4)
        return task, TaskType(kind)


def check_expressible(spec: DatasetSpec) -> None:
    """Raise InvalidArgument for a dataset whose shards do not fit into that protocol's messages."""
    if spec.order is Shuffle.NONE:
        return  # a name and two numbers
    if spec.order is Shuffle.MIXTURE:
        raise InvalidArgument(
            f"dataset {spec.name!r} is a mixture, and a shard of ElasticDL's protocol has one name: train "
            "on it with trainers of edl_torch"
        )
    used = [source for source in spec.sources if source.count]
    mixes_storages = spec.order is Shuffle.GLOBAL or spec.window > 1
    if mixes_storages and len(used) > 1:
        given = "--shuffle" if spec.order is Shuffle.GLOBAL else "--shuffle_window"
        raise InvalidArgument(
            f"dataset {spec.name!r} shuffles the records of {len(used)} storages together, and a shard of "
            f"ElasticDL's protocol has one name: use --shuffle_shards instead of {given}, or one storage"
        )
    largest = max(source.start + source.count for source in used)
    index_bytes = -(-largest.bit_length() // 7)  # a varint has 7 bits a byte
    most = (MESSAGE_BYTES - _OTHER_BYTES) // index_bytes
    if spec.largest_lease > most:
        raise InvalidArgument(
            f"dataset {spec.name!r} is shuffled, with {spec.largest_lease} records in a shard: the list "
            f"of their indices must fit into {MESSAGE_BYTES >> 20} MiB, so {most} is the most. Make smaller "
            f"shards (num_minibatches_per_shard, --records_per_task)"
        )


# As bytes ---------------------------------------------------------------------------------------------

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
