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

class PassState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    OPEN: _ClassVar[PassState]
    EPOCH_OVER: _ClassVar[PassState]
    FINISHED: _ClassVar[PassState]
NONE: TaskType
TRAINING: TaskType
EVALUATION: TaskType
PREDICTION: TaskType
WAIT: TaskType
TRAIN_END_CALLBACK: TaskType
OPEN: PassState
EPOCH_OVER: PassState
FINISHED: PassState

class Source(_message.Message):
    name: str
    start: int
    count: int
    def __init__(self, name: _Optional[str] = ..., start: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class SourceList(_message.Message):
    sources: _containers.RepeatedCompositeFieldContainer[Source]
    def __init__(self, sources: _Optional[_Iterable[_Union[Source, _Mapping]]] = ...) -> None: ...

class Component(_message.Message):
    name: str
    sources: _containers.RepeatedCompositeFieldContainer[Source]
    records_per_shard: int
    shuffle: bool
    shuffle_shards: bool
    shuffle_in_shard: bool
    shuffle_window: int
    fingerprint: str
    max_passes: int
    left: bool
    mean_length: float
    def __init__(self, name: _Optional[str] = ..., sources: _Optional[_Iterable[_Union[Source, _Mapping]]] = ..., records_per_shard: _Optional[int] = ..., shuffle: bool = ..., shuffle_shards: bool = ..., shuffle_in_shard: bool = ..., shuffle_window: _Optional[int] = ..., fingerprint: _Optional[str] = ..., max_passes: _Optional[int] = ..., left: bool = ..., mean_length: _Optional[float] = ...) -> None: ...

class ComponentList(_message.Message):
    components: _containers.RepeatedCompositeFieldContainer[Component]
    def __init__(self, components: _Optional[_Iterable[_Union[Component, _Mapping]]] = ...) -> None: ...

class MixtureWeights(_message.Message):
    start: int
    parts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, start: _Optional[int] = ..., parts: _Optional[_Iterable[int]] = ...) -> None: ...

class MixtureWeightsList(_message.Message):
    weights: _containers.RepeatedCompositeFieldContainer[MixtureWeights]
    def __init__(self, weights: _Optional[_Iterable[_Union[MixtureWeights, _Mapping]]] = ...) -> None: ...

