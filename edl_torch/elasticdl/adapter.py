"""ElasticDL adapter: ElasticDL's workers as sessions of the dispatcher, their tasks as leases.

ElasticDL's protocol has no session, no heartbeat and no epoch; the adapter supplies them. Pure: `now` is an
argument.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from edl_torch.core.calls import (
    NEW_PASS,
    Acknowledgement,
    Failure,
    Fence,
    GiveBack,
    Grant,
    LeaseCall,
    RegisterCall,
    Registration,
    ReportCall,
)
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.core.leases import Lease
from edl_torch.core.ledger import ShardLedger
from edl_torch.core.members import Member
from edl_torch.core.registration import check_option, new_spec
from edl_torch.core.state import Released
from edl_torch.elasticdl.wire import (
    ForeignTask,
    GetTaskCall,
    TaskNames,
    TaskResult,
    TrainingParams,
    check_expressible,
)
from edl_torch.errors import DatasetConflict, InvalidArgument, TooManyBadRecords
from edl_torch.shard import DatasetSpec, Shuffle, Source, TaskType

ATTEMPTS = 3
REASON_CHARACTERS = 500

_Key = tuple[str, int, int, int, int]
_Outcomes = dict[str, tuple[object, ...]]  # of a ReportCall, by field
SESSION = "elasticdl-"  # and the worker's number: never the id of a trainer of ours, which is random

_NAMES = {TaskType.TRAINING: "training", TaskType.EVALUATION: "evaluation", TaskType.PREDICTION: "prediction"}


def _key(dataset: str, lease: Lease) -> _Key:
    return dataset, lease.epoch, lease.shard, lease.done, lease.stop


def _back(lease: Lease, start: int | None = None) -> GiveBack:
    return GiveBack(task=lease.task, attempt=lease.attempt, start=lease.done if start is None else start)


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticDLOptions:
    """Options for ElasticDL's workers; `max_bad_records` is that of data which they describe."""

    task_timeout_s: float = 300.0  # as ElasticDL's own master has it
    max_bad_records: int = 0

    def __post_init__(self) -> None:
        if not self.task_timeout_s > 0:
            raise InvalidArgument(f"the timeout of a task must be above 0 s, not {self.task_timeout_s}")
        check_option("what a worker describes", "max_bad_records", self.max_bad_records)


@dataclass(frozen=True, slots=True, kw_only=True)
class LostTask:
    """Task that was not reported in time; its records wait again."""

    session: str
    dataset: str
    task: int
    records: int


