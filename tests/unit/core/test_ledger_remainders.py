"""Remainders that make whole batches, and windows of several shards."""

from __future__ import annotations

import pytest
from core_kit import SimulatedTrainer, acknowledge, lease_all, ledger_of, run_to_the_end, verdict

from edl_torch.core.backlog import Backlog
from edl_torch.core.calls import NEW_PASS, PassState
from edl_torch.core.ledger import ShardLedger


def drop_last(size: int, *batches: int, **options: object) -> tuple[ShardLedger, list[SimulatedTrainer]]:
    ledger = ledger_of(size, 8, **options)
    trainers = []
    for name, batch in zip("abc", batches, strict=False):
        ledger.join(name, batch)
        trainers.append(SimulatedTrainer(ledger, name, batch, drop_last=True))
    return ledger, trainers


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


@pytest.mark.parametrize("size", [1, 7, 16, 21, 30])
@pytest.mark.parametrize("batches", [(4,), (4, 4), (4, 3, 5)])
@pytest.mark.parametrize("barrier", [True, False])
def test_drop_last_drops_less_than_one_batch_an_epoch(
    size: int, batches: tuple[int, ...], barrier: bool
) -> None:
    ledger, trainers = drop_last(size, *batches, num_epochs=2, epoch_barrier=barrier)
    trained = run_to_the_end(ledger, trainers)
    assert len(trained) + ledger.dropped == 2 * size
    assert ledger.dropped < max(batches) * (2 if barrier else 1)


def test_a_trainer_that_stops_waiting_holds_up_nobody() -> None:
    ledger = ledger_of(3, 1)
    for name, size in (("a", 4), ("b", 2), ("gone", 1)):
        ledger.join(name, size)
    held = lease_all(ledger, "a")
    assert verdict(ledger, "gone", 0) is PassState.OPEN  # it waits, and is never heard again
    positions = [(grant, (0,)) for grant in held]
    trainers = [
        SimulatedTrainer(ledger, "a", 4, drop_last=True, held=positions),
        SimulatedTrainer(ledger, "b", 2, drop_last=True),
    ]
    run_to_the_end(ledger, trainers)
    assert (ledger.acknowledged, ledger.dropped) == (2, 1)


def test_remainders_do_not_pile_up_where_epochs_never_end() -> None:
    ledger = ledger_of(8, 8, num_epochs=0, epoch_barrier=False)
    ledger.join("s", 4)
    for _ in range(20):
        for grant in lease_all(ledger, "s", count=1):
            keep = 0 if grant.bundle else 3
            ledger.acknowledge("s", grant.task, grant.attempt, grant.slice.stop - keep)
            ledger.give_back("s", grant.task, grant.attempt, grant.slice.stop - keep, remainder=True)
        assert sum(remainder.limit for remainder in ledger.snapshot().remainders) < 8


def test_a_cursor_that_is_moved_goes_on_from_there() -> None:
    todo = Backlog(ledger_of(32, 8).plan)
    first = todo.take(0, 8)
    todo.move_to(0, 2, 3)
    then = todo.take(0, 8)
    assert first is not None
    assert then is not None
    assert (first.slice.shard, then.slice.shard, then.slice.skip) == (0, 2, 3)


def test_remainders_that_only_one_who_left_could_use_are_dropped() -> None:
    ledger = ledger_of(8, 8)
    ledger.join("large", 8)
    (grant,) = lease_all(ledger, "large")
    ledger.join("small", 2)
    ledger.acknowledge("large", grant.task, grant.attempt, 5)
    ledger.give_back("large", grant.task, grant.attempt, 5, remainder=True)
    assert (ledger.dropped, ledger.finished) == (0, False)
    ledger.release("small")
    assert (ledger.dropped, ledger.finished) == (3, True)


def test_remainders_are_dropped_with_the_last_lease_of_their_epoch_though_the_next_one_is_read() -> None:
    ledger = ledger_of(5, 5, num_epochs=2)
    ledger.join("a", 4)
    batch, rest = ledger.lease("a", epoch=NEW_PASS, count=2)[2]
    ledger.give_back("a", rest.task, rest.attempt, rest.slice.skip, remainder=True)
    assert ledger.lease("a", epoch=0, count=1, drained=True)[1] is PassState.EPOCH_OVER
    assert ledger.lease("a", epoch=NEW_PASS, count=1)[2]
    assert ledger.dropped == 0  # the batch may still come back, and make a whole one with it
    acknowledge(ledger, "a", batch)
    assert ledger.dropped == 1


def test_without_a_barrier_remainders_stay_while_any_epoch_is_lent() -> None:
    ledger = ledger_of(5, 5, num_epochs=2, epoch_barrier=False)
    ledger.join("a", 4)
    first, batch, rest = ledger.lease("a", epoch=NEW_PASS, count=3)[2]
    assert [grant.slice.epoch for grant in (first, batch, rest)] == [0, 1, 1]
    ledger.lease("a", epoch=0, count=1, drained=True)
    ledger.acknowledge("a", first.task, first.attempt, 4)
    for grant, start in ((first, 4), (rest, rest.slice.skip)):
        ledger.give_back("a", grant.task, grant.attempt, start, remainder=True)
    assert ledger.dropped == 0  # two remainders of a batch of four, and what is lent may bring others
    ledger.acknowledge("a", batch.task, batch.attempt, 2)
    ledger.give_back("a", batch.task, batch.attempt, 2, remainder=True)
    grants = ledger.lease("a", epoch=0, count=1)[2]
    assert sum(grant.slice.limit for grant in grants) == 4
    assert ledger.dropped == 0


# Windows of several shards: how they are lent, cut, and what comes back of them -----------------------------


WINDOW = {"shuffle_shards": True, "shuffle_in_shard": True, "shuffle_window": 4}


def trained_on(ledger: ShardLedger, session: str, records_of: int) -> None:
    """Train until a session has shown so much."""
    while records_of > 0:
        (grant,) = ledger.lease(session, epoch=NEW_PASS, count=1)[2]
        acknowledge(ledger, session, grant)
        records_of -= grant.slice.limit


def test_a_window_is_lent_as_a_whole_far_from_the_end() -> None:
    ledger = ledger_of(1024, 8, **WINDOW)
    ledger.join("s", 4)
    trained_on(ledger, "s", 128)
    grants = ledger.lease("s", epoch=NEW_PASS, count=3)[2]
    assert [(g.slice.skip, g.slice.limit) for g in grants] == [(0, 32)] * 3
    first = ledger.plan.window_position(0, grants[0].slice.shard)
    assert [g.slice.shard for g in grants] == ledger.plan.windows_at(0, first, first + 3)


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