class MixtureSegment(_message.Message):
    number: int
    start: int
    parts: _containers.RepeatedScalarFieldContainer[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    lags: _containers.RepeatedScalarFieldContainer[int]
    scale: int
    turn: int
    key: str
    def __init__(self, number: _Optional[int] = ..., start: _Optional[int] = ..., parts: _Optional[_Iterable[int]] = ..., counts: _Optional[_Iterable[int]] = ..., lags: _Optional[_Iterable[int]] = ..., scale: _Optional[int] = ..., turn: _Optional[int] = ..., key: _Optional[str] = ...) -> None: ...

class Registration(_message.Message):
    name: str
    sources: SourceList
    records_per_shard: int
    seed: int
    shuffle: bool
    shuffle_shards: bool
    shuffle_in_shard: bool
    task_type: TaskType
    num_epochs: int
    epoch_barrier: bool
    max_bad_records: int
    shuffle_window: int
    fingerprint: str
    components: ComponentList
    weights: MixtureWeightsList
    stops: str
    turn: int
    def __init__(self, name: _Optional[str] = ..., sources: _Optional[_Union[SourceList, _Mapping]] = ..., records_per_shard: _Optional[int] = ..., seed: _Optional[int] = ..., shuffle: bool = ..., shuffle_shards: bool = ..., shuffle_in_shard: bool = ..., task_type: _Optional[_Union[TaskType, str]] = ..., num_epochs: _Optional[int] = ..., epoch_barrier: bool = ..., max_bad_records: _Optional[int] = ..., shuffle_window: _Optional[int] = ..., fingerprint: _Optional[str] = ..., components: _Optional[_Union[ComponentList, _Mapping]] = ..., weights: _Optional[_Union[MixtureWeightsList, _Mapping]] = ..., stops: _Optional[str] = ..., turn: _Optional[int] = ...) -> None: ...

class DatasetSpec(_message.Message):
    name: str
    sources: _containers.RepeatedCompositeFieldContainer[Source]
    records_per_shard: int
    seed: int
    shuffle: bool
    shuffle_shards: bool
    shuffle_in_shard: bool
    task_type: TaskType
    num_epochs: int
    epoch_barrier: bool
    max_bad_records: int
    shuffle_window: int
    fingerprint: str
    components: _containers.RepeatedCompositeFieldContainer[Component]
    weights: _containers.RepeatedCompositeFieldContainer[MixtureWeights]
    stops: str
    turn: int
    segments: _containers.RepeatedCompositeFieldContainer[MixtureSegment]
    def __init__(self, name: _Optional[str] = ..., sources: _Optional[_Iterable[_Union[Source, _Mapping]]] = ..., records_per_shard: _Optional[int] = ..., seed: _Optional[int] = ..., shuffle: bool = ..., shuffle_shards: bool = ..., shuffle_in_shard: bool = ..., task_type: _Optional[_Union[TaskType, str]] = ..., num_epochs: _Optional[int] = ..., epoch_barrier: bool = ..., max_bad_records: _Optional[int] = ..., shuffle_window: _Optional[int] = ..., fingerprint: _Optional[str] = ..., components: _Optional[_Iterable[_Union[Component, _Mapping]]] = ..., weights: _Optional[_Iterable[_Union[MixtureWeights, _Mapping]]] = ..., stops: _Optional[str] = ..., turn: _Optional[int] = ..., segments: _Optional[_Iterable[_Union[MixtureSegment, _Mapping]]] = ...) -> None: ...

class RegisterRequest(_message.Message):
    session: str
    worker_id: str
    batch_size: int
    registration: Registration
    def __init__(self, session: _Optional[str] = ..., worker_id: _Optional[str] = ..., batch_size: _Optional[int] = ..., registration: _Optional[_Union[Registration, _Mapping]] = ...) -> None: ...

class RegisterResponse(_message.Message):
    spec: DatasetSpec
    ledger: str
    lineage: int
    epoch: int
    member: int
    def __init__(self, spec: _Optional[_Union[DatasetSpec, _Mapping]] = ..., ledger: _Optional[str] = ..., lineage: _Optional[int] = ..., epoch: _Optional[int] = ..., member: _Optional[int] = ...) -> None: ...

class AttendRequest(_message.Message):
    session: str
    def __init__(self, session: _Optional[str] = ...) -> None: ...

class AttendEvent(_message.Message):
    attending: Attending
    wanted: Wanted
    def __init__(self, attending: _Optional[_Union[Attending, _Mapping]] = ..., wanted: _Optional[_Union[Wanted, _Mapping]] = ...) -> None: ...

class Attending(_message.Message):
    ledger: str
    lease_timeout_s: float
    grace_s: float
    progress_timeout_s: float
    def __init__(self, ledger: _Optional[str] = ..., lease_timeout_s: _Optional[float] = ..., grace_s: _Optional[float] = ..., progress_timeout_s: _Optional[float] = ...) -> None: ...

class Wanted(_message.Message):
    dataset: str
    def __init__(self, dataset: _Optional[str] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    session: str
    progress: int
    member: int
    measures: Measures
    def __init__(self, session: _Optional[str] = ..., progress: _Optional[int] = ..., member: _Optional[int] = ..., measures: _Optional[_Union[Measures, _Mapping]] = ...) -> None: ...

class Histogram(_message.Message):
    counts: _containers.RepeatedScalarFieldContainer[int]
    sum_s: float
    def __init__(self, counts: _Optional[_Iterable[int]] = ..., sum_s: _Optional[float] = ...) -> None: ...

class Measures(_message.Message):
    batches: int
    records: int
    waited: Histogram
    stepped: Histogram
    waited_for_ranks_s: float
    timed: int
    read_s: float
    transform_s: float
    def __init__(self, batches: _Optional[int] = ..., records: _Optional[int] = ..., waited: _Optional[_Union[Histogram, _Mapping]] = ..., stepped: _Optional[_Union[Histogram, _Mapping]] = ..., waited_for_ranks_s: _Optional[float] = ..., timed: _Optional[int] = ..., read_s: _Optional[float] = ..., transform_s: _Optional[float] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    def __init__(self) -> None: ...

class LeaveRequest(_message.Message):
    session: str
    member: int
    def __init__(self, session: _Optional[str] = ..., member: _Optional[int] = ...) -> None: ...

class LeaveResponse(_message.Message):
    def __init__(self) -> None: ...

class LeaseRequest(_message.Message):
    session: str
    dataset: str
    ledger: str
    lineage: int
    request: int
    epoch: int
    count: int
    drained: bool
    wait_s: float
    member: int
    ahead: bool
    asked: int
    reported: int
    segment: int
    def __init__(self, session: _Optional[str] = ..., dataset: _Optional[str] = ..., ledger: _Optional[str] = ..., lineage: _Optional[int] = ..., request: _Optional[int] = ..., epoch: _Optional[int] = ..., count: _Optional[int] = ..., drained: bool = ..., wait_s: _Optional[float] = ..., member: _Optional[int] = ..., ahead: bool = ..., asked: _Optional[int] = ..., reported: _Optional[int] = ..., segment: _Optional[int] = ...) -> None: ...

class Grant(_message.Message):
    task: int
    attempt: int
    epoch: int
    shard: int
    skip: int
    limit: int
    bundle: int
    def __init__(self, task: _Optional[int] = ..., attempt: _Optional[int] = ..., epoch: _Optional[int] = ..., shard: _Optional[int] = ..., skip: _Optional[int] = ..., limit: _Optional[int] = ..., bundle: _Optional[int] = ...) -> None: ...

class LeaseResponse(_message.Message):
    request: int
    epoch: int
    state: PassState
    grants: _containers.RepeatedCompositeFieldContainer[Grant]
    segments: _containers.RepeatedCompositeFieldContainer[MixtureSegment]
    def __init__(self, request: _Optional[int] = ..., epoch: _Optional[int] = ..., state: _Optional[_Union[PassState, str]] = ..., grants: _Optional[_Iterable[_Union[Grant, _Mapping]]] = ..., segments: _Optional[_Iterable[_Union[MixtureSegment, _Mapping]]] = ...) -> None: ...

class Failure(_message.Message):
    task: int
    attempt: int
    position: int
    reason: str
    def __init__(self, task: _Optional[int] = ..., attempt: _Optional[int] = ..., position: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Acknowledgement(_message.Message):
    task: int
    attempt: int
    upto: int
    start: int
    def __init__(self, task: _Optional[int] = ..., attempt: _Optional[int] = ..., upto: _Optional[int] = ..., start: _Optional[int] = ...) -> None: ...

class GiveBack(_message.Message):
    task: int
    attempt: int
    start: int
    remainder: bool
    upto: int
    def __init__(self, task: _Optional[int] = ..., attempt: _Optional[int] = ..., start: _Optional[int] = ..., remainder: bool = ..., upto: _Optional[int] = ...) -> None: ...

class ReportRequest(_message.Message):
    session: str
    dataset: str
    ledger: str
    lineage: int
    request: int
    failures: _containers.RepeatedCompositeFieldContainer[Failure]
    acknowledgements: _containers.RepeatedCompositeFieldContainer[Acknowledgement]
    give_backs: _containers.RepeatedCompositeFieldContainer[GiveBack]
    member: int
    asked: int
    reported: int
    def __init__(self, session: _Optional[str] = ..., dataset: _Optional[str] = ..., ledger: _Optional[str] = ..., lineage: _Optional[int] = ..., request: _Optional[int] = ..., failures: _Optional[_Iterable[_Union[Failure, _Mapping]]] = ..., acknowledgements: _Optional[_Iterable[_Union[Acknowledgement, _Mapping]]] = ..., give_backs: _Optional[_Iterable[_Union[GiveBack, _Mapping]]] = ..., member: _Optional[int] = ..., asked: _Optional[int] = ..., reported: _Optional[int] = ...) -> None: ...

class ReportResponse(_message.Message):
    request: int
    stale: _containers.RepeatedScalarFieldContainer[int]
    wanted: bool
    def __init__(self, request: _Optional[int] = ..., stale: _Optional[_Iterable[int]] = ..., wanted: bool = ...) -> None: ...

class LeaseId(_message.Message):
    task: int
    attempt: int
    def __init__(self, task: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class ConfirmRequest(_message.Message):
    session: str
    dataset: str
    ledger: str
    lineage: int
    leases: _containers.RepeatedCompositeFieldContainer[LeaseId]
    member: int
    asked: int
    reported: int
    def __init__(self, session: _Optional[str] = ..., dataset: _Optional[str] = ..., ledger: _Optional[str] = ..., lineage: _Optional[int] = ..., leases: _Optional[_Iterable[_Union[LeaseId, _Mapping]]] = ..., member: _Optional[int] = ..., asked: _Optional[int] = ..., reported: _Optional[int] = ...) -> None: ...

class ConfirmResponse(_message.Message):
    void: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, void: _Optional[_Iterable[int]] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    dataset: str
    session: str
    ledger: str
    lineage: int
    member: int
    asked: int
    reported: int
    def __init__(self, dataset: _Optional[str] = ..., session: _Optional[str] = ..., ledger: _Optional[str] = ..., lineage: _Optional[int] = ..., member: _Optional[int] = ..., asked: _Optional[int] = ..., reported: _Optional[int] = ...) -> None: ...

class SnapshotResponse(_message.Message):
    token: str
    def __init__(self, token: _Optional[str] = ...) -> None: ...

class RestoreRequest(_message.Message):
    dataset: str
    token: str
    session: str
    ledger: str
    lineage: int
    member: int
    request: int
    asked: int
    reported: int
    def __init__(self, dataset: _Optional[str] = ..., token: _Optional[str] = ..., session: _Optional[str] = ..., ledger: _Optional[str] = ..., lineage: _Optional[int] = ..., member: _Optional[int] = ..., request: _Optional[int] = ..., asked: _Optional[int] = ..., reported: _Optional[int] = ...) -> None: ...

class RestoreResponse(_message.Message):
    lineage: int
    def __init__(self, lineage: _Optional[int] = ...) -> None: ...

class ProgressRequest(_message.Message):
    dataset: str
    session: str
    ledger: str
    lineage: int
    member: int
    asked: int
    reported: int
    def __init__(self, dataset: _Optional[str] = ..., session: _Optional[str] = ..., ledger: _Optional[str] = ..., lineage: _Optional[int] = ..., member: _Optional[int] = ..., asked: _Optional[int] = ..., reported: _Optional[int] = ...) -> None: ...

class ProgressResponse(_message.Message):
    dataset: DatasetStatus
    def __init__(self, dataset: _Optional[_Union[DatasetStatus, _Mapping]] = ...) -> None: ...

class SetWeightsRequest(_message.Message):
    class WeightsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    dataset: str
    ledger: str
    lineage: int
    replaces: int
    key: str
    weights: _containers.ScalarMap[str, float]
    def __init__(self, dataset: _Optional[str] = ..., ledger: _Optional[str] = ..., lineage: _Optional[int] = ..., replaces: _Optional[int] = ..., key: _Optional[str] = ..., weights: _Optional[_Mapping[str, float]] = ...) -> None: ...

class SetWeightsResponse(_message.Message):
    segment: MixtureSegment
    def __init__(self, segment: _Optional[_Union[MixtureSegment, _Mapping]] = ...) -> None: ...

class StatusRequest(_message.Message):
    dataset: str
    def __init__(self, dataset: _Optional[str] = ...) -> None: ...

class StatusResponse(_message.Message):
    class SuspendedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class EventCountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    ledger: str
    durable: bool
    datasets: _containers.RepeatedCompositeFieldContainer[DatasetStatus]
    trainers: _containers.RepeatedCompositeFieldContainer[TrainerStatus]
    suspended: _containers.ScalarMap[str, str]
    time: float
    started_at: float
    events: _containers.RepeatedCompositeFieldContainer[Event]
    departed: _containers.RepeatedCompositeFieldContainer[Departed]
    event_counts: _containers.ScalarMap[str, int]
    def __init__(self, ledger: _Optional[str] = ..., durable: bool = ..., datasets: _Optional[_Iterable[_Union[DatasetStatus, _Mapping]]] = ..., trainers: _Optional[_Iterable[_Union[TrainerStatus, _Mapping]]] = ..., suspended: _Optional[_Mapping[str, str]] = ..., time: _Optional[float] = ..., started_at: _Optional[float] = ..., events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ..., departed: _Optional[_Iterable[_Union[Departed, _Mapping]]] = ..., event_counts: _Optional[_Mapping[str, int]] = ...) -> None: ...

class Event(_message.Message):
    number: int
    at: float
    kind: str
    dataset: str
    worker_id: str
    count: int
    slices: int
    records: int
    text: str
    def __init__(self, number: _Optional[int] = ..., at: _Optional[float] = ..., kind: _Optional[str] = ..., dataset: _Optional[str] = ..., worker_id: _Optional[str] = ..., count: _Optional[int] = ..., slices: _Optional[int] = ..., records: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class Departed(_message.Message):
    session: str
    worker_id: str
    at: float
    died: bool
    why: str
    trained: int
    slices: int
    records: int
    def __init__(self, session: _Optional[str] = ..., worker_id: _Optional[str] = ..., at: _Optional[float] = ..., died: bool = ..., why: _Optional[str] = ..., trained: _Optional[int] = ..., slices: _Optional[int] = ..., records: _Optional[int] = ...) -> None: ...

class Picture(_message.Message):
    epoch: int
    waiting: _containers.RepeatedScalarFieldContainer[int]
    lent: _containers.RepeatedScalarFieldContainer[int]
    done: _containers.RepeatedScalarFieldContainer[int]
    returned: _containers.RepeatedScalarFieldContainer[int]
    quarantined: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, epoch: _Optional[int] = ..., waiting: _Optional[_Iterable[int]] = ..., lent: _Optional[_Iterable[int]] = ..., done: _Optional[_Iterable[int]] = ..., returned: _Optional[_Iterable[int]] = ..., quarantined: _Optional[_Iterable[int]] = ...) -> None: ...

class QuarantinedRecord(_message.Message):
    epoch: int
    shard: int
    position: int
    name: str
    index: int
    reason: str
    passes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, epoch: _Optional[int] = ..., shard: _Optional[int] = ..., position: _Optional[int] = ..., name: _Optional[str] = ..., index: _Optional[int] = ..., reason: _Optional[str] = ..., passes: _Optional[_Iterable[int]] = ...) -> None: ...

class DatasetStatus(_message.Message):
    dataset: str
    task_type: TaskType
    epoch: int
    num_epochs: int
    size: int
    shards: int
    shards_left: int
    todo: int
    leased: int
    leases: int
    acknowledged: int
    quarantined: int
    dropped: int
    finished: bool
    trainers: int
    failure: str
    quarantine: _containers.RepeatedCompositeFieldContainer[QuarantinedRecord]
    ledger: str
    lineage: int
    rate: float
    returned_slices: int
    returned_records: int
    given_back: int
    checkpoints: int
    restores: int
    picture: Picture
    components: _containers.RepeatedCompositeFieldContainer[ComponentStatus]
    segment: int
    def __init__(self, dataset: _Optional[str] = ..., task_type: _Optional[_Union[TaskType, str]] = ..., epoch: _Optional[int] = ..., num_epochs: _Optional[int] = ..., size: _Optional[int] = ..., shards: _Optional[int] = ..., shards_left: _Optional[int] = ..., todo: _Optional[int] = ..., leased: _Optional[int] = ..., leases: _Optional[int] = ..., acknowledged: _Optional[int] = ..., quarantined: _Optional[int] = ..., dropped: _Optional[int] = ..., finished: bool = ..., trainers: _Optional[int] = ..., failure: _Optional[str] = ..., quarantine: _Optional[_Iterable[_Union[QuarantinedRecord, _Mapping]]] = ..., ledger: _Optional[str] = ..., lineage: _Optional[int] = ..., rate: _Optional[float] = ..., returned_slices: _Optional[int] = ..., returned_records: _Optional[int] = ..., given_back: _Optional[int] = ..., checkpoints: _Optional[int] = ..., restores: _Optional[int] = ..., picture: _Optional[_Union[Picture, _Mapping]] = ..., components: _Optional[_Iterable[_Union[ComponentStatus, _Mapping]]] = ..., segment: _Optional[int] = ...) -> None: ...

class ComponentStatus(_message.Message):
    name: str
    size: int
    share: float
    wanted: float
    given: int
    open: int
    mean_length: float
    def __init__(self, name: _Optional[str] = ..., size: _Optional[int] = ..., share: _Optional[float] = ..., wanted: _Optional[float] = ..., given: _Optional[int] = ..., open: _Optional[int] = ..., mean_length: _Optional[float] = ...) -> None: ...

class TrainerStatus(_message.Message):
    session: str
    worker_id: str
    datasets: _containers.RepeatedScalarFieldContainer[str]
    leased: int
    idle_s: float
    since_progress_s: float
    measures: Measures
    state: str
    pace: float
    slow: bool
    trained: int
    leases: int
    oldest_lease_s: float
    def __init__(self, session: _Optional[str] = ..., worker_id: _Optional[str] = ..., datasets: _Optional[_Iterable[str]] = ..., leased: _Optional[int] = ..., idle_s: _Optional[float] = ..., since_progress_s: _Optional[float] = ..., measures: _Optional[_Union[Measures, _Mapping]] = ..., state: _Optional[str] = ..., pace: _Optional[float] = ..., slow: bool = ..., trained: _Optional[int] = ..., leases: _Optional[int] = ..., oldest_lease_s: _Optional[float] = ...) -> None: ...
