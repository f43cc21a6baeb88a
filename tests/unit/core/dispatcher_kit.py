"""A session that makes its calls on a dispatcher, numbered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fences import fence, fenced

from edl_torch.core.calls import (
    NEW_PASS,
    Acknowledgement,
    Failure,
    GiveBack,
    Grant,
    LeaseAnswer,
    LeaseCall,
    RegisterAnswer,
    RegisterCall,
    Registration,
    ReportAnswer,
    ReportCall,
    RestoreCall,
    SnapshotCall,
)
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.core.persistence import dump
from edl_torch.core.status import DatasetStatus
from edl_torch.shard import Source

TRAINING = Registration(name="training", sources=(Source(name="a", count=16),), records_per_shard=8)


class Trainer:
    """One session's calls, numbered."""

    def __init__(self, dispatcher: Dispatcher, session: str, batch_size: int = 4, now: float = 0.0) -> None:
        self.dispatcher = dispatcher
        self.session = session
        self.batch_size = batch_size
        self.now = now
        self.requests = 0
        self.fence = fence(dispatcher, "")  # of no member

    def register(self, registration: Registration = TRAINING) -> RegisterAnswer:
        call = RegisterCall(
            session=self.session,
            worker_id=f"worker-{self.session}",
            batch_size=self.batch_size,
            registration=registration,
        )
        answer = self.dispatcher.register(call, self.now)
        self.fence = answer.fence
        return answer

    @property
    def member(self) -> int:
        return self.fence.member

    def call(self, dataset: str = "training", **change: Any) -> SnapshotCall:
        return SnapshotCall(session=self.session, dataset=dataset, **fenced(self.fence, change))

    def snapshot(self, dataset: str = "training", **change: Any) -> str:
        return self.dispatcher.snapshot(self.call(dataset, **change), self.now)

    def progress(self, dataset: str = "training", **change: Any) -> DatasetStatus:
        return self.dispatcher.progress(self.call(dataset, **change), self.now)

    def restore_call(self, token: str | None, dataset: str = "training", **change: Any) -> RestoreCall:
        self.requests += 1
        call = RestoreCall(
            session=self.session, dataset=dataset, fence=self.fence, request=self.requests, token=token
        )
        return replace(call, **fenced(call.fence, change))

    def restore(self, token: str | None, dataset: str = "training", **change: Any) -> int:
        lineage = self.dispatcher.restore(self.restore_call(token, dataset, **change), self.now)
        self.fence = replace(self.fence, lineage=lineage)
        return lineage

    def lease_call(self, dataset: str = "training", count: int = 1, **change: Any) -> LeaseCall:
        self.requests += 1
        call = LeaseCall(
            session=self.session,
            dataset=dataset,
            fence=self.fence,
            request=self.requests,
            epoch=NEW_PASS,
            count=count,
        )
        return replace(call, **fenced(call.fence, change))

    def lease(self, dataset: str = "training", count: int = 1, **change: Any) -> LeaseAnswer:
        return self.dispatcher.lease(self.lease_call(dataset, count, **change), self.now)

    def report_call(self, *outcomes: Failure | Acknowledgement | GiveBack, **change: Any) -> ReportCall:
        self.requests += 1
        call = ReportCall(
            session=self.session,
            dataset="training",
            fence=self.fence,
            request=self.requests,
            failures=tuple(o for o in outcomes if isinstance(o, Failure)),
            acknowledgements=tuple(o for o in outcomes if isinstance(o, Acknowledgement)),
            give_backs=tuple(o for o in outcomes if isinstance(o, GiveBack)),
        )
        return replace(call, **fenced(call.fence, change))

    def report(self, *outcomes: Failure | Acknowledgement | GiveBack, **change: Any) -> ReportAnswer:
        return self.dispatcher.report(self.report_call(*outcomes, **change), self.now)


def whole(grant: Grant) -> Acknowledgement:
    return Acknowledgement(task=grant.task, attempt=grant.attempt, upto=grant.slice.stop)


def photo(dispatcher: Dispatcher) -> str:
    return repr(dump(dispatcher))


def first_of(trainer: Trainer) -> Grant:
    return trainer.lease(count=1).grants[0]
