"""Sessions that take part: who they are, their fences, and calls that come late."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from core_kit import Trainer, photo, whole

from edl_torch.core.dispatcher import Dispatcher
from edl_torch.core.members import ASKS, Members, Participants
from edl_torch.core.persistence import dump, load
from edl_torch.core.registration import differences, identity
from edl_torch.errors import SessionLost, StaleLease
from edl_torch.fingerprint import Fingerprint
from edl_torch.shard import DatasetSpec, Source


@pytest.fixture
def members() -> Members:
    members = Members(lease_timeout_s=30.0, grace_s=1.0)
    members.enter("s", "worker-0", 100.0)
    return members


@pytest.mark.parametrize(
    ("events", "dead_at"),
    [
        ((), 130.0),
        ((("heard", 120.0),), 150.0),
        ((("stream_opened", 100.0), ("stream_broke", 110.0)), 111.0),
        ((("stream_broke", 110.0), ("stream_opened", 110.5)), 140.5),
        ((("stream_broke", 110.0), ("heard", 110.9)), 111.9),  # a call after the break extends the grace
        ((("stream_broke", 110.0), ("stream_broke", 110.9)), 111.0),  # and a second break does not
    ],
)
def test_a_session_is_dead_once_it_was_silent_or_without_its_stream_for_too_long(
    members: Members, events: tuple[tuple[str, float], ...], dead_at: float
) -> None:
    for what, now in events:
        if what == "heard":
            members.heard("s", 1, now)
        else:
            getattr(members, what)("s", now)
    assert members.next_deadline() == dead_at
    assert members.dead(dead_at - 0.1) == ()
    assert [member.session for member in members.dead(dead_at)] == ["s"]


def test_the_grace_never_outlasts_the_lease_timeout() -> None:
    members = Members(lease_timeout_s=2.0, grace_s=10.0)
    members.enter("s", "worker-0", 0.0)
    members.stream_broke("s", 1.0)
    assert members.next_deadline() == 2.0


def test_a_session_that_left_is_stale(members: Members) -> None:
    assert members.leave("s") is not None
    assert members.leave("s") is None
    assert len(members) == 0
    with pytest.raises(StaleLease, match="'s' is not known"):
        members.heard("s", 1, 101.0)


@pytest.mark.parametrize(
    ("lease_timeout_s", "progress_timeout_s", "heartbeat_s"),
    [(30.0, 0.0, 10.0), (30.0, 6.0, 2.0), (6.0, 30.0, 2.0), (1e9, 0.0, 1200.0), (1e9, 1e9, 1200.0)],
)
def test_heartbeats_come_several_times_before_silence_or_standstill_counts(
    lease_timeout_s: float, progress_timeout_s: float, heartbeat_s: float
) -> None:
    members = Members(lease_timeout_s=lease_timeout_s, grace_s=1.0, progress_timeout_s=progress_timeout_s)
    assert members.heartbeat_s == heartbeat_s


# Who waits for remainders -----------------------------------------------------------------------------------


def waiting(*batch_sizes: int) -> Participants:
    """Sessions "0", "1", … that have looked once each."""
    participants = Participants()
    for number, size in enumerate(batch_sizes):
        participants.enter(str(number), size)
        participants.ask(str(number))
    return participants


def test_while_nobody_waits_they_are_for_whoever_takes_part() -> None:
    participants = waiting(8, 4)
    participants.nobody_waits()
    assert participants.can_use(4)
    assert not participants.can_use(3)
    participants.leave("1")
    assert not participants.can_use(7)


def test_who_let_the_others_ask_often_has_stopped_waiting() -> None:
    participants = waiting(4, 8)
    for _ in range(2 * ASKS - 1):
        assert participants.can_use(4)
        participants.ask("1")
    assert not participants.can_use(7)
    participants.ask("0")
    assert participants.can_use(4)


def test_another_batch_size_counts_from_then_on() -> None:
    participants = waiting(4)
    participants.enter("0", 6)
    participants.ask("0")
    assert not participants.can_use(5)
    assert participants.can_use(6)
    participants.leave("0")
    assert participants.can_use(1), "for whoever may come"
    assert repr(participants) == "<Participants n=0 waiting=0>"


def test_a_look_costs_the_same_however_many_wait() -> None:
    participants = waiting(*[8] * 10_000)
    began = time.process_time()
    for number in range(10_000):
        participants.ask(str(number))
        assert not participants.can_use(7)
    assert time.process_time() - began < 1.0  # some 10 ms; looking at each of them: seconds


# Two descriptions are the same dataset exactly when their identities agree ----------------------------------


SPEC = DatasetSpec(
    name="training",
    sources=(Source(name="a", count=10), Source(name="b", start=3, count=7)),
    records_per_shard=4,
)


def test_an_identity_never_changes() -> None:
    assert identity(SPEC) == {
        "sources": "8d31903952193a39f4dcd662cbebc776",
        "names": "418f58ef4681182af435695060fa85e1",
        "below": "418f58ef4681182af435695060fa85e1",  # they have no folder in common
        "num_sources": 2,
        "size": 17,
        "records_per_shard": 4,
        "seed": 0,
        "shuffle": False,
        "shuffle_shards": False,
        "shuffle_in_shard": False,
    }


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        ((Source(name="b", start=3, count=7), Source(name="a", count=10)), ["sources", "names"]),
        ((Source(name="c", count=10), Source(name="b", start=3, count=7)), ["names"]),
        ((Source(name="a", start=1, count=10), Source(name="b", start=3, count=7)), ["sources"]),
        ((Source(name="a", count=9), Source(name="b", start=3, count=8)), ["sources"]),
    ],
    ids=["order", "name", "start", "count"],
)
def test_order_names_and_ranges_of_sources_are_part_of_the_identity(
    sources: tuple[Source, ...], said: list[str]
) -> None:
    lines = differences(identity(SPEC), identity(replace(SPEC, sources=sources)))
    assert [line.split()[0] for line in lines] == said


@pytest.mark.parametrize(("one", "other"), [("v1", "v1"), ("v1", ""), ("", "v1"), ("", "")])
def test_names_of_sources_may_be_others_where_both_fingerprints_are_known(one: str, other: str) -> None:
    sources = tuple(replace(source, name="/mnt/" + source.name) for source in SPEC.sources)
    here, there = (Fingerprint.given(version).encode() if version else "" for version in (one, other))
    differing = differences(
        identity(replace(SPEC, fingerprint=here)), identity(replace(SPEC, sources=sources, fingerprint=there))
    )
    assert [line.split()[0] for line in differing] == ([] if one and other else ["names"])


def test_names_cannot_imitate_the_bounds_between_sources() -> None:
    one = replace(SPEC, sources=(Source(name="a0+1;1:b", count=1),))
    two = replace(SPEC, sources=(Source(name="a", count=1), Source(name="b", count=1)))
    assert identity(one)["names"] != identity(two)["names"]


def test_a_file_name_that_is_not_unicode_has_an_identity() -> None:
    odd = replace(SPEC, sources=(Source(name="caf\udce9.jpg", count=1),))
    even = replace(SPEC, sources=(Source(name="café.jpg", count=1),))
    assert identity(odd)["names"] != identity(even)["names"]


# Calls that come after their session was given up and has registered again under the same id ----------------


@pytest.mark.parametrize("progress", [None, 1])
def test_a_heartbeat_of_a_session_that_was_given_up_is_refused(
    dispatcher: Dispatcher, a: Trainer, progress: int | None
) -> None:
    member = a.member
    dispatcher.expire(30.0)
    a.now = 31.0
    a.register()
    with pytest.raises(SessionLost, match="registered again"):
        dispatcher.heartbeat("a", member, 40.0, progress)
    assert dispatcher.expire(61.0), "it is no sign of life"


def test_rows_that_would_give_a_number_again_are_refused(dispatcher: Dispatcher, a: Trainer) -> None:
    rows = dump(dispatcher)
    del rows["next", "member"]
    with pytest.raises(ValueError, match="still to be given"):
        load(rows, ledger_id="L1", now=0.0)


# Fences: calls are those of a trainer that is still part of the dataset's history ---------------------------


@pytest.fixture
def b(dispatcher: Dispatcher, a: Trainer) -> Trainer:
    """Joins after `a` did."""
    b = Trainer(dispatcher, "b")
    b.register()
    return b


CALLS: dict[str, Callable[..., Any]] = {
    "snapshot": lambda trainer, **change: trainer.snapshot(**change),
    "progress": lambda trainer, **change: trainer.progress(**change),
    "restore": lambda trainer, **change: trainer.restore(None, **change),
    "lease": lambda trainer, **change: trainer.lease(**change),
    "report": lambda trainer, **change: trainer.report(**change),
    "confirm": lambda trainer, **change: trainer.confirm(**change),
}


@pytest.mark.parametrize("ask", CALLS.values(), ids=list(CALLS))
def test_a_superseded_trainer_is_refused_and_changes_nothing(
    dispatcher: Dispatcher, a: Trainer, b: Trainer, ask: Callable[..., Any]
) -> None:
    (grant,) = a.lease(count=1).grants
    a.report(whole(grant))
    assert b.restore(a.snapshot()) == 2
    before = photo(dispatcher)
    with pytest.raises(StaleLease, match="is in lineage 2; the call is of lineage 1"):
        ask(a)
    assert photo(dispatcher) == before
    assert b.progress().acknowledged == grant.slice.limit, "the living one goes on"


@pytest.mark.parametrize("ask", CALLS.values(), ids=list(CALLS))
def test_a_call_of_another_ledger_is_refused(
    dispatcher: Dispatcher, a: Trainer, ask: Callable[..., Any]
) -> None:
    before = photo(dispatcher)
    for ledger in ("", "another"):
        with pytest.raises(StaleLease, match=f"the call is of ledger {ledger}"):
            ask(a, ledger=ledger)
    assert photo(dispatcher) == before


@pytest.mark.parametrize("ask", CALLS.values(), ids=list(CALLS))
def test_a_call_of_before_its_session_was_given_up_is_refused(
    dispatcher: Dispatcher, a: Trainer, ask: Callable[..., Any]
) -> None:
    earlier = a.fence
    dispatcher.expire(30.0)
    with pytest.raises(SessionLost, match="not known"):
        ask(a)
    a.now = 31.0
    a.register()
    before = photo(dispatcher)
    for member in (earlier.member, 0, 99):
        with pytest.raises(SessionLost, match="registered again"):
            ask(a, member=member)
    assert photo(dispatcher) == before
    ask(a)


def test_a_lost_answer_to_a_restore_is_given_again(dispatcher: Dispatcher, a: Trainer) -> None:
    token = a.snapshot()
    a.lease()
    call = a.restore_call(token)
    assert dispatcher.restore(call, 0.0) == 2
    assert dispatcher.restore(call, 0.0) == 2
    restarted = load(dump(dispatcher), ledger_id=dispatcher.ledger_id, now=0.0)
    assert restarted.restore(call, 0.0) == 2
    assert restarted.token("training") == token
