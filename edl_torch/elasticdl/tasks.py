"""Tasks of an ElasticDL master as slices of a dataset of ours, and the ledger that such a master lacks.

A task is reported whole; here its records are lent, acknowledged, given back and lent again in parts, until
each has an outcome and the task can be reported. What cannot be said to such a master is refused here. Pure:
no clock, no transport.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from edl_torch.core.calls import Acknowledgement, Failure, GiveBack, Grant, RegisterCall, ReportCall
from edl_torch.core.leases import Lease
from edl_torch.core.permutation import Permutation, derive_key
from edl_torch.core.plan import Plan
from edl_torch.core.quarantine import Quarantine, QuarantinedRecord
from edl_torch.core.status import DatasetStatus
from edl_torch.elasticdl.wire import MAX_INT32, ForeignTask, TaskResult, TrainingParams
from edl_torch.errors import DatasetConflict, InvalidArgument, UnknownDataset, Unsupported
from edl_torch.shard import DatasetSpec, IndexArray, Slice, TaskType

_PURPOSE = "elasticdl task records"


@dataclass(slots=True)
class _Open:
    """Counts of one task: records without outcome, and records that could not be read."""

    left: int
    failed: int = 0


class TaskLedger:
    """Tasks of an ElasticDL master, and the leases that were made of them."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.quarantine = Quarantine()
        self.acknowledged = 0
        self.dropped = 0
        self._tasks: dict[int, _Open] = {}
        self._waiting: deque[tuple[int, Slice]] = deque()
        self._remainders: deque[tuple[int, Slice]] = deque()
        self._leases: dict[int, tuple[int, Lease]] = {}  # by our number: the master's, and the lease
        self._next = 1
        self._results: dict[int, TaskResult] = {}

    def __repr__(self) -> str:
        return f"<TaskLedger tasks={len(self._tasks)} leases={len(self._leases)}>"

    @property
    def holds(self) -> bool:
        """Whether a task is not reported yet."""
        return bool(self._tasks or self._results)

    @property
    def holds_remainders_only(self) -> bool:
        """Whether all that has no outcome is less than a batch."""
        return bool(self._remainders) and not self._waiting and not self._leases

    @property
    def failure(self) -> str:
        """Why the job has failed; '' while it has not."""
        return self.quarantine.failure(self.plan.spec, on=" on this trainer")

    # Lending ----------------------------------------------------------------------------------------------

    def take(self, task: ForeignTask, slices: Iterable[Slice]) -> None:
        """Take in a task, with its records as slices of the plan."""
        self._tasks[task.task_id] = _Open(task.end - task.start)
        self._waiting.extend((task.task_id, item) for item in slices)

    def lend(self, batch_size: int) -> tuple[Grant, ...]:
        """Return grants for the rest of one task, or for remainders that make whole batches; or none."""
        if self._waiting:
            task = self._waiting[0][0]
            chosen = [item for item in self._waiting if item[0] == task]
            self._waiting = deque(item for item in self._waiting if item[0] != task)
            return tuple(self._lease(task, item) for task, item in chosen)
        if sum(item.limit for _, item in self._remainders) >= batch_size:
            remainders, self._remainders = self._remainders, deque()
            return tuple(self._lease(task, item) for task, item in remainders)
        return ()

    def _lease(self, task: int, item: Slice) -> Grant:
        number = self._next
        self._next += 1
        self._leases[number] = task, Lease.of(number, 1, "", item)
        return Grant(task=number, attempt=1, slice=item)

    # Outcomes ---------------------------------------------------------------------------------------------

    def report(self, call: ReportCall) -> None:
        """Apply outcomes. What is said of a lease that has ended was said before, and changes nothing."""
        for failure in call.failures:
            self._fail(failure)
        for done in call.acknowledgements:
            self._acknowledge(done)
        for back in call.give_backs:
            self._give_back(back)

    def _fail(self, failure: Failure) -> None:
        task, lease = self._leases.get(failure.task, (0, None))
        position = failure.position
        if lease is None or not lease.close(position, position + 1):
            return
        name, index = self.plan.locate(lease.epoch, lease.shard, position)
        self.quarantine.add(
            QuarantinedRecord(
                epoch=lease.epoch,
                shard=lease.shard,
                position=position,
                name=name,
                index=index,
                reason=failure.reason,
            )
        )
        self._tasks[task].failed += 1
        self._count(task, 1, lease)

    def _acknowledge(self, done: Acknowledgement) -> None:
        task, lease = self._leases.get(done.task, (0, None))
        records = 0 if lease is None else lease.acknowledge(done.start, done.upto)
        if lease is not None and records:
            self.acknowledged += records
            self._count(task, records, lease)

    def _give_back(self, back: GiveBack) -> None:
        task, lease = self._leases.get(back.task, (0, None))
        items = [] if lease is None else lease.give_back(back.start, back.upto)
        if lease is not None and items:
            queue = self._remainders if back.remainder else self._waiting
            queue.extend((task, item) for item in items)
            self._count(task, 0, lease)

    def _count(self, task: int, records: int, lease: Lease | None = None) -> None:
        """Note that so many records of a task, of this lease, have their outcome."""
        if lease is not None and lease.is_done:
            del self._leases[lease.task]
        held = self._tasks[task]
        held.left -= records
        if not held.left:
            del self._tasks[task]
            self._results[task] = TaskResult(task_id=task, failed_records=held.failed)

    def drop_remainders(self) -> None:
        """Drop the records that are left of a batch which nothing will ever fill."""
        remainders, self._remainders = self._remainders, deque()
        for task, item in remainders:
            self.dropped += item.limit
            self._count(task, item.limit)

    # What the master is to be told ------------------------------------------------------------------------

    def results(self) -> tuple[TaskResult, ...]:
        """Tasks that are done and not yet known to the master, in the order in which they were."""
        return tuple(self._results.values())

    def told(self, result: TaskResult) -> None:
        """Note that the master has answered to this task."""
        self._results.pop(result.task_id, None)

    def give_up(self, why: str) -> Iterator[TaskResult]:
        """Return, as failed, every task with a record without outcome: the trainer leaves."""
        for task in self._tasks:
            yield TaskResult(task_id=task, error=why)
        self._tasks.clear()
        self._leases.clear()
        self._waiting.clear()
        self._remainders.clear()

    # For people -------------------------------------------------------------------------------------------

    def status(self, *, ended: bool) -> DatasetStatus:
        """Return what this trainer knows: counts are its own; `ended` is what the master said."""
        spec = self.plan.spec
        finished = ended and not self.holds
        leased = sum(lease.open_records for _, lease in self._leases.values())
        return DatasetStatus(
            dataset=spec.name,
            ledger="",
            lineage=0,
            task_type=spec.task_type,
            epoch=int(finished),
            num_epochs=1,
            size=self.plan.size,
            shards=self.plan.num_shards,
            shards_left=len(self._tasks),
            todo=sum(item.limit for _, item in (*self._waiting, *self._remainders)),
            leased=leased,
            leases=len(self._leases),
            acknowledged=self.acknowledged,
            quarantined=len(self.quarantine),
            dropped=self.dropped,
            finished=finished,
            trainers=1,
            failure=self.failure,
            quarantine=tuple(self.quarantine),
        )


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
        if registration.components:
            raise Unsupported(
                f"dataset {registration.name!r} is a mixture, and ElasticDL's master hands out ranges of one "
                f"dataset: start `edl-torch master`, or train on one component"
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
