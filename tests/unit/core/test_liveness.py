"""Leases of trainers that were away, and of trainers that live and do not train."""

from __future__ import annotations

from dataclasses import replace

import pytest
from core_kit import Trainer, first_of, whole
from statuses import sessions_of

from edl_torch.core.calls import Acknowledgement, GiveBack, Registration
from edl_torch.core.dispatcher import Dispatcher
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


def test_leases_of_others_and_of_other_attempts_are_void(a: Trainer, b: Trainer) -> None:
    mine, other = first_of(a), first_of(b)
    assert a.confirm(mine, other) == (other.task,)
    assert a.confirm(replace(mine, attempt=2)) == (mine.task,)


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
