"""What becomes of lent records: acknowledged, bad, given back, and whose outcome is refused."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from core_kit import Trainer, acknowledge, first_of, lease_all, ledger_of

from edl_torch.core.calls import Acknowledgement, GiveBack, Registration
from edl_torch.core.changes import Version
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.core.ledger import ShardLedger
from edl_torch.core.persistence import dump, load
from edl_torch.core.quarantine import token_bytes
from edl_torch.core.token import Token
from edl_torch.errors import TooManyBadRecords
from edl_torch.shard import Source


def test_more_bad_records_than_allowed_fail_the_job_with_the_records_name() -> None:
    ledger = ledger_of(max_bad_records=0)
    ledger.join("s", 8)
    grant = lease_all(ledger, "s", count=1)[0]
    ledger.fail("s", grant.task, grant.attempt, 5, "truncated")
    with pytest.raises(TooManyBadRecords, match=r"record 5 of 'a': truncated.*max_bad_records"):
        lease_all(ledger, "s")


def test_a_bad_record_counts_once_however_many_epochs_meet_it() -> None:
    ledger = ledger_of(8, 8, max_bad_records=1, num_epochs=3)
    ledger.join("s", 8)
    for epoch in range(3):
        (grant,) = lease_all(ledger, "s")
        ledger.fail("s", grant.task, grant.attempt, 5, "truncated")
        acknowledge(ledger, "s", grant)
        assert [bad.epoch for bad in ledger.quarantine] == list(range(epoch + 1))  # each is an outcome
    ledger.restore(ledger.snapshot())
    assert (ledger.finished, ledger.failure, ledger.acknowledged) == (True, "", 21)


def test_of_many_bad_records_as_many_are_shown_as_there_is_place_for() -> None:
    ledger = ledger_of(8, 8, max_bad_records=8)
    ledger.join("s", 8)
    (grant,) = lease_all(ledger, "s")
    for position in range(3):
        ledger.fail("s", grant.task, grant.attempt, position, "torn")
    bad = tuple(ledger.quarantine)
    sizes = [token_bytes(bad[:n]) for n in range(4)]
    assert sizes[3] == ledger.quarantine.bytes
    for n in range(1, 4):
        assert ledger.quarantine.within(sizes[n]) == bad[:n]
        assert ledger.quarantine.within(sizes[n] - 1) == bad[: n - 1]
        assert ledger.quarantine.first(n) == bad[:n]
    assert ledger.quarantine.within(-1) == ()


def test_a_second_bad_record_fails_the_job_in_whichever_epoch_it_is_met() -> None:
    ledger = ledger_of(8, 8, max_bad_records=1, num_epochs=3)
    ledger.join("s", 8)
    for position in (5, 5, 6):
        assert not ledger.failure
        (grant,) = lease_all(ledger, "s")
        ledger.fail("s", grant.task, grant.attempt, position, "truncated")
        acknowledge(ledger, "s", grant)
    assert "has 2 bad record(s), max_bad_records is 1; the last is record 6" in ledger.failure
    ledger.restore(None)
    assert not ledger.failure


def test_a_reason_that_names_its_record_already_is_not_named_again() -> None:
    ledger = ledger_of(8, 8)
    ledger.join("s", 8)
    (grant,) = lease_all(ledger, "s")
    ledger.fail("s", grant.task, grant.attempt, 5, "record 5 of 'a': OSError: truncated")
    assert "the last is record 5 of 'a': OSError: truncated. Repair" in ledger.failure


def test_a_failed_job_goes_on_when_more_bad_records_are_allowed() -> None:
    ledger = ledger_of(max_bad_records=0)
    ledger.join("s", 8)
    grant = lease_all(ledger, "s", count=1)[0]
    ledger.fail("s", grant.task, grant.attempt, 5, "truncated")
    ledger.respecify(replace(ledger.spec, max_bad_records=1))
    assert lease_all(ledger, "s")


def test_a_token_with_too_many_bad_records_does_not_hide_them() -> None:
    ledger = ledger_of(max_bad_records=0)
    ledger.join("s", 8)
    grant = lease_all(ledger, "s", count=1)[0]
    ledger.fail("s", grant.task, grant.attempt, 5, "truncated")
    ledger.restore(ledger.snapshot())
    with pytest.raises(TooManyBadRecords):
        lease_all(ledger, "s")


def test_lent_records_are_those_without_any_outcome() -> None:
    ledger = ledger_of(8, 8, num_epochs=2, max_bad_records=1)
    ledger.join("s", 8)
    (grant,) = lease_all(ledger, "s")
    ledger.fail("s", grant.task, grant.attempt, 0, "torn")
    ledger.acknowledge("s", grant.task, grant.attempt, 5)
    assert ledger.leased_records == 3
    ledger.give_back("s", grant.task, grant.attempt, 5, remainder=True)
    assert (ledger.acknowledged, len(ledger.quarantine), ledger.dropped) == (4, 1, 3)
    assert (ledger.leased_records, ledger.shown_epoch) == (0, 1)
    (grant,) = lease_all(ledger, "s")
    assert ledger.leased_records == 8
    acknowledge(ledger, "s", grant)
    assert (ledger.leased_records, ledger.finished) == (0, True)
    assert ledger.shown_epoch == 1  # there is no third epoch


def test_giving_back_nothing_wakes_nobody() -> None:
    version = Version()
    ledger = ShardLedger(ledger_of(8, 8).spec, version=version)
    ledger.join("s", 8)
    (grant,) = lease_all(ledger, "s")
    before = version.count
    ledger.give_back("s", grant.task, grant.attempt, grant.slice.stop)
    assert (version.count, ledger.leased_records) == (before, 8)


# Batches that are done, or go back, in any order; and how large a token and a journal get by that -----------


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
    trainers = [Trainer(dispatcher, f"session-{number:04}", BATCH) for number in range(TRAINERS)]
    for trainer in trainers:
        trainer.register(registration)
    held = [(trainer, trainer.lease(count=LEASES).grants) for trainer in trainers]
    for trainer, grants in held:
        done = [
            Acknowledgement(task=grant.task, attempt=1, start=batch * BATCH, upto=(batch + 1) * BATCH)
            for grant in grants
            for batch in done_of(order, rng)
        ]
        assert trainer.report(*done).stale == ()
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
    a = Trainer(dispatcher, "a", batch_size=8)
    a.register(Registration(name="training", sources=(Source(name="a", count=64),), records_per_shard=64))
    grant = first_of(a)

    def done(start: int, upto: int) -> Acknowledgement:
        return Acknowledgement(task=grant.task, attempt=1, start=start, upto=upto)

    assert a.report(done(0, 8), GiveBack(task=grant.task, attempt=1, start=16, upto=24)).stale == ()
    token = Token.decode(dispatcher.token("training"))
    assert [(cut.skip, cut.stop) for cut in token.open] == [(8, 16), (24, 32), (16, 24)]
    assert a.report(done(8, 24)).stale == (grant.task,), "all of it, or nothing"
    late = a.report_call(done(16, 17))
    for master in (dispatcher, load(dump(dispatcher), ledger_id="L", now=0.0)):
        assert master.dataset_status("training").acknowledged == 8
        assert master.report(late, 0.0).stale == (grant.task,)
