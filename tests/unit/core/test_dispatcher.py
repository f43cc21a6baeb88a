"""Calls of several trainers on one master, with numbers for time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from core_kit import TRAINING, Trainer, first_of, photo, whole
from hypothesis import given
from hypothesis import strategies as st

from edl_torch.core.calls import (
    Acknowledgement,
    Failure,
    GiveBack,
)
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.core.state import SHOWN, WAITER_S
from edl_torch.errors import (
    InvalidArgument,
    StaleLease,
)
from edl_torch.shard import Source, TaskType

# Leases


def test_an_older_lease_call_than_the_last_is_stale(dispatcher: Dispatcher, a: Trainer) -> None:
    early = a.lease_call()
    a.lease()
    with pytest.raises(StaleLease, match="followed by 2"):
        dispatcher.lease(early, 0.0)


def test_a_look_that_finds_nothing_yet_is_not_remembered(dispatcher: Dispatcher, a: Trainer) -> None:
    b = Trainer(dispatcher, "b")
    b.register()
    held = a.lease(count=9).grants
    call = b.lease_call()
    assert dispatcher.poll(call, 0.0) is None
    a.report(GiveBack(task=held[0].task, attempt=1, start=0))
    answer = dispatcher.poll(call, 0.0)
    assert answer is not None
    assert answer.grants[0].slice == held[0].slice
    assert dispatcher.poll(call, 0.0) is answer


def test_an_answer_with_nothing_is_remembered_when_it_was_given(dispatcher: Dispatcher, a: Trainer) -> None:
    b = Trainer(dispatcher, "b")
    b.register()
    held = a.lease(count=9).grants
    call = b.lease_call()
    nothing = dispatcher.answer(call, 0.0)
    assert nothing.nothing_yet
    a.report(GiveBack(task=held[0].task, attempt=1, start=0))
    assert dispatcher.lease(call, 0.0) is nothing


@pytest.mark.parametrize("count", [0, -3])
def test_a_lease_call_asks_for_something(a: Trainer, count: int) -> None:
    with pytest.raises(InvalidArgument, match="1 slice or more"):
        a.lease(count=count)


# Sessions


def test_a_dead_sessions_records_go_to_another(dispatcher: Dispatcher, a: Trainer) -> None:
    b = Trainer(dispatcher, "b")
    b.register()
    (grant,) = a.lease().grants
    dispatcher.heartbeat("b", 2, 20.0)
    assert dispatcher.expire(29.9) == ()
    (released,) = dispatcher.expire(30.0)
    assert (released.session, released.worker_id, released.dataset) == ("a", "worker-a", "training")
    assert released.slices == (grant.slice,)
    assert b.lease().grants[0].slice == grant.slice
    with pytest.raises(StaleLease, match="not known"):
        a.report(whole(grant))
    assert dispatcher.dataset_status("training").acknowledged == 0


def test_leaving_gives_everything_back_at_once(dispatcher: Dispatcher, a: Trainer) -> None:
    a.lease(count=9)
    (released,) = dispatcher.leave("a", 1)
    assert sum(s.limit for s in released.slices) == 16
    assert dispatcher.leave("a", 1) == ()
    assert dispatcher.dataset_status("training").todo == 16


# Several datasets, tokens, status


def test_datasets_live_side_by_side(dispatcher: Dispatcher, a: Trainer) -> None:
    evaluation = replace(TRAINING, name="evaluation", task_type=TaskType.EVALUATION, num_epochs=2)
    a.register(evaluation)
    in_training, in_evaluation = a.lease(count=9), a.lease("evaluation", count=9)
    assert len(in_training.grants) == len(in_evaluation.grants)
    a.report(*map(whole, in_training.grants))
    training, other = dispatcher.status(0.0).datasets
    assert (training.finished, training.acknowledged) == (True, 16)
    assert (other.finished, other.leased, other.task_type) == (False, 16, TaskType.EVALUATION)
    assert {r.dataset for r in dispatcher.leave("a", 1)} == {"evaluation", "training"}


def test_request_numbers_of_datasets_do_not_mix(dispatcher: Dispatcher, a: Trainer) -> None:
    a.register(replace(TRAINING, name="evaluation"))
    first = a.lease(request=5)
    other = a.lease("evaluation", request=5, count=2)
    assert (len(first.grants), len(other.grants)) == (1, 2)
    assert a.lease(request=5) is first


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


def test_status_shows_trainers_and_what_they_hold(dispatcher: Dispatcher, a: Trainer) -> None:
    (grant,) = a.lease().grants
    (trainer,) = dispatcher.status(4.0).trainers
    assert (trainer.worker_id, trainer.datasets, trainer.idle_s) == ("worker-a", ("training",), 4.0)
    assert trainer.leased == grant.slice.limit
    status = dispatcher.dataset_status("training")
    assert (status.todo, status.leased, status.leases) == (16 - trainer.leased, trainer.leased, 1)
    assert (status.shards, status.shards_left) == (2, 2)


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


@given(data=st.data())
def test_messages_that_are_lost_or_repeated_lose_no_record_and_lend_none_twice(data: st.DataObject) -> None:
    dispatcher = Dispatcher(ledger_id="L1")
    size = data.draw(st.integers(1, 40))
    registration = replace(
        TRAINING,
        sources=(Source(name="a", count=size),),
        num_epochs=2,
        epoch_barrier=data.draw(st.booleans()),
    )
    trainers = [Trainer(dispatcher, name, batch) for name, batch in (("a", 3), ("b", 4))]
    for trainer in trainers:
        trainer.register(registration)
    trained: list[tuple[int, int, int]] = []
    for _ in range(200):
        if dispatcher.dataset_status("training").finished:
            break
        trainer = trainers[data.draw(st.integers(0, 1))]
        call = trainer.lease_call(count=2)
        tries = data.draw(st.integers(1, 3))  # answers that were lost: the call is made again
        answer = {dispatcher.lease(call, 0.0) for _ in range(tries)}
        assert len(answer) == 1
        grants = answer.pop().grants
        report = trainer.report_call(*map(whole, grants))
        for _ in range(data.draw(st.integers(1, 3))):
            assert dispatcher.report(report, 0.0).stale == ()
        trained += [
            (g.slice.epoch, g.slice.shard, p) for g in grants for p in range(g.slice.skip, g.slice.stop)
        ]
    status = dispatcher.dataset_status("training")
    assert status.finished
    assert len(trained) == len(set(trained)) == status.acknowledged == 2 * size


# Reports: applied whole or not at all, repeated without harm, and whom they concern -------------------------


def test_a_stale_lease_is_listed_and_the_rest_is_applied(dispatcher: Dispatcher, a: Trainer) -> None:
    first, second = a.lease(count=2).grants
    unknown = Acknowledgement(task=999, attempt=1, upto=1)
    assert a.report(whole(first), unknown, whole(second)).stale == (999,)
    assert dispatcher.dataset_status("training").acknowledged == first.slice.limit + second.slice.limit


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
