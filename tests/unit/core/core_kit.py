"""Ledgers and sessions whose calls take few words; trainers that fetch, train and wait as real ones do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fences import fence, fenced

from edl_torch.core.calls import (
    NEW_PASS,
    Acknowledgement,
    ConfirmCall,
    Failure,
    GiveBack,
    Grant,
    LeaseAnswer,
    LeaseCall,
    PassState,
    RegisterAnswer,
    RegisterCall,
    Registration,
    ReportAnswer,
    ReportCall,
    RestoreCall,
    SnapshotCall,
)
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.core.ledger import ShardLedger
from edl_torch.core.persistence import dump
from edl_torch.core.status import DatasetStatus
from edl_torch.shard import DatasetSpec, Source

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

    def confirm(self, *grants: Grant, **change: Any) -> tuple[int, ...]:
        """Present leases. Returns the tasks of those that are void."""
        leases = tuple((grant.task, grant.attempt) for grant in grants)
        call = ConfirmCall(session=self.session, dataset="training", fence=self.fence, leases=leases)
        return self.dispatcher.confirm(replace(call, **fenced(call.fence, change)), self.now).void

    def beat(self, progress: int = 0) -> None:
        self.dispatcher.heartbeat(self.session, self.member, self.now, progress)


def whole(grant: Grant) -> Acknowledgement:
    return Acknowledgement(task=grant.task, attempt=grant.attempt, upto=grant.slice.stop)


def photo(dispatcher: Dispatcher) -> str:
    return repr(dump(dispatcher))


def first_of(trainer: Trainer) -> Grant:
    return trainer.lease(count=1).grants[0]


# Ledgers ----------------------------------------------------------------------------------------------------


SPEC = DatasetSpec(name="training", sources=(Source(name="a", count=16),), records_per_shard=8)


def ledger_of(size: int = 16, per: int = 8, **options: object) -> ShardLedger:
    spec = replace(SPEC, sources=(Source(name="a", count=size),), records_per_shard=per, **options)  # type: ignore[arg-type]
    return ShardLedger(spec)


def lease_all(ledger: ShardLedger, session: str, epoch: int = NEW_PASS, count: int = 1000) -> list[Grant]:
    return list(ledger.lease(session, epoch=epoch, count=count)[2])


def records_of(grants: list[Grant]) -> list[tuple[int, int, int]]:
    return [
        (g.slice.epoch, g.slice.shard, position)
        for g in grants
        for position in range(g.slice.skip, g.slice.stop)
    ]


def acknowledge(ledger: ShardLedger, session: str, *grants: Grant) -> None:
    for grant in grants:
        ledger.acknowledge(session, grant.task, grant.attempt, grant.slice.stop)


def verdict(ledger: ShardLedger, session: str, epoch: int = NEW_PASS) -> PassState:
    _, state, grants = ledger.lease(session, epoch=epoch, count=1, drained=True)
    assert not grants
    return state


# Trainers reduced to what the ledger sees of them -----------------------------------------------------------


Drawn = tuple[Grant, int]  # one record: its lease and position
PATIENCE = 50  # rounds without an outcome after which the trainers are taken to be stuck


class SimulatedTrainer:
    """One trainer. `hold_back` batches are in its loop and not stepped on when it has handed on all it has.

    An elastic one tells the ledger that it is drained and waits for the verdict; a plain one acknowledges
    all it holds before it waits.
    """

    def __init__(
        self,
        ledger: ShardLedger,
        name: str,
        batch_size: int,
        *,
        elastic: bool = True,
        drop_last: bool = False,
        hold_back: int = 0,
        held: Sequence[tuple[Grant, Sequence[int]]] = (),
    ) -> None:
        self.ledger = ledger
        self.name = name
        self.batch_size = batch_size
        self.elastic = elastic
        self.drop_last = drop_last
        self.hold_back = hold_back if elastic else 0
        self.drawn: list[Drawn] = [(grant, position) for grant, positions in held for position in positions]
        self.loop: list[list[Drawn]] = []  # batches handed to the loop
        self.trained: list[tuple[int, int, int]] = []
        self.epoch = NEW_PASS
        self.read = 0
        self.ended = False

    def step(self) -> None:
        """One look at the ledger, and what follows from it."""
        if self.ended:
            return
        if self._ask(drained=False):
            self._train_whole_batches()
            return
        self._train()
        if self.elastic and not self.ended:
            self._ask(drained=True)
            holds = bool(self.loop or self.drawn)
            if self.epoch == NEW_PASS and not self.drawn and holds:
                self._end_pass()

    def _ask(self, *, drained: bool) -> bool:
        epoch, state, grants = self.ledger.lease(self.name, epoch=self.epoch, count=2, drained=drained)
        self.epoch = epoch
        self.read += len(grants)
        for grant in grants:
            self.drawn += [(grant, position) for position in range(grant.slice.skip, grant.slice.stop)]
        if state is PassState.FINISHED:
            self._train()
            self._step(0)
            self.ended = True
        elif state is PassState.EPOCH_OVER:
            self._train()
            self._end_pass()
        return bool(grants)

    def _end_pass(self) -> None:
        if not self.read:
            self._step(0)  # a pass without a batch: the loop has nothing to wait for
        self.epoch, self.read = NEW_PASS, 0

    def _train_whole_batches(self) -> None:
        while len(self.drawn) >= self.batch_size:
            self._hand(self.batch_size)
        self._step(self.hold_back)

    def _train(self) -> None:
        self._train_whole_batches()
        if self.drawn and self.drop_last:
            self._return_remainder()
        elif self.drawn:
            self._hand(len(self.drawn))
        self._step(self.hold_back)

    def _hand(self, count: int) -> None:
        self.loop.append(self.drawn[:count])
        del self.drawn[:count]

    def _return_remainder(self) -> None:
        first: dict[int, Drawn] = {}
        for grant, position in self.drawn:
            first.setdefault(grant.task, (grant, position))
        for grant, position in first.values():
            self.ledger.give_back(self.name, grant.task, grant.attempt, position, remainder=True)
        self.drawn.clear()

    def _step(self, keep: int) -> None:
        done = self.loop[: len(self.loop) - keep]
        del self.loop[: len(done)]
        for batch in done:
            for grant, position in batch:
                self.ledger.acknowledge(self.name, grant.task, grant.attempt, position + 1, start=position)
                self.trained.append((grant.slice.epoch, grant.slice.shard, position))


def run_to_the_end(ledger: ShardLedger, trainers: Sequence[SimulatedTrainer]) -> list[tuple[int, int, int]]:
    """Let all trainers take turns until the job is finished. Returns what they trained on.

    Raises AssertionError when they wait for each other.
    """
    idle_rounds, before = 0, -1
    while not all(trainer.ended for trainer in trainers):
        for trainer in trainers:
            trainer.step()
        outcomes = ledger.acknowledged + ledger.dropped + len(ledger.quarantine)
        idle_rounds = 0 if outcomes != before else idle_rounds + 1
        before = outcomes
        assert idle_rounds < PATIENCE, f"stuck: {ledger!r} {ledger.snapshot()!r}"
    assert ledger.finished
    return [record for trainer in trainers for record in trainer.trained]
