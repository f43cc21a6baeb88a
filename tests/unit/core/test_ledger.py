"""What a ledger lends, when an epoch is over, and outcomes; `test_ledger_machine` covers combinations."""

from __future__ import annotations

import json
import random
import time
import tracemalloc
from contextlib import nullcontext
from dataclasses import replace
from itertools import cycle

import pytest
from core_kit import (
    SPEC,
    SimulatedTrainer,
    Trainer,
    acknowledge,
    first_of,
    lease_all,
    ledger_of,
    run_to_the_end,
)
from hypothesis import given
from hypothesis import strategies as st

from edl_torch.core.calls import NEW_PASS, Acknowledgement, GiveBack, Registration
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.core.ledger import ShardLedger
from edl_torch.core.persistence import dump, load
from edl_torch.core.quarantine import token_bytes
from edl_torch.core.token import Token
from edl_torch.errors import DatasetConflict, TokenError, TooManyBadRecords
from edl_torch.shard import Source

# Options


@pytest.mark.parametrize(("lent", "is_refused"), [(0, False), (1, True), (2, True), (3, False)])
def test_fewer_epochs_are_refused_in_the_middle_of_one_that_they_leave_out(
    lent: int, is_refused: bool
) -> None:
    ledger = ledger_of(3, 1, num_epochs=3)
    ledger.join("s", 1)
    acknowledge(ledger, "s", *lease_all(ledger, "s"))
    if lent:
        assert len(lease_all(ledger, "s", 1, count=lent)) == lent
    for fits in (0, 2):
        ledger.respecify(replace(ledger.spec, num_epochs=fits))
    refusal = r"in the middle of epoch 1: num_epochs=1 would drop.*num_epochs=2 or"
    with pytest.raises(DatasetConflict, match=refusal) if is_refused else nullcontext():
        ledger.respecify(replace(ledger.spec, num_epochs=1))


@pytest.mark.parametrize(("lent", "is_refused"), [(0, False), (1, True), (2, True), (3, False)])
@pytest.mark.parametrize("done", [False, True])
def test_a_token_in_the_middle_of_an_epoch_that_the_job_has_not_is_refused(
    lent: int, is_refused: bool, done: bool
) -> None:
    """And not gone on with: some records of that epoch would be read, and others not."""
    ledger = ledger_of(3, 1, num_epochs=3)
    ledger.join("s", 1)
    acknowledge(ledger, "s", *lease_all(ledger, "s"))
    if lent:
        grants = lease_all(ledger, "s", 1, count=lent)
        if done:
            acknowledge(ledger, "s", *grants)
    token = ledger.snapshot()
    for fits in (0, 2, 3):
        ledger_of(3, 1, num_epochs=fits).restore(token)
    with (
        pytest.raises(TokenError, match=r"epoch 1 of .* num_epochs=1 has not: give num_epochs=2")
        if is_refused or (lent and not done)
        else nullcontext()
    ):
        ledger_of(3, 1, num_epochs=1).restore(token)


# Lending


@pytest.mark.parametrize("way", ["respecified", "restored"])
def test_a_barrier_that_is_lifted_at_the_end_of_an_epoch_lets_the_job_go_on(way: str) -> None:
    ledger = ledger_of(16, 8, num_epochs=2)
    ledger.join("gone", 8)
    assert len(lease_all(ledger, "gone")) == 2  # the cursor stands at the end of epoch 0
    token = ledger.snapshot()
    if way == "respecified":
        ledger.release("gone")
        ledger.respecify(replace(ledger.spec, epoch_barrier=False))
    else:
        ledger = ledger_of(16, 8, num_epochs=2, epoch_barrier=False)
        ledger.restore(token)
    ledger.join("s", 8)
    while grants := lease_all(ledger, "s"):
        acknowledge(ledger, "s", *grants)
    assert (ledger.acknowledged, ledger.finished) == (32, True)


