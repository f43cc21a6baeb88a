"""Leases of trainers that were away, and of trainers that live and do not train."""

from __future__ import annotations

from dataclasses import replace

import pytest
from core_kit import Trainer, first_of, whole
from statuses import sessions_of

from edl_torch.core.calls import Acknowledgement, GiveBack, Registration
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.core.persistence import dump, load
from edl_torch.errors import SessionLost
from edl_torch.shard import Source

DATA = Registration(name="training", sources=(Source(name="a", count=32),), records_per_shard=8, num_epochs=0)


@pytest.fixture
def dispatcher() -> Dispatcher:
    return Dispatcher(ledger_id="ledger", lease_timeout_s=30.0, grace_s=1.0, progress_timeout_s=10.0)


@pytest.fixture
def a(dispatcher: Dispatcher) -> Trainer:
    a = Trainer(dispatcher, "a")
    a.register(DATA)
    return a


@pytest.fixture
def b(dispatcher: Dispatcher, a: Trainer) -> Trainer:
    b = Trainer(dispatcher, "b")
    b.register(DATA)
    return b


# Presenting leases ----------------------------------------------------------------------------------------


def test_leases_are_confirmed_while_they_are_lent_and_when_their_session_has_just_closed_them(
    a: Trainer,
) -> None:
    first, second = first_of(a), first_of(a)
    for _ in range(2):  # it may be repeated
        assert a.confirm(first, second) == ()
    a.report(Acknowledgement(task=first.task, attempt=1, upto=2))
    a.report(GiveBack(task=first.task, attempt=1, start=6), whole(second))
    assert a.confirm(first, second) == ()


def test_leases_of_others_and_of_other_attempts_are_void(a: Trainer, b: Trainer) -> None:
    mine, other = first_of(a), first_of(b)
    assert a.confirm(mine, other) == (other.task,)
    assert a.confirm(replace(mine, attempt=2)) == (mine.task,)


def test_a_session_that_was_given_up_confirms_nothing(dispatcher: Dispatcher, a: Trainer) -> None:
    grant = first_of(a)
    dispatcher.members.stream_broke("a", 1)
    assert [item.session for item in dispatcher.expire(2)] == ["a"]
    with pytest.raises(SessionLost):
        a.confirm(grant)
    a.register(DATA)
    assert a.confirm(grant) == (grant.task,)


def test_presenting_leases_is_hearing_of_the_session(dispatcher: Dispatcher, a: Trainer, b: Trainer) -> None:
    a.now = 29
    a.confirm()
    assert [item.session for item in dispatcher.expire(30)] == ["b"]


def test_without_sessions_nothing_is_due(dispatcher: Dispatcher) -> None:
    assert dispatcher.next_deadline(5.0) is None
    assert dispatcher.expire(5.0) == ()


@pytest.mark.parametrize(("progress_timeout_s", "due"), [(0.0, 30.0), (10.0, 15.0)])
def test_who_holds_nothing_may_be_lent_something_at_once_and_then_stand_still(
    progress_timeout_s: float, due: float
) -> None:
    dispatcher = Dispatcher(ledger_id="L", progress_timeout_s=progress_timeout_s)
    Trainer(dispatcher, "a").register(DATA)
    assert dispatcher.next_deadline(5.0) == due


# Standstill -----------------------------------------------------------------------------------------------


def test_a_trainer_that_lives_and_does_not_train_loses_its_leases_and_stays(
    dispatcher: Dispatcher, a: Trainer, b: Trainer
) -> None:
    a.now = 5
    grant = first_of(a)
    assert dispatcher.next_deadline(5) == 15
    for now in range(6, 15):
        a.now = b.now = now
        a.beat(3)
        b.beat()
    assert not dispatcher.expire(15.9)  # the first of those beats told of a step, at 6
    (lost,) = dispatcher.expire(16)
    assert (lost.session, lost.stalled, lost.slices) == ("a", True, (grant.slice,))
    assert sessions_of(dispatcher, "training") == {"a", "b"}
    again = first_of(b)
    assert (again.slice, again.attempt) == (grant.slice, 2)
    assert a.confirm(grant) == (grant.task,)
    assert a.report(whole(grant)).stale == (grant.task,), "too late"
    assert dispatcher.dataset_status("training").acknowledged == 0
    assert first_of(a), "it goes on with new ones"


