"""Leases of trainers that were away, and of trainers that live and do not train."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fences import fence
from statuses import sessions_of

from edl_torch.core.calls import (
    NEW_PASS,
    Acknowledgement,
    ConfirmCall,
    GiveBack,
    Grant,
    LeaseCall,
    RegisterCall,
    Registration,
    ReportCall,
)
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.core.persistence import dump, load
from edl_torch.errors import SessionLost, StaleLease
from edl_torch.shard import Source

DATA = Registration(name="d", sources=(Source(name="a", count=32),), records_per_shard=8, num_epochs=0)


class Master(Dispatcher):
    """Calls of the sessions "a", "b", … with their numbers counted."""

    def __init__(self, **options: float) -> None:
        super().__init__(ledger_id="ledger", **options)  # type: ignore[arg-type]
        self.requests = 0

    def joins(self, session: str, now: float = 0.0) -> None:
        call = RegisterCall(session=session, worker_id=f"w-{session}", batch_size=4, registration=DATA)
        self.register(call, now)

    def lends(
        self, session: str, now: float, *, drained: bool = False, request: int = 0
    ) -> tuple[Grant, ...]:
        self.requests += 1
        call = LeaseCall(
            session=session,
            dataset="d",
            fence=fence(self, session),
            request=request or self.requests,
            epoch=NEW_PASS,
            count=1,
            drained=drained,
        )
        return self.lease(call, now).grants

    def beats(self, session: str, now: float, progress: int) -> None:
        self.heartbeat(session, fence(self, session).member, now, progress)

    def told(self, session: str, now: float, **what: tuple[object, ...]) -> tuple[int, ...]:
        self.requests += 1
        call = ReportCall(
            session=session, dataset="d", fence=fence(self, session), request=self.requests, **what
        )  # type: ignore[arg-type]
        return self.report(call, now).stale

    def void(
        self, session: str, now: float, *grants: Grant, lineage: int = 1, ledger: str = "ledger"
    ) -> tuple[int, ...]:
        held = tuple((g.task, g.attempt) for g in grants)
        own = replace(fence(self, session, lineage), ledger=ledger)
        call = ConfirmCall(session=session, dataset="d", fence=own, leases=held)
        return self.confirm(call, now).void


@pytest.fixture
def master() -> Master:
    master = Master(lease_timeout_s=30.0, grace_s=1.0, progress_timeout_s=10.0)
    master.joins("a")
    master.joins("b")
    return master


# Presenting leases ----------------------------------------------------------------------------------------


def test_leases_that_are_still_lent_are_confirmed(master: Master) -> None:
    first, second = *master.lends("a", 0), *master.lends("a", 0)
    assert master.void("a", 1, first, second) == ()
    assert master.void("a", 1, first, second) == ()  # it may be repeated


def test_a_lease_is_confirmed_whole_after_a_part_was_acknowledged_and_a_part_given_back(
    master: Master,
) -> None:
    (grant,) = master.lends("a", 0)
    master.told("a", 1, acknowledgements=(Acknowledgement(task=grant.task, attempt=1, upto=2),))
    master.told("a", 1, give_backs=(GiveBack(task=grant.task, attempt=1, start=6),))
    assert master.void("a", 2, grant) == ()


def test_a_lease_that_this_session_has_just_closed_is_not_void(master: Master) -> None:
    (grant,) = master.lends("a", 0)
    master.told(
        "a", 1, acknowledgements=(Acknowledgement(task=grant.task, attempt=1, upto=grant.slice.stop),)
    )
    assert master.void("a", 1, grant) == ()


def test_leases_of_others_and_of_other_attempts_are_void(master: Master) -> None:
    (mine,), (other,) = master.lends("a", 0), master.lends("b", 0)
    older = Grant(task=mine.task, attempt=mine.attempt + 1, slice=mine.slice)
    assert master.void("a", 1, mine, other) == (other.task,)
    assert master.void("a", 1, older) == (mine.task,)


def test_a_session_that_was_given_up_confirms_nothing(master: Master) -> None:
    (grant,) = master.lends("a", 0)
    master.members.stream_broke("a", 1)
    assert [item.session for item in master.expire(2)] == ["a"]
    with pytest.raises(SessionLost):
        master.void("a", 3, grant)
    master.joins("a", 3)
    assert master.void("a", 3, grant) == (grant.task,)


@pytest.mark.parametrize("fence", [{"lineage": 2}, {"ledger": "another"}])
def test_leases_of_another_lineage_or_ledger_are_refused(master: Master, fence: dict[str, object]) -> None:
    (grant,) = master.lends("a", 0)
    with pytest.raises(StaleLease, match=r"lineage|ledger"):
        master.void("a", 1, grant, **fence)  # type: ignore[arg-type]


def test_presenting_leases_is_hearing_of_the_session(master: Master) -> None:
    master.void("a", 29)
    assert [item.session for item in master.expire(30)] == ["b"]


def test_without_sessions_nothing_is_due() -> None:
    dispatcher = Dispatcher(ledger_id="L", progress_timeout_s=10.0)
    assert dispatcher.next_deadline(5.0) is None
    assert dispatcher.expire(5.0) == ()


@pytest.mark.parametrize(("progress_timeout_s", "due"), [(0.0, 30.0), (10.0, 15.0)])
def test_who_holds_nothing_may_be_lent_something_at_once_and_then_stand_still(
    progress_timeout_s: float, due: float
) -> None:
    master = Master(progress_timeout_s=progress_timeout_s)
    master.joins("a")
    assert master.next_deadline(5.0) == due


# Standstill -----------------------------------------------------------------------------------------------


def test_a_trainer_that_lives_and_does_not_train_loses_its_leases_and_stays(master: Master) -> None:
    (grant,) = master.lends("a", 5)
    assert master.next_deadline(5) == 15
    for now in range(6, 15):
        master.beats("a", now, 3 if now > 5 else 0)
        master.beats("b", now, 0)
    assert not master.expire(15.9)  # the first of those beats told of a step, at 6
    (lost,) = master.expire(16)
    assert (lost.session, lost.stalled, lost.slices) == ("a", True, (grant.slice,))
    assert sessions_of(master, "d") == {"a", "b"}
    assert master.void("a", 17, grant) == (grant.task,)


def test_a_late_acknowledgement_of_a_stalled_trainer_changes_nothing(master: Master) -> None:
    (grant,) = master.lends("a", 0)
    master.beats("b", 9, 1)
    assert master.expire(10)
    (again,) = master.lends("b", 11)
    assert (again.slice, again.attempt) == (grant.slice, grant.attempt + 1)
    done = Acknowledgement(task=grant.task, attempt=grant.attempt, upto=grant.slice.stop)
    assert master.told("a", 12, acknowledgements=(done,)) == (grant.task,)
    assert master.dataset_status("d").acknowledged == 0
    assert master.lends("a", 12)  # it goes on with new ones


@pytest.mark.parametrize("restarted", [False, True])
def test_a_repeated_report_on_leases_taken_since_is_answered_as_it_was(
    master: Master, restarted: bool
) -> None:
    """It was heard: refused now, the trainer would take for lost what it had trained on."""
    (grant,) = master.lends("a", 0)
    done = Acknowledgement(task=grant.task, attempt=grant.attempt, upto=1)
    other = Acknowledgement(task=999, attempt=1, upto=1)
    call = ReportCall(
        session="a", dataset="d", fence=fence(master, "a"), request=7, acknowledgements=(done, other)
    )
    assert master.report(call, 0).stale == (999,)
    master.beats("b", 9, 1)
    assert master.expire(10)
    again: Dispatcher = master
    if restarted:
        again = load(dump(master), ledger_id=master.ledger_id, now=10.0)
    assert again.report(call, 12).stale == (999,)
    assert again.report(replace(call, request=8), 13).stale == (grant.task, 999)
    assert again.dataset_status("d").acknowledged == 1


def test_a_repeated_lease_call_does_not_bring_back_what_was_taken(master: Master) -> None:
    assert master.lends("a", 0, request=100)
    assert master.expire(10)
    assert master.lends("a", 10, request=100) == ()


@pytest.mark.parametrize("how", ["acknowledgement", "heartbeat", "drained", "confirm"])
def test_progress_is_whatever_the_loop_does(master: Master, how: str) -> None:
    (grant,) = master.lends("a", 0)
    if how == "acknowledgement":
        master.told("a", 9, acknowledgements=(Acknowledgement(task=grant.task, attempt=1, upto=1),))
    elif how == "heartbeat":
        master.beats("a", 9, 1)
    elif how == "drained":
        master.lends("a", 9, drained=True)
    else:
        master.void("a", 9, grant)
    assert not master.expire(18.9)
    assert master.expire(19)


@pytest.mark.parametrize("how", ["heartbeat", "fetching ahead", "giving back"])
def test_what_threads_do_beside_the_loop_is_no_progress(master: Master, how: str) -> None:
    (grant,) = master.lends("a", 0)
    if how == "heartbeat":
        master.beats("a", 9, 0)
    elif how == "fetching ahead":
        master.lends("a", 9)
    else:
        master.told("a", 9, give_backs=(GiveBack(task=grant.task, attempt=1, start=6),))
    assert master.expire(10)


def test_who_holds_nothing_is_not_stalled_and_starts_anew_with_its_first_lease(master: Master) -> None:
    assert master.expire(25) == ()
    assert master.lends("a", 25)
    assert not master.expire(29.9)
    master.beats("a", 29, 0)
    assert master.next_deadline(29.9) == 30  # of "b", which is silent
    assert [(item.session, item.stalled) for item in master.expire(35)] == [("b", False), ("a", True)]


def test_without_a_timeout_a_step_may_take_for_ever() -> None:
    master = Master(lease_timeout_s=30.0)
    master.joins("a")
    master.lends("a", 0)
    for now in range(0, 1000, 10):
        master.beats("a", now, 0)
        assert not master.expire(now)
    assert master.status(1000).trainers[0].since_progress_s == 1000
    assert master.status(1000).trainers[0].idle_s == 10


# A start of the master ------------------------------------------------------------------------------------


def test_after_a_start_every_lease_lives_one_full_timeout(master: Master) -> None:
    (grant,) = master.lends("a", 0)
    master.members.stream_broke("a", 1)
    master.members.resume(500)
    assert not master.expire(509.9)
    assert master.void("a", 509.9, grant) == ()
