"""Parts of batches, kept until they fill one, and dropped where they never will."""

from __future__ import annotations

import pytest
from ledger_kit import acknowledge, lease_all, ledger_of, verdict
from simulated_trainers import SimulatedTrainer, run_to_the_end

from edl_torch.core.backlog import Backlog, WindowsInProgress
from edl_torch.core.calls import PassState
from edl_torch.core.ledger import ShardLedger
from edl_torch.core.registration import identity
from edl_torch.core.token import Token
from edl_torch.shard import Slice


def drop_last(size: int, *batches: int, **options: object) -> tuple[ShardLedger, list[SimulatedTrainer]]:
    ledger = ledger_of(size, 8, **options)
    trainers = []
    for name, batch in zip("abc", batches, strict=False):
        ledger.join(name, batch)
        trainers.append(SimulatedTrainer(ledger, name, batch, drop_last=True))
    return ledger, trainers


def test_remainders_of_several_trainers_fill_a_batch_for_one() -> None:
    ledger = ledger_of(8, 2)
    for name in ("a", "b"):
        ledger.join(name, 4)
        for grant in lease_all(ledger, name, count=1):
            ledger.give_back(name, grant.task, grant.attempt, 0, remainder=True)
    rest = lease_all(ledger, "a", count=2)
    acknowledge(ledger, "a", *rest)
    bundle = lease_all(ledger, "b", count=1)
    assert {g.bundle for g in bundle} == {1}
    assert sum(g.slice.limit for g in bundle) == 4
    acknowledge(ledger, "b", *bundle)
    assert (ledger.dropped, ledger.finished) == (0, True)


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


def test_a_trainer_with_small_batches_that_never_fetches_holds_up_nobody() -> None:
    ledger, trainers = drop_last(21, 8, 8)
    ledger.join("idle", 1)
    run_to_the_end(ledger, trainers)
    assert ledger.dropped == 21 % 8


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


def test_remainders_wait_for_a_death_that_could_still_fill_them_up() -> None:
    ledger = ledger_of(8, 8)
    ledger.join("a", 4)
    ledger.join("b", 8)
    first, second = lease_all(ledger, "a")
    ledger.give_back("a", second.task, second.attempt, second.slice.skip + 1, remainder=True)  # 3 remainders
    ledger.acknowledge("a", second.task, second.attempt, second.slice.skip + 1)
    assert verdict(ledger, "a", 0) is PassState.EPOCH_OVER  # the first batch is with its loop
    assert (ledger.dropped, ledger.backlog.records) == (0, 3)
    acknowledge(ledger, "a", first)
    assert (ledger.dropped, ledger.finished) == (3, True)


def test_remainders_of_two_epochs_never_share_a_batch() -> None:
    ledger = ledger_of(4, 2, num_epochs=2)
    ledger.join("s", 2)
    in_loop = []
    for epoch in (0, 1):
        first, second = lease_all(ledger, "s", epoch)
        in_loop.append(first)
        ledger.acknowledge("s", second.task, second.attempt, 1)
        ledger.give_back("s", second.task, second.attempt, 1, remainder=True)
        assert verdict(ledger, "s", epoch) is PassState.EPOCH_OVER
    assert (ledger.dropped, ledger.backlog.records) == (0, 2)
    acknowledge(ledger, "s", *in_loop)
    assert (ledger.dropped, ledger.finished) == (2, True)


def test_remainders_do_not_pile_up_where_epochs_never_end() -> None:
    ledger = ledger_of(8, 8, num_epochs=0, epoch_barrier=False)
    ledger.join("s", 4)
    for _ in range(20):
        for grant in lease_all(ledger, "s", count=1):
            keep = 0 if grant.bundle else 3
            ledger.acknowledge("s", grant.task, grant.attempt, grant.slice.stop - keep)
            ledger.give_back("s", grant.task, grant.attempt, grant.slice.stop - keep, remainder=True)
        assert sum(remainder.limit for remainder in ledger.snapshot().remainders) < 8


def test_a_restore_keeps_remainders_apart() -> None:
    ledger = ledger_of(8, 8)
    ledger.join("s", 4)
    grant = lease_all(ledger, "s", count=1)[0]
    ledger.give_back("s", grant.task, grant.attempt, 2, remainder=True)
    fresh = ledger_of(8, 8)
    fresh.restore(ledger.snapshot())
    assert fresh.snapshot().remainders == ledger.snapshot().remainders
    assert fresh.backlog.records == 8


def test_a_restore_forgets_the_remainders_that_there_were() -> None:
    plan = ledger_of(8, 8).plan
    todo = Backlog(plan, WindowsInProgress())
    todo.put_remainder(Slice(epoch=0, shard=0, skip=5, limit=3), 1)
    assert todo.has_remainders
    todo.restore(Token(identity=identity(plan.spec)))
    assert (todo.has_remainders, todo.records) == (False, 8)


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
