"""Batches that are done, or go back, in any order; and how large a token and a journal get by that."""

from __future__ import annotations

import json
import random

import pytest

from edl_torch.core.calls import (
    NEW_PASS,
    Acknowledgement,
    GiveBack,
    LeaseCall,
    RegisterCall,
    Registration,
    ReportCall,
)
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.core.persistence import dump, load
from edl_torch.core.token import Token
from edl_torch.shard import Source

TRAINERS, LEASES, BATCHES, BATCH = 1_000, 2, 16, 32  # leases of a trainer, batches of a lease
LEASE = BATCHES * BATCH
RECORDS = TRAINERS * LEASES * LEASE * 200  # so many that no lease is smaller, as near the end


def done_of(order: str, rng: random.Random) -> list[int]:
    """Return the batches of a lease that are done, half of them."""
    if order == "prefix":
        return list(range(BATCHES // 2))
    if order == "every other":
        return list(range(1, BATCHES, 2))
    return rng.sample(range(BATCHES), BATCHES // 2)


def job(order: str) -> Dispatcher:
    """A thousand trainers in the middle of what they hold."""
    rng = random.Random(7)
    dispatcher = Dispatcher(ledger_id="L")
    sources = (Source(name="imagenet.rec", count=RECORDS),)
    registration = Registration(name="training", sources=sources, records_per_shard=LEASE)
    granted = []
    for number in range(TRAINERS):
        session = f"session-{number:04}"
        fence = dispatcher.register(
            RegisterCall(session=session, worker_id=session, batch_size=BATCH, registration=registration), 0.0
        ).fence
        call = LeaseCall(
            session=session, dataset="training", fence=fence, request=1, epoch=NEW_PASS, count=LEASES
        )
        granted.append((session, fence, dispatcher.lease(call, 0.0).grants))
    for session, fence, grants in granted:
        done = [
            Acknowledgement(
                task=grant.task,
                attempt=grant.attempt,
                start=batch * BATCH,
                upto=(batch + 1) * BATCH,
            )
            for grant in grants
            for batch in done_of(order, rng)
        ]
        report = ReportCall(
            session=session, dataset="training", fence=fence, request=1, acknowledgements=tuple(done)
        )
        assert dispatcher.report(report, 0.0).stale == ()
    return dispatcher


def sizes(dispatcher: Dispatcher) -> tuple[int, int]:
    """Return the bytes of a token, and of a journal with nothing but the state."""
    rows = dump(dispatcher)
    journal = sum(len(json.dumps([key, row], separators=(",", ":"))) + 1 for key, row in rows.items())
    again = load(rows, ledger_id="L", now=0.0)
    assert again.token("training") == dispatcher.token("training")
    return len(dispatcher.token("training")), journal


@pytest.mark.parametrize("order", ["random", "every other"])
def test_a_thousand_trainers_that_are_done_in_any_order_fit_a_small_token(order: str) -> None:
    in_order, out_of_order = sizes(job("prefix")), sizes(job(order))
    pieces = BATCHES // 2  # of a lease, at most
    assert out_of_order[0] < pieces * in_order[0]
    assert out_of_order[0] < 400_000, "bytes of a token"
    assert out_of_order[1] < 1.4 * in_order[1], "bytes of a journal"


def test_a_batch_in_the_middle_goes_back_alone_and_what_is_told_of_it_later_is_refused() -> None:
    dispatcher = Dispatcher(ledger_id="L")
    registration = Registration(name="training", sources=(Source(name="a", count=64),), records_per_shard=64)
    register = RegisterCall(session="s", worker_id="s", batch_size=8, registration=registration)
    fence = dispatcher.register(register, 0.0).fence
    call = LeaseCall(session="s", dataset="training", fence=fence, request=1, epoch=NEW_PASS, count=1)
    (grant,) = dispatcher.lease(call, 0.0).grants
    about = {"task": grant.task, "attempt": grant.attempt}

    def report(
        number: int, *, done: tuple[int, int] = (0, 0), back: tuple[int, int] = (0, 0)
    ) -> tuple[int, ...]:
        return dispatcher.report(
            ReportCall(
                session="s",
                dataset="training",
                fence=fence,
                request=number,
                acknowledgements=(Acknowledgement(**about, start=done[0], upto=done[1]),),
                give_backs=(GiveBack(**about, start=back[0], upto=back[1]),),
            ),
            0.0,
        ).stale

    assert report(1, done=(0, 8), back=(16, 24)) == ()
    token = Token.decode(dispatcher.token("training"))
    assert [(cut.skip, cut.stop) for cut in token.open] == [(8, 16), (24, 32), (16, 24)]
    assert report(2, done=(8, 24)) == (grant.task,), "all of it, or nothing"
    again = load(dump(dispatcher), ledger_id="L", now=0.0)
    for master in (dispatcher, again):
        assert master.dataset_status("training").acknowledged == 8
        late = ReportCall(
            session="s",
            dataset="training",
            fence=fence,
            request=3,
            reported=2,
            acknowledgements=(Acknowledgement(**about, start=16, upto=17),),
        )
        assert master.report(late, 0.0).stale == (grant.task,)
