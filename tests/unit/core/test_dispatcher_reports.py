"""Reports: applied whole or not at all, repeated without harm, and whom they concern."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from dispatcher_kit import TRAINING, Trainer, first_of, photo, whole

from edl_torch.core.calls import (
    Acknowledgement,
    Failure,
    GiveBack,
)
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.core.state import WAITER_S
from edl_torch.errors import (
    InvalidArgument,
    TooManyBadRecords,
)


def test_a_stale_lease_is_listed_and_the_rest_is_applied(dispatcher: Dispatcher, a: Trainer) -> None:
    first, second = a.lease(count=2).grants
    unknown = Acknowledgement(task=999, attempt=1, upto=1)
    assert a.report(whole(first), unknown, whole(second)).stale == (999,)
    assert dispatcher.dataset_status("training").acknowledged == first.slice.limit + second.slice.limit


def test_a_repeated_report_changes_nothing_and_is_answered_alike(dispatcher: Dispatcher) -> None:
    a = Trainer(dispatcher, "a", batch_size=8)
    a.register(replace(TRAINING, max_bad_records=1))
    first, second = a.lease(count=2).grants
    call = a.report_call(
        Failure(task=second.task, attempt=1, position=6, reason="bad"),
        whole(first),
        Acknowledgement(task=second.task, attempt=1, upto=2),
        GiveBack(task=second.task, attempt=1, start=4),
    )
    answer = dispatcher.report(call, 0.0)
    before = dispatcher.token("training")
    assert dispatcher.report(call, 0.0) == answer
    assert dispatcher.token("training") == before
    assert answer.stale == ()


def test_leases_are_asked_back_only_from_those_who_hold_some(dispatcher: Dispatcher, a: Trainer) -> None:
    b, c = Trainer(dispatcher, "b"), Trainer(dispatcher, "c")
    b.register()
    c.register()
    a.lease(count=9)
    assert dispatcher.asked_back("training", 0.0) == ()
    assert b.lease().nothing_yet
    assert dispatcher.asked_back("training", 0.0) == ("a",)
    assert dispatcher.asked_back("training", WAITER_S) == ("a",)
    assert dispatcher.asked_back("training", WAITER_S + 0.1) == ()


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


def test_too_many_bad_records_fail_every_later_lease(dispatcher: Dispatcher, a: Trainer) -> None:
    (grant,) = a.lease().grants
    a.report(Failure(task=grant.task, attempt=1, position=0, reason="bad"))
    with pytest.raises(TooManyBadRecords):
        a.lease()
    assert "bad" in dispatcher.dataset_status("training").failure


def test_a_trainer_learns_that_another_waits(dispatcher: Dispatcher, a: Trainer) -> None:
    b = Trainer(dispatcher, "b")
    b.register()
    (held, *_) = a.lease(count=9).grants
    assert not a.report().wanted
    assert b.lease().nothing_yet
    assert a.report().wanted
    assert not b.report().wanted, "b itself is the one that waits"
    a.now = 60.0
    assert not a.report().wanted, "b has not asked for long"
    a.now = 0.0
    a.report(GiveBack(task=held.task, attempt=1, start=0))
    assert b.lease().grants
    assert not a.report().wanted


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


def test_a_report_that_ends_a_lease_twice_is_fine(dispatcher: Dispatcher, a: Trainer) -> None:
    grant = first_of(a)
    outcomes = [
        *(Failure(task=grant.task, attempt=1, position=p, reason="x") for p in range(grant.slice.limit)),
        GiveBack(task=grant.task, attempt=1, start=0),
    ]
    a.report(*outcomes)
    assert dispatcher.dataset_status("training").quarantined == grant.slice.limit
