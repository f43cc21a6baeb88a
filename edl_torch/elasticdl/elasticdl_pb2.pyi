from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TaskType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    NONE: _ClassVar[TaskType]
    TRAINING: _ClassVar[TaskType]
    EVALUATION: _ClassVar[TaskType]
    PREDICTION: _ClassVar[TaskType]
    WAIT: _ClassVar[TaskType]
    TRAIN_END_CALLBACK: _ClassVar[TaskType]
NONE: TaskType
TRAINING: TaskType
EVALUATION: TaskType
PREDICTION: TaskType
WAIT: TaskType
TRAIN_END_CALLBACK: TaskType

class Shard(_message.Message):
    name: str
    start: int
    end: int
    indices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., indices: _Optional[_Iterable[int]] = ...) -> None: ...

class Task(_message.Message):
    class ExtendedConfigEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    task_id: int
    shard: Shard
    model_version: int
    type: TaskType
    extended_config: _containers.ScalarMap[str, str]
    def __init__(self, task_id: _Optional[int] = ..., shard: _Optional[_Union[Shard, _Mapping]] = ..., model_version: _Optional[int] = ..., type: _Optional[_Union[TaskType, str]] = ..., extended_config: _Optional[_Mapping[str, str]] = ...) -> None: ...

class GetTaskRequest(_message.Message):
    worker_id: int
    task_type: TaskType
    def __init__(self, worker_id: _Optional[int] = ..., task_type: _Optional[_Union[TaskType, str]] = ...) -> None: ...

class ReportTaskResultRequest(_message.Message):
    class ExecCountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    task_id: int
    err_message: str
    exec_counters: _containers.ScalarMap[str, int]
    def __init__(self, task_id: _Optional[int] = ..., err_message: _Optional[str] = ..., exec_counters: _Optional[_Mapping[str, int]] = ...) -> None: ...

class ReportTrainingParamsRequest(_message.Message):
    batch_size: int
    num_epochs: int
    dataset_size: int
    shuffle: bool
    shuffle_shards: bool
    num_minibatches_per_shard: int
    def __init__(self, batch_size: _Optional[int] = ..., num_epochs: _Optional[int] = ..., dataset_size: _Optional[int] = ..., shuffle: bool = ..., shuffle_shards: bool = ..., num_minibatches_per_shard: _Optional[int] = ...) -> None: ...
