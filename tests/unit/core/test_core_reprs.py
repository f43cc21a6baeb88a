"""Every part of the core shows its state in its `repr`: new, and in the midst of a job."""

from __future__ import annotations

from dataclasses import replace

from core_kit import TRAINING, Trainer, first_of

from edl_torch.core.backlog import Backlog, SliceQueue
from edl_torch.core.calls import Acknowledgement, Failure, GiveBack
from edl_torch.core.changes import Changes, Version
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.core.history import History
from edl_torch.core.members import Members, Throughput
from edl_torch.core.plan import Plan
from edl_torch.core.quarantine import Quarantine
from edl_torch.core.registration import new_spec


def test_new_ones_have_nothing() -> None:
    assert [
        repr(part)
        for part in (
            Version(),
            Changes(),
            History(),
            Members(lease_timeout_s=30.0, grace_s=1.0),
            Throughput(),
            Quarantine(),
            SliceQueue(Changes().mark),
            Backlog(Plan(new_spec(TRAINING, 4))),
            Dispatcher(ledger_id="L"),
            Dispatcher(ledger_id="L").rollback,
        )
    ] == [
        "<Version 0>",
        "<Changes n=0>",
        "<History events=0 departed=0>",
        "<Members n=0>",
        "<Throughput {}>",
        "<Quarantine n=0 bytes=0>",
        "<SliceQueue slices=0 records=0>",
        "<Backlog epoch=0 records=16>",
        "<Dispatcher L datasets=0 sessions=0>",
        "<Rollback suspended=0>",
    ]


def test_in_a_job_they_count_what_they_have() -> None:
    changes = Changes()
    dispatcher = Dispatcher(ledger_id="L", changes=changes)
    ledger = dispatcher.add(new_spec(replace(TRAINING, max_bad_records=1), 4))
    assert changes.take()
    a, b = Trainer(dispatcher, "a"), Trainer(dispatcher, "b")
    for trainer in (a, b):
        trainer.register()
    grant = first_of(a)
    a.report(
        Failure(task=grant.task, attempt=1, position=0, reason="torn"),
        Acknowledgement(task=grant.task, attempt=1, upto=2),
        GiveBack(task=grant.task, attempt=1, start=3),
    )
    assert first_of(b)
    dispatcher.leave("b", 2)
    changes.take()
    changes.mark("head")
    assert [
        repr(part)
        for part in (
            changes,
            dispatcher,
            dispatcher.members,
            dispatcher.history,
            dispatcher.rollback,
            ledger,
            ledger.leases,
            ledger.participants,
            ledger.participants.throughput,
            ledger.quarantine,
            ledger.backlog,
            ledger._lending,
        )
    ] == [
        "<Changes n=1>",
        "<Dispatcher L datasets=1 sessions=1>",
        "<Members n=1>",
        "<History events=4 departed=1>",
        "<Rollback suspended=0>",
        "<ShardLedger 'training' epoch=0 todo=13 leased=1 done=1>",
        "<Leases n=1 sessions=1>",
        "<Participants n=1 waiting=0>",
        "<Throughput {'a': 5}>",
        "<Quarantine n=1 bytes=21>",
        "<Backlog epoch=0 records=13>",
        "<Lending <Backlog epoch=0 records=13> <Leases n=1 sessions=1>>",
    ]
