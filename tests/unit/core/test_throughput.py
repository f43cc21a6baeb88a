"""How fast sessions are taken to be, and what follows for what they are lent near the end."""

from __future__ import annotations

import pytest
from ledger_kit import acknowledge, lease_all, ledger_of

from edl_torch.core.calls import NEW_PASS, Grant, PassState
from edl_torch.core.ledger import ShardLedger
from edl_torch.core.members import WINDOW, Throughput

# Throughput


def throughput_of(*names: str, batch_size: int = 4) -> Throughput:
    throughput = Throughput()
    for name in names:
        throughput.enter(name, batch_size)
    return throughput


def test_sessions_of_which_nothing_is_known_share_alike() -> None:
    throughput = throughput_of("a", "b", "c", "d")
    assert [throughput.share(name, 100) for name in "abcd"] == [25] * 4


def test_a_share_follows_what_was_trained_on() -> None:
    throughput = throughput_of("fast", "slow")
    for _ in range(20):
        throughput.trained("fast", 16)
        throughput.trained("slow", 4)
    assert throughput.share("slow", 1000) == pytest.approx(200, rel=0.05)
    assert throughput.share("fast", 1000) + throughput.share("slow", 1000) == pytest.approx(1000)
    assert (throughput.shown("fast"), throughput.shown("slow")) == (320, 80)


def test_what_was_long_ago_fades() -> None:
    throughput = throughput_of("a", "b")
    for _ in range(10 * WINDOW):
        throughput.trained("a", 4)
    assert throughput.share("b", 1000) < 10
    for _ in range(2 * WINDOW):  # a trainer that gets another's GPU, as it were
        throughput.trained("b", 4)
    assert throughput.share("b", 1000) > 500


def test_who_did_nothing_for_very_long_is_not_taken_for_nothing() -> None:
    throughput = throughput_of("idle", "too", "busy", batch_size=1)
    for _ in range(2000):
        throughput.trained("busy", 1_000_000)
    throughput.leave("busy")
    assert throughput.share("idle", 10) == pytest.approx(5)


def test_a_newcomer_counts_as_the_average_and_has_shown_nothing() -> None:
    throughput = throughput_of("a", "b")
    throughput.trained("a", 60)
    throughput.trained("b", 20)
    throughput.enter("new", 4)
    assert throughput.share("new", 300) == pytest.approx(100)
    assert throughput.shown("new") == 0


def test_entering_again_forgets_nothing_and_leaving_does() -> None:
    throughput = throughput_of("a", "b")
    throughput.trained("a", 40)
    throughput.enter("a", 8)
    assert throughput.shown("a") == 40
    throughput.leave("a")
    throughput.leave("a")
    assert throughput.share("b", 10) == 10
    throughput.trained("a", 40)  # of a report that came late
    assert throughput.share("b", 10) == 10


# Lending by them


def contest(size: int = 400, per: int = 40, *, slow: int = 20, fast: int = 180) -> ShardLedger:
    """Two trainers with batches of 4, one of them far slower."""
    ledger = ledger_of(size, per)
    for name, records in (("slow", slow), ("fast", fast)):
        ledger.join(name, 4)
        ledger.participants.throughput.trained(name, records)
    return ledger


def ask(ledger: ShardLedger, name: str, *, ahead: bool = False, drained: bool = False) -> list[Grant]:
    return list(ledger.lease(name, epoch=NEW_PASS, count=1, ahead=ahead, drained=drained)[2])


def ask_until_refused(ledger: ShardLedger, name: str) -> list[Grant]:
    grants: list[Grant] = []
    while more := ask(ledger, name, ahead=True):
        grants += more
    return grants


def test_leases_taken_ahead_come_to_the_share_of_what_has_no_outcome() -> None:
    ledger = contest()
    assert ask(ledger, "fast")  # both are at it
    share = ledger.participants.throughput.share("slow", 400)
    held = ask_until_refused(ledger, "slow")
    assert sum(grant.slice.limit for grant in held) == pytest.approx(share, abs=2)
    ask_until_refused(ledger, "fast")
    assert ledger.backlog.records <= 4


def test_who_asks_for_what_it_needs_now_is_never_refused() -> None:
    ledger = contest()
    assert ask(ledger, "fast")
    ask_until_refused(ledger, "slow")
    assert not ask(ledger, "slow", ahead=True)
    assert ask(ledger, "slow")
    assert ask(ledger, "slow", ahead=True, drained=True)


def test_who_holds_nothing_is_never_refused() -> None:
    ledger = contest(16, 16)
    assert ask(ledger, "fast")
    (first,) = ask(ledger, "slow", ahead=True)  # more than its share
    assert not ask(ledger, "slow", ahead=True)
    acknowledge(ledger, "slow", first)
    assert ask(ledger, "slow", ahead=True)


def test_who_is_alone_at_it_is_not_refused_for_the_sake_of_others_that_may_not_come() -> None:
    ledger = ledger_of(400, 40)
    for number in range(50):
        ledger.join(f"s{number}", 4)
    ask_until_refused(ledger, "s7")
    assert not ledger.backlog.records


def test_a_refusal_says_that_the_pass_is_open_and_calls_nothing_back() -> None:
    ledger = contest()
    assert ask(ledger, "fast")
    ask_until_refused(ledger, "slow")
    _, state, grants = ledger.lease("slow", epoch=0, count=1, ahead=True)
    assert (state, grants) == (PassState.OPEN, ())
    assert ledger.backlog.waiting(0)


def test_nobody_is_lent_much_more_than_it_has_shown_that_it_can_do() -> None:
    ledger = ledger_of(400, 40)
    ledger.join("a", 4)
    ledger.join("b", 4)
    sizes = []
    for _ in range(6):
        (grant,) = lease_all(ledger, "a", count=1)
        sizes.append(grant.slice.limit)
        acknowledge(ledger, "a", grant)
    assert sizes == [4, 8, 24, 4, 40, 40]  # the fourth is the rest of the shard


def test_one_trainer_alone_is_lent_whole_shards() -> None:
    ledger = ledger_of(400, 40)
    ledger.join("a", 4)
    assert [grant.slice.limit for grant in lease_all(ledger, "a", count=3)] == [40, 40, 40]


def test_far_from_the_end_shards_are_whole_from_the_first() -> None:
    ledger = ledger_of(40 * 200, 40)
    ledger.join("a", 4)
    ledger.join("b", 4)
    assert [grant.slice.limit for grant in lease_all(ledger, "a", count=3)] == [40, 40, 40]
