"""Every part of the core shows its state in its `repr`."""

from __future__ import annotations

from dataclasses import replace

from core_kit import TRAINING, Trainer, first_of

from edl_torch.core.backlog import SliceQueue
from edl_torch.core.calls import Acknowledgement, Failure, GiveBack
from edl_torch.core.changes import Changes, Version
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.core.registration import new_spec


def test_parts_of_a_job_count_what_they_have() -> None:
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
            Version(),
            SliceQueue(changes.mark),
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
        "<Version 0>",
        "<SliceQueue slices=0 records=0>",
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
