"""Windows of several shards: how they are lent, cut, and what comes back of them."""

from __future__ import annotations

import pytest
from ledger_kit import acknowledge, lease_all, ledger_of, records

from edl_torch.core.calls import NEW_PASS
from edl_torch.core.ledger import ShardLedger
from edl_torch.core.token import Token

WINDOW = {"shuffle_shards": True, "shuffle_in_shard": True, "shuffle_window": 4}


def trained_on(ledger: ShardLedger, session: str, records: int) -> None:
    """Train until a session has shown so much."""
    while records > 0:
        (grant,) = ledger.lease(session, epoch=NEW_PASS, count=1)[2]
        acknowledge(ledger, session, grant)
        records -= grant.slice.limit


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


def test_the_guided_tail_cuts_windows() -> None:
    ledger = ledger_of(128, 8, **WINDOW)
    for name in "ab":
        ledger.join(name, 4)
    limits = []
    for turn in range(100):
        grants = ledger.lease("ab"[turn % 2], epoch=NEW_PASS, count=1)[2]
        acknowledge(ledger, "ab"[turn % 2], *grants)
        limits += [g.slice.limit for g in grants]
    assert sum(limits) == 128
    assert limits[-1] == 4
    assert ledger.finished


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


def test_what_a_dead_trainer_leaves_of_a_window_is_lent_once() -> None:
    ledger = ledger_of(128, 8, **WINDOW)
    ledger.join("dead", 4)
    (grant,) = ledger.lease("dead", epoch=NEW_PASS, count=1)[2]
    ledger.acknowledge("dead", grant.task, grant.attempt, 4)
    (lost,) = ledger.release("dead")
    assert (lost.shard, lost.skip, lost.stop) == (grant.slice.shard, 4, 8)
    ledger.join("alive", 4)
    (again,) = ledger.lease("alive", epoch=NEW_PASS, count=1)[2]
    assert (again.slice, again.attempt) == (lost, 2)
    rest = lease_all(ledger, "alive")
    acknowledge(ledger, "alive", again, *rest)
    trained = [(0, grant.slice.shard, position) for position in range(4)] + records([again, *rest])
    plan = ledger.plan
    pairs = [plan.locate(*record) for record in trained]
    assert sorted(pairs) == [("a", index) for index in range(128)]
    assert ledger.finished


@pytest.mark.parametrize("window", [1, 3, 4, 16, 10**9])
def test_a_token_in_the_middle_of_a_window_goes_on_exactly(window: int) -> None:
    options = WINDOW | {"shuffle_window": window}
    ledger = ledger_of(125, 8, **options)
    for name in "ab":
        ledger.join(name, 4)
    mine = ledger.lease("a", epoch=NEW_PASS, count=1)[2]
    others = ledger.lease("b", epoch=NEW_PASS, count=2)[2]
    ledger.acknowledge("a", mine[0].task, mine[0].attempt, mine[0].slice.skip + 3)
    acknowledge(ledger, "b", others[0])
    again = ledger_of(125, 8, **options)
    again.restore(Token.decode(ledger.snapshot().encode()))
    again.join("c", 4)
    rest = lease_all(again, "c")
    done = [(0, mine[0].slice.shard, mine[0].slice.skip + place) for place in range(3)] + records(others[:1])
    assert len(done) + len(records(rest)) == 125
    assert len({ledger.plan.locate(*record) for record in (*done, *records(rest))}) == 125


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
