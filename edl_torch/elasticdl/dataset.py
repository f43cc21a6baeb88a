"""One dataset of an ElasticDL master, as a registration of ours describes it, and where its tasks lie in it.

It says what such a master is told and what cannot be said to it; it calls nobody.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from edl_torch.core.calls import RegisterCall
from edl_torch.core.permutation import Permutation, derive_key
from edl_torch.core.plan import Plan
from edl_torch.elasticdl.calls import MAX_INT32, ForeignTask, TrainingParams
from edl_torch.elasticdl.tasks import TaskLedger
from edl_torch.errors import DatasetConflict, InvalidArgument, UnknownDataset, Unsupported
from edl_torch.shard import DatasetSpec, IndexArray, Slice, TaskType

_PURPOSE = "elasticdl task records"


class ForeignDataset:
    """A trainer's part in a dataset. `params` is what the master is to be told, None where it takes nothing.

    The plan has one shard for each source: tasks of any size and place are slices of it.
    """

    def __init__(self, call: RegisterCall) -> None:
        registration = call.registration
        if registration.sources is None:
            raise UnknownDataset(
                f"dataset {registration.name!r}: ElasticDL's master does not tell a trainer what it has, so "
                f"the name alone is not enough: give the service a reader or dataset_size"
            )
        self.kind = registration.task_type or TaskType.TRAINING
        if self.kind is TaskType.PREDICTION:
            raise Unsupported(
                "ElasticDL's master hands out no PREDICTION tasks: start `edl-torch master --prediction_data`"
            )
        self.batch_size = call.batch_size
        self.ended = False
        self.sessions: set[str] = set()
        spec = DatasetSpec(
            name=registration.name,
            sources=registration.sources,
            records_per_shard=max((source.count for source in registration.sources), default=1) or 1,
            seed=registration.seed or 0,
            task_type=self.kind,
            max_bad_records=registration.max_bad_records or 0,
        )
        self.plan = Plan(spec)
        self.params = _params(call, self.plan.size) if self.kind is TaskType.TRAINING else None
        self.ledger = TaskLedger(self.plan)
        self._map = SourceMap(spec, shuffle=bool(registration.shuffle_in_shard))
        self._longest = 1

    def __repr__(self) -> str:
        return f"<ForeignDataset {self.plan.spec.name!r} {self.ledger}>"

    def take(self, task: ForeignTask) -> None:
        """Take in a task. Raises DatasetConflict for records that are not of this dataset."""
        self._longest = max(self._longest, task.end - task.start)
        self.ledger.take(task, self._map.slices(task, self._epoch_of(task)))

    def _epoch_of(self, task: ForeignTask) -> int:
        """For random augmentation, which differs from epoch to epoch: ElasticDL's ids count tasks from 1, and
        so tell the epoch but for those that were handed out twice."""
        if task.epoch is not None:
            return task.epoch
        return max(0, task.task_id - 1) * self._longest // self.plan.size

    def leave(self, session: str) -> bool:
        """Note that a session is over. Returns whether it was the last one here."""
        if session not in self.sessions:
            return False
        self.sessions.discard(session)
        return not self.sessions


def _params(call: RegisterCall, size: int) -> TrainingParams:
    registration = call.registration
    per_shard = registration.records_per_shard or 0
    if per_shard % call.batch_size:
        raise InvalidArgument(
            f"records_per_shard is {per_shard}: ElasticDL's master cuts shards in whole batches, so give a "
            f"multiple of batch_size={call.batch_size}, or num_minibatches_per_shard"
        )
    if size > MAX_INT32:
        raise InvalidArgument(
            f"dataset {registration.name!r} has {size} records: ElasticDL's protocol counts to {MAX_INT32}. "
            f"Use `edl-torch master`, which has no such limit"
        )
    return TrainingParams(
        batch_size=call.batch_size,
        num_epochs=1 if registration.num_epochs is None else registration.num_epochs,
        dataset_size=size,
        shuffle=bool(registration.shuffle),
        shuffle_shards=bool(registration.shuffle_shards),
        num_minibatches_per_shard=per_shard // call.batch_size,
    )


class SourceMap:
    """Slices for tasks, in a plan in which each source that has records is one shard.

    A task of an unnamed shard numbers the records of all sources together, one of a named shard those of that
    storage. With `shuffle` the records of a task that come in storage order are permuted among themselves.
    """

    def __init__(self, spec: DatasetSpec, *, shuffle: bool) -> None:
        self._spec = spec
        self._shuffle = shuffle
        self._sources = [source for source in spec.sources if source.count]
        counts = np.array([source.count for source in self._sources], dtype=np.int64)
        self._firsts = np.cumsum(counts) - counts  # the number of each source's first record, over all

    def slices(self, task: ForeignTask, epoch: int) -> tuple[Slice, ...]:
        """The records of the task in its order; runs of one source that ascend by one are one slice.

        Raises DatasetConflict for records that the sources do not have.
        """
        numbers = task.numbers
        if numbers is None and self._shuffle:
            permutation = Permutation(
                task.end - task.start, derive_key(self._spec.seed, epoch, _PURPOSE, task.start)
            )
            numbers = permutation.many(np.arange(task.end - task.start)) + task.start
        if numbers is not None:
            return tuple(self._runs(task.name, numbers, epoch))
        return tuple(self._range(task, epoch))

    def _range(self, task: ForeignTask, epoch: int) -> Iterator[Slice]:
        """Return the slices of a task that is a range of records; makes no list of their numbers."""
        at = task.start
        while at < task.end:
            shard, skip = self._place(task.name, at)
            limit = min(task.end - at, self._sources[shard].count - skip)
            yield Slice(epoch=epoch, shard=shard, skip=skip, limit=limit)
            at += limit

    def _runs(self, name: str, numbers: IndexArray, epoch: int) -> Iterator[Slice]:
        begins = np.flatnonzero(np.diff(numbers, prepend=numbers[0] - 2) != 1)
        for first, last in zip(begins, np.append(begins[1:], len(numbers)), strict=True):
            start = int(numbers[first])
            yield from self._range(ForeignTask(name=name, start=start, end=start + int(last - first)), epoch)

    def _place(self, name: str, number: int) -> tuple[int, int]:
        if not name:
            shard = int(np.searchsorted(self._firsts, number, side="right")) - 1
            if 0 <= number < self._spec.size:
                return shard, number - int(self._firsts[shard])
        for shard, source in enumerate(self._sources):
            if source.name == name and source.start <= number < source.start + source.count:
                return shard, number - source.start
        known = ", ".join(repr(source.name) for source in self._sources[:5])
        raise DatasetConflict(
            f"the master hands out record {number} of {name!r}, and this trainer's dataset "
            f"{self._spec.name!r} of {self._spec.size} records in {known} has none: give trainers and master "
            f"the same data, by the same names"
        )

    def __repr__(self) -> str:
        return f"<SourceMap {self._spec.name!r} sources={len(self._sources)}>"
