"""Calls of several trainers on one master, with numbers for time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from core_kit import TRAINING, Trainer, first_of, photo, whole

from edl_torch.core.backlog import SliceQueue
from edl_torch.core.calls import (
    Acknowledgement,
    Failure,
    GiveBack,
)
from edl_torch.core.changes import Changes, Version
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.core.registration import new_spec
from edl_torch.core.state import SHOWN
from edl_torch.errors import (
    InvalidArgument,
)
from edl_torch.shard import Source

# Leases


@pytest.mark.parametrize("count", [0, -3])
def test_a_lease_call_asks_for_something(a: Trainer, count: int) -> None:
    with pytest.raises(InvalidArgument, match="1 slice or more"):
        a.lease(count=count)


# Sessions


# Several datasets, tokens, status


def test_a_lineage_that_the_master_opens_itself_is_no_members(dispatcher: Dispatcher, a: Trainer) -> None:
    ledger = dispatcher.find_ledger("training")
    assert ledger is not None
    assert ledger.opened_by == (0, 0)
    a.restore(None)
    assert ledger.opened_by == (1, 1)
    assert dispatcher.go_back("training", None) == 3
    assert ledger.opened_by == (0, 0)
    a.fence = replace(a.fence, lineage=3)
    a.restore(None)
    ledger.restore(None)
    assert (ledger.lineage, ledger.opened_by) == (5, (0, 0))


def test_of_a_large_quarantine_trainers_are_told_the_beginning(dispatcher: Dispatcher) -> None:
    """They ask for the status after every pass: with all its reasons it could be larger than a message."""
    a = Trainer(dispatcher, "a")
    a.register(
        replace(TRAINING, sources=(Source(name="a", count=99),), records_per_shard=99, max_bad_records=99)
    )
    bad = [
        Failure(task=grant.task, attempt=1, position=position, reason="bad")
        for grant in a.lease(count=9).grants
        for position in range(grant.slice.skip, grant.slice.stop)
    ]
    a.report(*bad[: SHOWN + 5])
    told = dispatcher.dataset_status("training")
    assert (told.quarantined, len(told.quarantine)) == (SHOWN + 5, SHOWN)
    assert len(dispatcher.status(0.0).datasets[0].quarantine) == SHOWN + 5


# Lost and repeated messages


# Reports: applied whole or not at all, repeated without harm, and whom they concern -------------------------


def test_who_is_refused_what_others_come_to_sooner_calls_nothing_back(
    dispatcher: Dispatcher, a: Trainer
) -> None:
    b = Trainer(dispatcher, "b")
    b.register()
    b.lease()
    assert len(a.lease(ahead=True).grants) == 1
    while a.lease(ahead=True).grants:
        pass
    assert dispatcher.dataset_status("training").todo > 0
    assert dispatcher.asked_back("training", 0.0) == ()
    assert not b.report(Acknowledgement(task=1, attempt=1, upto=1)).wanted


BEYOND = 99


@pytest.mark.parametrize(
    "bad",
    [
        lambda g: [Failure(task=g.task, attempt=1, position=BEYOND, reason="x")],
        lambda g: [Acknowledgement(task=g.task, attempt=1, upto=BEYOND)],
        lambda g: [
            Acknowledgement(task=g.task, attempt=1, upto=3),
            GiveBack(task=g.task, attempt=1, start=2),
        ],
        lambda g: [
            Acknowledgement(task=g.task, attempt=1, upto=2),
            Failure(task=g.task, attempt=1, position=2, reason="x"),
            GiveBack(task=g.task, attempt=1, start=2),
        ],
    ],
)
def test_a_report_with_a_bad_argument_changes_nothing(dispatcher: Dispatcher, a: Trainer, bad: Any) -> None:
    good, other = a.lease(count=2).grants
    before = photo(dispatcher)
    outcomes = [Failure(task=good.task, attempt=1, position=1, reason="broken"), whole(good), *bad(other)]
    for wrong in (outcomes, outcomes[2:]):
        with pytest.raises(InvalidArgument):
            a.report(*wrong)
        assert photo(dispatcher) == before
    a.report(outcomes[0], outcomes[1])
    assert dispatcher.dataset_status("training").acknowledged == good.slice.limit - 1


# Every part of the core shows its state ---------------------------------------------------------------------


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
