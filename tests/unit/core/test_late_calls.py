"""Calls that come after their session was given up and has registered again under the same id.

What such a call was lent nobody would ever hear of: the session lives, and the epoch would never end.
"""

from __future__ import annotations

import pytest
from dispatcher_kit import Trainer, whole

from edl_torch.core.calls import ConfirmCall
from edl_torch.core.changes import Changes
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.core.persistence import dump, load, update
from edl_torch.errors import SessionLost


def test_a_late_lease_call_of_before_a_session_was_given_up_is_lent_nothing(
    dispatcher: Dispatcher, a: Trainer
) -> None:
    early, last, on_its_way = a.lease_call(), a.lease_call(), a.lease_call()
    for call in (early, last):
        dispatcher.lease(call, 0.0)
    dispatcher.expire(30.0)
    a.now = 31.0
    a.register()
    for call in (early, last, on_its_way):
        with pytest.raises(SessionLost, match="is member 2 now, the call is of member 1"):
            dispatcher.lease(call, 31.0)
        with pytest.raises(SessionLost):
            dispatcher.poll(call, 31.0)
    assert dispatcher.dataset_status("training").leases == 0
    a.report(*map(whole, a.lease(count=9).grants))
    assert dispatcher.dataset_status("training").finished


def test_a_lease_call_that_waits_ends_with_its_session(dispatcher: Dispatcher, a: Trainer) -> None:
    b = Trainer(dispatcher, "b")
    b.register()
    b.lease(count=9)
    call = a.lease_call()
    assert dispatcher.poll(call, 0.0) is None
    dispatcher.heartbeat("b", b.member, 20.0)
    dispatcher.expire(30.0)
    a.register()
    dispatcher.leave("b", b.member)
    with pytest.raises(SessionLost):
        dispatcher.poll(call, 30.0)
    assert dispatcher.dataset_status("training").leases == 0


def test_whatever_else_comes_late_of_a_session_that_was_given_up_is_refused(
    dispatcher: Dispatcher, a: Trainer
) -> None:
    report, member = a.report_call(), a.member
    confirm = ConfirmCall(session="a", dataset="training", fence=a.fence)
    dispatcher.expire(30.0)
    a.now = 31.0
    a.register()
    for late in (
        lambda: dispatcher.report(report, 40.0),
        lambda: dispatcher.confirm(confirm, 40.0),
        lambda: dispatcher.heartbeat("a", member, 40.0),
        lambda: dispatcher.heartbeat("a", member, 40.0, 1),
    ):
        with pytest.raises(SessionLost, match="registered again"):
            late()
    assert dispatcher.expire(61.0), "none of them is a sign of life"


def test_a_session_that_a_late_registration_brought_back_hears_of_it(
    dispatcher: Dispatcher, a: Trainer
) -> None:
    """It does not know that it was given up. Only what it says as the new member counts."""
    late = a.lease_call()
    dispatcher.lease(late, 0.0)
    dispatcher.expire(30.0)
    Trainer(dispatcher, "a", now=31.0).register()  # a copy of the registration
    a.now = 31.0
    with pytest.raises(SessionLost):
        a.lease()
    a.register()
    with pytest.raises(SessionLost):
        dispatcher.lease(late, 32.0)
    a.report(*map(whole, a.lease(count=9).grants))
    assert dispatcher.dataset_status("training").finished


def test_a_repeated_registration_is_the_same_member(dispatcher: Dispatcher, a: Trainer) -> None:
    member = a.member
    assert a.register().fence.member == member
    b = Trainer(dispatcher, "b")
    assert b.register().fence.member != member
    assert a.lease().grants


def test_a_restart_of_the_master_forgets_no_member() -> None:
    """Neither of those that there are, nor of those that were given up, be it the last one."""
    changes = Changes()
    dispatcher = Dispatcher(ledger_id="L1", changes=changes)
    a = Trainer(dispatcher, "a")
    a.register()
    of_the_first = a.lease_call()
    dispatcher.lease(of_the_first, 0.0)
    rows = update(dispatcher, changes.take())
    dispatcher.expire(30.0)
    rows |= update(dispatcher, changes.take())
    rows = {key: row for key, row in rows.items() if row is not None}
    assert rows == dump(dispatcher)

    a.dispatcher = load(rows, ledger_id="L1", now=40.0)
    a.now = 41.0
    with pytest.raises(SessionLost):
        a.dispatcher.lease(of_the_first, 41.0)
    a.register()
    of_the_second = a.lease_call()

    a.dispatcher = load(dump(a.dispatcher), ledger_id="L1", now=50.0)
    a.now = 51.0
    with pytest.raises(SessionLost, match="is member 2 now, the call is of member 1"):
        a.dispatcher.lease(of_the_first, 51.0)
    granted = a.dispatcher.lease(of_the_second, 51.0).grants
    a.report(*map(whole, (*granted, *a.lease(count=9).grants)))
    assert a.dispatcher.dataset_status("training").finished


def test_rows_that_would_give_a_number_again_are_refused(dispatcher: Dispatcher, a: Trainer) -> None:
    rows = dump(dispatcher)
    del rows["next", "member"]
    with pytest.raises(ValueError, match="still to be given"):
        load(rows, ledger_id="L1", now=0.0)
