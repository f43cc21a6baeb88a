"""Ledger of the tasks that a trainer has taken from an ElasticDL master, which keeps none of records.

A task is reported whole; here its records are lent, acknowledged, given back and lent again in parts, until
each has an outcome and the task can be reported. Pure: no clock, no transport.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from edl_torch.core.calls import (
    Acknowledgement,
    DatasetStatus,
    Failure,
    GiveBack,
    Grant,
    QuarantinedRecord,
    ReportCall,
)
from edl_torch.core.lease import Lease
from edl_torch.core.plan import Plan
from edl_torch.core.quarantine import Quarantine
from edl_torch.elasticdl.calls import ForeignTask, TaskResult
from edl_torch.shard import Slice


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
        if lease is None or not lease.is_open(position):
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
        lease.punch(position)
        self._tasks[task].failed += 1
        self._settle(task, lease, 1)

    def _acknowledge(self, done: Acknowledgement) -> None:
        task, lease = self._leases.get(done.task, (0, None))
        if lease is None or done.upto <= lease.done:
            return
        lease.check_acknowledgement(done.upto)
        records = lease.advance(done.upto)
        self.acknowledged += records
        self._settle(task, lease, records)

    def _give_back(self, back: GiveBack) -> None:
        task, lease = self._leases.get(back.task, (0, None))
        if lease is None or back.start >= lease.stop:
            return
        lease.check_give_back(back.start, lease.done)
        queue = self._remainders if back.remainder else self._waiting
        queue.extend((task, item) for item in lease.slices(back.start))
        lease.cut(back.start)
        self._settle(task, lease, 0)

    def _settle(self, task: int, lease: Lease, records: int) -> None:
        """Note that so many records of a task have their outcome."""
        if lease.is_done:
            del self._leases[lease.task]
        self._count(task, records)

    def _count(self, task: int, records: int) -> None:
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
