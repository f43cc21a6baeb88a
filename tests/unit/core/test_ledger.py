"""What a ledger lends, and when an epoch is over; `test_ledger_machine` covers combinations."""

from __future__ import annotations

import time
import tracemalloc
from contextlib import nullcontext
from dataclasses import replace
from itertools import cycle

import pytest
from core_kit import (
    SPEC,
    SimulatedTrainer,
    acknowledge,
    lease_all,
    ledger_of,
    run_to_the_end,
    verdict,
)
from hypothesis import given
from hypothesis import strategies as st

from edl_torch.core.calls import NEW_PASS, PassState
from edl_torch.core.ledger import ShardLedger
from edl_torch.errors import DatasetConflict, InvalidArgument, TokenError
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


def test_records_that_came_back_are_lent_before_the_cursor_goes_on() -> None:
    ledger = ledger_of()
    ledger.join("dead", 4)
    ledger.join("alive", 4)
    (first,) = lease_all(ledger, "dead", count=1)
    ledger.release("dead")
    (again,) = lease_all(ledger, "alive", count=1)
    assert (again.slice, again.attempt) == (first.slice, 2)
    assert again.task != first.task


def test_an_epoch_that_has_not_begun_cannot_be_leased() -> None:
    ledger = ledger_of(num_epochs=3)
    ledger.join("s", 4)
    with pytest.raises(InvalidArgument, match="has not begun"):
        lease_all(ledger, "s", epoch=1)
    assert ledger.backlog.records == 16


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


def test_without_a_barrier_leases_shrink_in_the_last_epoch_alone() -> None:
    ledger = ledger_of(64, 16, num_epochs=2, epoch_barrier=False)
    for name in ("a", "b"):
        ledger.join(name, 4)
    sizes = [grant.slice.limit for _ in range(5) for grant in lease_all(ledger, "a", count=1)]
    assert sizes == [16, 16, 16, 16, 4]


# Epochs and waiting


def test_without_a_barrier_leases_cross_into_the_next_epoch() -> None:
    ledger = ledger_of(8, 8, num_epochs=2, epoch_barrier=False)
    ledger.join("s", 8)
    assert [g.slice.epoch for g in lease_all(ledger, "s")] == [0, 1]


def test_zero_epochs_never_end() -> None:
    ledger = ledger_of(8, 8, num_epochs=0)
    ledger.join("s", 8)
    for epoch in range(20):
        (grant,) = lease_all(ledger, "s")
        assert grant.slice.epoch == epoch
        acknowledge(ledger, "s", grant)
    assert not ledger.finished


def test_records_that_came_back_too_late_do_not_keep_a_younger_pass_from_its_end() -> None:
    ledger = ledger_of(8, 8, num_epochs=2)
    for name in ("a", "b"):
        ledger.join(name, 8)
    lease_all(ledger, "a")
    verdict(ledger, "a", 0)
    younger = lease_all(ledger, "b")
    assert {g.slice.epoch for g in younger} == {1}
    ledger.release("a")
    acknowledge(ledger, "b", *younger)
    assert verdict(ledger, "b", 1) is PassState.EPOCH_OVER
    assert not ledger.finished
    assert {g.slice.epoch for g in lease_all(ledger, "b")} == {0}


def test_a_pass_with_nothing_for_this_trainer_waits_instead_of_ending_at_once() -> None:
    ledger = ledger_of(8, 8)
    for name, size in (("dead", 5), ("big", 8), ("small", 4)):
        ledger.join(name, size)
    (grant,) = lease_all(ledger, "dead", count=1)
    assert grant.slice.limit == 5
    rest = lease_all(ledger, "dead")
    verdict(ledger, "dead", 0)  # the pass is over, 8 records are with a loop
    ledger.release("dead")
    back = lease_all(ledger, "small")
    assert sum(g.slice.limit for g in back) == 8
    for item in back[-1:]:
        ledger.give_back("small", item.task, item.attempt, item.slice.skip, remainder=True)
    assert rest
    epoch, state, grants = ledger.lease("big", epoch=NEW_PASS, count=1)
    assert (epoch, state, grants) == (NEW_PASS, PassState.OPEN, ())


# Tokens


def test_a_restore_of_nothing_is_the_beginning_of_the_data() -> None:
    ledger = ledger_of()
    ledger.join("s", 8)
    acknowledge(ledger, "s", *lease_all(ledger, "s"))
    ledger.restore(None)
    assert (ledger.finished, ledger.acknowledged, ledger.backlog.records, ledger.epoch) == (False, 0, 16, 0)


def test_a_refused_token_changes_nothing() -> None:
    ledger = ledger_of()
    ledger.join("s", 8)
    lease_all(ledger, "s", count=1)
    before = repr(ledger), ledger.snapshot(), ledger.lineage
    with pytest.raises(TokenError):
        ledger.restore(ledger_of(17).snapshot())
    with pytest.raises(TokenError, match="damaged"):
        ledger.restore(replace(ledger.snapshot(), position=9))
    assert (repr(ledger), ledger.snapshot(), ledger.lineage) == before


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