def test_leases_shrink_towards_the_end_in_whole_batches() -> None:
    ledger = ledger_of(200, 50)
    ledger.join("a", 4)
    ledger.join("b", 4)
    ledger.participants.throughput.trained("a", 200)
    ledger.participants.throughput.trained("b", 200)
    turns = cycle(("a", "b"))
    sizes = []
    while grants := lease_all(ledger, name := next(turns), count=1):
        (grant,) = grants
        assert grant.slice.limit % 4 == 0 or grant.slice.stop == 50
        assert grant.slice.limit <= max(4, (200 - sum(sizes)) // 4)
        sizes.append(grant.slice.limit)
        acknowledge(ledger, name, grant)
    assert sum(sizes) == 200
    assert sizes[:3] == [48, 2, 36]  # 200 // (2 * 2) in whole batches, the shard's last 2, 150 // 4
    assert max(sizes[-5:]) == 4


# Epochs and waiting


# Tokens


@given(
    size=st.integers(1, 200),
    per=st.integers(1, 30),
    batches=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    epochs=st.integers(1, 3),
    barrier=st.booleans(),
    drops=st.booleans(),
    hold_back=st.integers(0, 3),
)
def test_trainers_of_any_sizes_finish_together(
    size: int, per: int, batches: list[int], epochs: int, barrier: bool, drops: bool, hold_back: int
) -> None:
    ledger = ledger_of(size, per, num_epochs=epochs, epoch_barrier=barrier)
    trainers = []
    for place, batch in enumerate(batches):
        name = f"trainer-{place}"
        ledger.join(name, batch)
        plain = place % 3 == 2
        trainers.append(
            SimulatedTrainer(ledger, name, batch, elastic=not plain, drop_last=drops, hold_back=hold_back)
        )
    trained = run_to_the_end(ledger, trainers)
    assert len(trained) == len(set(trained)) == size * epochs - ledger.dropped


# Size


def test_a_trillion_shuffled_records_cost_no_time_and_no_memory(capsys: pytest.CaptureFixture[str]) -> None:
    spec = replace(
        SPEC,
        sources=(Source(name="a", count=10**12),),
        records_per_shard=256,
        shuffle=True,
        shuffle_shards=True,
        num_epochs=3,
    )
    tracemalloc.start()
    started = time.process_time()
    ledger = ShardLedger(spec)
    ledger.join("s", 32)
    (grant,) = lease_all(ledger, "s", count=1)
    elapsed = time.process_time() - started
    for _ in range(500):
        acknowledge(ledger, "s", *lease_all(ledger, "s", count=1))
        ledger.leases.forget_ended("s")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    with capsys.disabled():
        print(f" [made, joined and leased in {elapsed * 1000:.1f} ms, peak {peak / 1024:.0f} KiB] ", end="")
    assert grant.slice.limit == 256
    assert elapsed < 0.5
    assert peak < 2**20
    assert len(ledger.snapshot().encode()) < 1000


# Outcomes: acknowledged, bad, given back, and whose is refused ----------------------------------------------


def test_more_bad_records_than_allowed_fail_the_job_with_the_records_name() -> None:
    ledger = ledger_of(max_bad_records=0)
    ledger.join("s", 8)
    grant = lease_all(ledger, "s", count=1)[0]
    ledger.fail("s", grant.task, grant.attempt, 5, "truncated")
    with pytest.raises(TooManyBadRecords, match=r"record 5 of 'a': truncated.*max_bad_records"):
        lease_all(ledger, "s")


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


# Remainders that make whole batches -------------------------------------------------------------------------


def test_remainders_of_many_batches_are_shared_among_those_who_wait() -> None:
    """The one who asks first would train on all of them while the others wait."""
    ledger = ledger_of(64, 1)
    for name in "abcd":
        ledger.join(name, 4)
    for grant in lease_all(ledger, "a", count=64):
        ledger.give_back("a", grant.task, grant.attempt, 0, remainder=True)
    shares = [sum(g.slice.limit for g in lease_all(ledger, name, 0)) for name in "abcdabcd"]
    assert shares == [8, 4, 4, 4, 4, 4, 4, 4]
    bundles = {g.bundle for g in lease_all(ledger, "a", 0)}
    assert bundles == {9}, "numbered one after the other"


# Windows of several shards: how they are lent, cut, and what comes back of them -----------------------------


WINDOW = {"shuffle_shards": True, "shuffle_in_shard": True, "shuffle_window": 4}


def trained_on(ledger: ShardLedger, session: str, records_of: int) -> None:
    """Train until a session has shown so much."""
    while records_of > 0:
        (grant,) = ledger.lease(session, epoch=NEW_PASS, count=1)[2]
        acknowledge(ledger, session, grant)
        records_of -= grant.slice.limit


def test_a_trainer_that_has_shown_nothing_is_lent_no_more_than_a_shard() -> None:
    ledger = ledger_of(1024, 8, **WINDOW)
    ledger.join("s", 4)
    limits = []
    for _ in range(6):
        (grant,) = ledger.lease("s", epoch=NEW_PASS, count=1)[2]
        limits.append(grant.slice.limit)
        acknowledge(ledger, "s", grant)
    assert limits == [8, 16, 8, 32, 32, 32]  # the third ends a window


def test_a_lease_has_no_more_than_a_million_records() -> None:
    ledger = ledger_of(10**12, 1000, shuffle_in_shard=True, shuffle_window=10**8)
    ledger.join("s", 256)
    trained_on(ledger, "s", 1 << 21)
    (grant,) = ledger.lease("s", epoch=NEW_PASS, count=1)[2]
    assert grant.slice.limit == 1 << 20
    big = ledger_of(10**12, 10**7, shuffle_in_shard=True, shuffle_window=10**3)
    big.join("s", 256)
    (grant,) = big.lease("s", epoch=NEW_PASS, count=1)[2]
    assert grant.slice.limit == 10**7  # a shard was always lent whole


def test_shards_left_counts_shards_of_windows() -> None:
    ledger = ledger_of(80, 8, **WINDOW)  # windows of 4, 4 and 2 shards
    ledger.join("s", 4)
    assert ledger.shards_left == 10
    (first,) = ledger.lease("s", epoch=NEW_PASS, count=1)[2]
    assert ledger.shards_left == 10
    acknowledge(ledger, "s", first)
    assert ledger.shards_left == 10
    grants = lease_all(ledger, "s")
    acknowledge(ledger, "s", *(g for g in grants if g.slice.shard != grants[-1].slice.shard))
    assert ledger.shards_left == 2