class ElasticDLAdapter:
    """Tasks that the ElasticDL workers of a dispatcher hold, with their deadlines.

    A task is taken back when neither it nor another task of its worker was reported for `task_timeout_s`.
    Asking for tasks does not count: a task whose answer was lost would never come back. Deadlines are in
    memory only: after a start of the master every task has its full time (`resume`).
    """

    def __init__(self, dispatcher: Dispatcher, options: ElasticDLOptions | None = None) -> None:
        self._options = options or ElasticDLOptions()
        self.task_timeout_s = self._options.task_timeout_s
        self._dispatcher = dispatcher
        self._names = TaskNames(dispatcher.ledger_id)
        self._deadlines: dict[tuple[str, int], float] = {}  # (dataset, task)
        self._heard: dict[str, float] = {}  # session -> its last call
        self._batch_sizes: dict[str, int] = {}  # dataset -> as its parameters said
        self._failures: dict[_Key, int] = {}  # attempts at a batch; a restart grants further ones

    def __repr__(self) -> str:
        return f"<ElasticDLAdapter workers={len(self._heard)} tasks={len(self._deadlines)}>"

    # Datasets ---------------------------------------------------------------------------------------------

    def define(self, params: TrainingParams) -> list[str]:
        """Make the training data that a worker describes; what is there already stands.

        Returns a line for each thing in which it is another one. Raises DatasetConflict for another size.
        """
        for field, least in (("batch_size", 1), ("dataset_size", 1), ("num_minibatches_per_shard", 0)):
            value = getattr(params, field)
            if value < least:
                raise InvalidArgument(f"report_training_params: {field} is {value}: give {least} or more")
        ledger = self.find(TaskType.TRAINING)
        if ledger is not None:
            self._batch_sizes.setdefault(ledger.spec.name, params.batch_size)
            return _compare(ledger.spec, params)
        registration = Registration(
            name=_NAMES[TaskType.TRAINING],
            sources=(Source(name="", count=params.dataset_size),),
            records_per_shard=params.batch_size * params.num_minibatches_per_shard or None,
            shuffle=params.shuffle,
            shuffle_shards=params.shuffle_shards,
            shuffle_in_shard=False,
            num_epochs=max(0, params.num_epochs),
            epoch_barrier=False,
            max_bad_records=self._options.max_bad_records,
        )
        check_expressible(new_spec(registration, params.batch_size))
        self._dispatcher.define(registration, batch_size=params.batch_size)
        self._batch_sizes[registration.name] = params.batch_size
        return []

    def find(self, kind: TaskType) -> ShardLedger | None:
        """Return the data for tasks of a type: that with its usual name, else the only one, else None."""
        kind = TaskType.TRAINING if kind is TaskType.NONE else kind
        if kind not in _NAMES:
            raise InvalidArgument(f"a worker cannot ask for tasks of type {kind.name}")
        found = [ledger for ledger in self._dispatcher.ledgers if ledger.spec.task_type is kind]
        named = [ledger for ledger in found if ledger.spec.name == _NAMES[kind]]
        if len(named or found) > 1:
            names = ", ".join(repr(ledger.spec.name) for ledger in found)
            raise InvalidArgument(
                f"an ElasticDL worker asks for {kind.name} tasks and cannot say of which dataset: there are "
                f"{names}. Name the one that is meant {_NAMES[kind]!r}"
            )
        return next(iter(named or found), None)

    def training_goes_on(self) -> bool:
        """Return whether there is training data with records that have no outcome."""
        training = self.find(TaskType.TRAINING)
        return training is not None and not training.finished

    # Tasks ------------------------------------------------------------------------------------------------

    def ask(self, call: GetTaskCall, dataset: str, now: float) -> tuple[LeaseCall, bool]:
        """Return the lease call for a worker that wants a task, and whether it may wait (it holds none)."""
        ledger = self._ledger(dataset)
        session = self._join(call.worker_id, ledger, now)
        member = self._member(session)
        earlier = member.answers.get(dataset)
        lease = LeaseCall(
            session=session,
            dataset=dataset,
            fence=self._fence(ledger, member),
            request=1 if earlier is None else earlier.request + 1,
            epoch=NEW_PASS,
            count=1,
        )
        return lease, not ledger.leases.holds(session)

    def hand_out(self, lease: LeaseCall, grants: tuple[Grant, ...], now: float) -> ForeignTask:
        """Return the task for the first grant; the other grants, parts of a batch, wait again."""
        ledger = self._ledger(lease.dataset)
        first, *rest = grants
        if rest:
            backs = (GiveBack(task=g.task, attempt=g.attempt, start=g.slice.skip) for g in rest)
            self._report(ledger, lease.session, now, give_backs=tuple(backs))
        self._deadlines[lease.dataset, first.task] = now + self.task_timeout_s
        self._heard[lease.session] = now
        plan = ledger.plan
        source, start = -1, plan.shard(first.slice).start
        if plan.window == 1:
            source, start, _ = plan.bounds(first.slice.shard)
        return ForeignTask(
            task_id=self._task_names().name(first.task, plan.spec.task_type),
            type=plan.spec.task_type,
            # One where they are mixed, as `check_expressible` says.
            name=plan.spec.sources[source].name
            if source >= 0
            else next(s.name for s in plan.spec.sources if s.count),
            start=start + first.slice.skip,
            end=start + first.slice.stop,
            numbers=None if plan.order is Shuffle.NONE else plan.indices(first.slice).numbers,
            epoch=first.slice.epoch,
        )

    def _join(self, worker_id: int, ledger: ShardLedger, now: float) -> str:
        session, spec = f"{SESSION}{worker_id}", ledger.spec
        self._heard[session] = now
        member = self._dispatcher.members.get(session)
        if member is not None and spec.name in member.datasets:
            return session
        check_expressible(spec)
        # Its clients ask for the next task before they have reported the last one, and take WAIT for the end:
        # no barrier may stand between epochs, unless trainers of ours go by it.
        lift = not (spec.epoch_barrier and len(ledger.participants))
        self._dispatcher.register(
            RegisterCall(
                session=session,
                worker_id=session,
                batch_size=self._batch_sizes.get(spec.name, spec.records_per_shard),
                registration=Registration(name=spec.name, epoch_barrier=False if lift else None),
            ),
            now,
        )
        self._mind(session)
        return session

    def _mind(self, session: str) -> None:
        """Nobody but the adapter gives this session up: it has no heartbeat."""
        self._member(session).timeout_s = math.inf

    def _member(self, session: str) -> Member:
        member = self._dispatcher.members.get(session)
        assert member is not None, session  # it has joined, and only the adapter gives it up
        return member

    def report(self, result: TaskResult, now: float) -> bool:
        """Apply a worker's result. False, and nothing is changed, when the task is not lent (any more).

        Raises TooManyBadRecords, after it took note, when the job has failed.
        """
        found = self._lent(result.task_id)
        if found is None:
            return False
        ledger, lease = found
        dataset, session = ledger.spec.name, lease.session
        if result.failure:
            outcomes = self._failed(ledger, lease, result.failure)
        else:
            self._failures.pop(_key(dataset, lease), None)
            done = Acknowledgement(task=lease.task, attempt=lease.attempt, upto=lease.stop)
            outcomes = {"acknowledgements": (done,)}
        self._report(ledger, session, now, **outcomes)
        self._heard[session] = now
        self._deadlines.pop((dataset, lease.task), None)
        self._put_off(session, now)
        if ledger.failure:
            raise TooManyBadRecords(ledger.failure)
        return True

    def _failed(self, ledger: ShardLedger, lease: Lease, why: str) -> _Outcomes:
        """Return what to report of the rest of a lease after a failed attempt, which does not say at what.

        A task of several batches is handed out again as its two halves, so that the bad batch is found; a
        single batch that failed `ATTEMPTS` times goes to quarantine, record by record. Deaths and timeouts
        are no failures and are not counted.
        """
        batch_size = ledger.participants.batch_size(lease.session) or 1
        records = lease.stop - lease.done
        if records > batch_size:
            middle = lease.done + batch_size * -(-records // (2 * batch_size))
            return {"give_backs": (_back(lease, middle), _back(lease))}
        key = _key(ledger.spec.name, lease)
        count = self._failures.pop(key, 0) + 1
        if count < ATTEMPTS:
            self._failures[key] = count
            return {"give_backs": (_back(lease),)}
        reason = f"{count} attempts at its batch failed; the last: {why[:REASON_CHARACTERS]}"
        failures = (
            Failure(task=lease.task, attempt=lease.attempt, position=position, reason=reason)
            for position in range(lease.done, lease.stop)
        )
        return {"failures": tuple(failures)}

    def take_back(self, tasks: Iterable[ForeignTask], now: float) -> None:
        """Take tasks back whose answers did not reach their worker."""
        for task in tasks:
            found = self._lent(task.task_id)
            if found is not None:
                self._lose(*found, now)

    def _task_names(self) -> TaskNames:
        """Return those of the ledger, which is another one after its journal went back."""
        if self._names.ledger_id != self._dispatcher.ledger_id:
            self._names = TaskNames(self._dispatcher.ledger_id)
        return self._names

    def _lent(self, task_id: int) -> tuple[ShardLedger, Lease] | None:
        task, kind = self._task_names().resolve(task_id)
        for ledger in self._dispatcher.ledgers:
            lease = ledger.leases.find(task) if ledger.spec.task_type is kind else None
            if lease is not None and lease.session.startswith(SESSION):
                return ledger, lease
        return None

    def _report(self, ledger: ShardLedger, session: str, now: float, **outcomes: tuple[object, ...]) -> None:
        name = ledger.spec.name
        member = self._member(session)
        call = ReportCall(
            session=session,
            dataset=name,
            fence=self._fence(ledger, member),
            request=member.reports.get(name, 0) + 1,
            **outcomes,  # type: ignore[arg-type]
        )
        self._dispatcher.report(call, now)

    def _fence(self, ledger: ShardLedger, member: Member) -> Fence:
        return Fence(ledger=self._dispatcher.ledger_id, lineage=ledger.lineage, member=member.number)

    def _put_off(self, session: str, now: float) -> None:
        """Give all tasks of a worker that has reported one their full time again."""
        for ledger in self._dispatcher.ledgers:
            for lease in ledger.leases.of(session):
                self._deadlines[ledger.spec.name, lease.task] = now + self.task_timeout_s

    def _ledger(self, dataset: str) -> ShardLedger:
        ledger = self._dispatcher.find_ledger(dataset)
        assert ledger is not None, dataset  # datasets are never unmade
        return ledger

    # Who is alive -----------------------------------------------------------------------------------------

    def resume(self, now: float) -> None:
        """Begin after a start of the master: every task has its full time again."""
        for member in self._dispatcher.members:
            if member.session.startswith(SESSION):
                self._heard[member.session] = now
                self._mind(member.session)
        for ledger in self._dispatcher.ledgers:
            for lease in ledger.leases:
                if lease.session.startswith(SESSION):
                    self._deadlines[ledger.spec.name, lease.task] = now + self.task_timeout_s

    @property
    def pause_s(self) -> float:
        """Longest time between two calls of `tend`."""
        return min(self.task_timeout_s / 4, 10.0)

    def tend(self, now: float) -> tuple[tuple[LostTask, ...], tuple[Released, ...]]:
        """Take back overdue tasks, and end the sessions of workers that were silent for as long."""
        lost = []
        for (dataset, task), deadline in tuple(self._deadlines.items()):
            ledger = self._ledger(dataset)
            lease = ledger.leases.find(task)
            if lease is None or deadline <= now:
                del self._deadlines[dataset, task]
            if lease is not None and deadline <= now:
                lost.append(self._lose(ledger, lease, now))
        released: list[Released] = []
        for session, heard in tuple(self._heard.items()):
            if self._dispatcher.members.get(session) is None:
                del self._heard[session]
            elif heard + self.task_timeout_s <= now and not any(
                ledger.leases.holds(session) for ledger in self._dispatcher.ledgers
            ):
                del self._heard[session]
                released += self._dispatcher.leave(session, self._member(session).number, now)
        return tuple(lost), tuple(released)

    def _lose(self, ledger: ShardLedger, lease: Lease, now: float) -> LostTask:
        name, records = ledger.spec.name, lease.open_records
        self._report(ledger, lease.session, now, give_backs=(_back(lease),))
        return LostTask(session=lease.session, dataset=name, task=lease.task, records=records)


def _compare(spec: DatasetSpec, params: TrainingParams) -> list[str]:
    if params.dataset_size != spec.size:
        raise DatasetConflict(
            f"dataset {spec.name!r} has {spec.size} records here, the worker's has {params.dataset_size}: "
            f"give all workers the same dataset_size, that of the data which the master was started with"
        )
    asked = {
        "num_epochs": max(0, params.num_epochs),
        "shuffle": params.shuffle,
        "shuffle_shards": params.shuffle_shards,
    }
    return [
        f"{field}: registered {getattr(spec, field)}, asked {value}"
        for field, value in asked.items()
        if getattr(spec, field) != value
    ]
