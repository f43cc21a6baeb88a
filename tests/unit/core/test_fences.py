"""Positions, restores and progress are those of a trainer that is still part of the dataset's history."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from core_kit import Trainer, photo, whole

from edl_torch.core.dispatcher import Dispatcher
from edl_torch.core.persistence import dump, load
from edl_torch.errors import SessionLost, StaleLease


@pytest.fixture
def b(dispatcher: Dispatcher, a: Trainer) -> Trainer:
    """Joins after `a` did."""
    b = Trainer(dispatcher, "b")
    b.register()
    return b


ASKS: dict[str, Callable[..., Any]] = {
    "snapshot": lambda trainer, **change: trainer.snapshot(**change),
    "progress": lambda trainer, **change: trainer.progress(**change),
    "restore": lambda trainer, **change: trainer.restore(None, **change),
    "lease": lambda trainer, **change: trainer.lease(**change),
    "report": lambda trainer, **change: trainer.report(**change),
    "confirm": lambda trainer, **change: trainer.confirm(**change),
}


@pytest.mark.parametrize("ask", ASKS.values(), ids=list(ASKS))
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


@pytest.mark.parametrize("ask", ASKS.values(), ids=list(ASKS))
def test_a_call_of_another_ledger_is_refused(
    dispatcher: Dispatcher, a: Trainer, ask: Callable[..., Any]
) -> None:
    before = photo(dispatcher)
    for ledger in ("", "another"):
        with pytest.raises(StaleLease, match=f"the call is of ledger {ledger}"):
            ask(a, ledger=ledger)
    assert photo(dispatcher) == before


@pytest.mark.parametrize("ask", ASKS.values(), ids=list(ASKS))
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


def test_a_repeat_of_an_older_restore_does_not_undo_a_newer_one(
    dispatcher: Dispatcher, a: Trainer, b: Trainer
) -> None:
    call = a.restore_call(None)
    assert dispatcher.restore(call, 0.0) == 2
    b.fence = replace(b.fence, lineage=2)
    assert b.restore(None) == 3
    with pytest.raises(StaleLease, match="lineage 3"):
        dispatcher.restore(call, 0.0)


def test_another_restore_of_the_same_trainer_is_not_taken_for_a_repeat(
    dispatcher: Dispatcher, a: Trainer
) -> None:
    """The answer to the first one was lost, and its caller gave up: it does not know what it replaces."""
    dispatcher.restore(a.restore_call(None), 0.0)
    with pytest.raises(StaleLease, match="lineage 2; the call is of lineage 1"):
        a.restore(a.dispatcher.token("training"))


def test_a_goodbye_of_an_earlier_member_ends_nothing(dispatcher: Dispatcher, a: Trainer) -> None:
    earlier = a.member
    dispatcher.expire(30.0)
    a.now = 31.0
    a.register()
    assert a.lease().grants
    assert dispatcher.leave("a", earlier) == ()
    assert dispatcher.dataset_status("training").leases == 1