@pytest.mark.parametrize("restarted", [False, True])
def test_a_repeated_report_on_leases_taken_since_is_answered_as_it_was(
    dispatcher: Dispatcher, a: Trainer, restarted: bool
) -> None:
    """It was heard: refused now, the trainer would take for lost what it had trained on."""
    grant = first_of(a)
    done = Acknowledgement(task=grant.task, attempt=grant.attempt, upto=1)
    call = a.report_call(done, Acknowledgement(task=999, attempt=1, upto=1))
    assert dispatcher.report(call, 0).stale == (999,)
    assert dispatcher.expire(10)
    if restarted:
        dispatcher = load(dump(dispatcher), ledger_id=dispatcher.ledger_id, now=10.0)
    assert dispatcher.report(call, 12).stale == (999,)
    assert dispatcher.report(replace(call, request=call.request + 1), 13).stale == (grant.task, 999)
    assert dispatcher.dataset_status("training").acknowledged == 1


def test_a_repeated_lease_call_does_not_bring_back_what_was_taken(dispatcher: Dispatcher, a: Trainer) -> None:
    call = a.lease_call()
    assert dispatcher.lease(call, 0).grants
    assert dispatcher.expire(10)
    assert dispatcher.lease(call, 10).grants == ()


@pytest.mark.parametrize(
    ("how", "is_progress"),
    [
        ("acknowledgement", True),
        ("heartbeat that counts", True),
        ("drained", True),
        ("confirm", True),
        ("heartbeat", False),
        ("fetching ahead", False),
        ("giving back", False),
    ],
)
def test_progress_is_what_the_loop_does_and_nothing_that_threads_do_beside_it(
    dispatcher: Dispatcher, a: Trainer, how: str, is_progress: bool
) -> None:
    grant = first_of(a)
    a.now = 9
    match how:
        case "acknowledgement":
            a.report(Acknowledgement(task=grant.task, attempt=1, upto=1))
        case "giving back":
            a.report(GiveBack(task=grant.task, attempt=1, start=6))
        case "confirm":
            a.confirm(grant)
        case "drained" | "fetching ahead":
            a.lease(drained=how == "drained")
        case _:
            a.beat(progress=int(is_progress))
    assert bool(dispatcher.expire(18.9)) == (not is_progress)
    assert bool(dispatcher.expire(19)) == is_progress


def test_who_holds_nothing_is_not_stalled_and_starts_anew_with_its_first_lease(
    dispatcher: Dispatcher, a: Trainer, b: Trainer
) -> None:
    assert dispatcher.expire(25) == ()
    a.now = 25
    assert first_of(a)
    assert not dispatcher.expire(29.9)
    a.now = 29
    a.beat()
    assert dispatcher.next_deadline(29.9) == 30  # of "b", which is silent
    lost = [(item.session, item.stalled) for item in dispatcher.expire(35)]
    assert lost == [("b", False), ("a", True)]


def test_without_a_timeout_a_step_may_take_for_ever() -> None:
    dispatcher = Dispatcher(ledger_id="L", lease_timeout_s=30.0)
    a = Trainer(dispatcher, "a")
    a.register(DATA)
    assert first_of(a)
    for a.now in range(0, 1000, 10):
        a.beat()
        assert not dispatcher.expire(a.now)
    (seen,) = dispatcher.status(1000).trainers
    assert (seen.since_progress_s, seen.idle_s) == (1000, 10)


# A start of the master ------------------------------------------------------------------------------------


def test_after_a_start_every_lease_lives_one_full_timeout(dispatcher: Dispatcher, a: Trainer) -> None:
    grant = first_of(a)
    dispatcher.members.stream_broke("a", 1)
    dispatcher.members.resume(500)
    assert not dispatcher.expire(509.9)
    a.now = 509.9
    assert a.confirm(grant) == ()
