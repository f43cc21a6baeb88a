"""What a master tells of a job: throughput, measures, and the picture of its shards."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from core_kit import Trainer, acknowledge, lease_all, ledger_of, whole

from edl_torch.core.calls import (
    NEW_PASS,
    Acknowledgement,
    Failure,
    GiveBack,
    Grant,
    PassState,
    Registration,
)
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.core.ledger import ShardLedger
from edl_torch.core.members import WINDOW, Throughput
from edl_torch.core.persistence import dump, load
from edl_torch.core.status import (
    BOUNDS_S,
    BUCKETS,
    CELLS,
    Histogram,
    Measures,
    Picture,
    draw,
    padded,
    trimmed,
)
from edl_torch.errors import InvalidArgument, SessionLost
from edl_torch.shard import DatasetSpec, Slice, Source

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


# What a trainer measures ------------------------------------------------------------------------------------


SOME = Histogram(counts=(2, 1) + (0,) * (BUCKETS - 2), sum_s=0.25)
MEASURED = Measures(batches=3, records=12, waited=SOME, stepped=replace(SOME, sum_s=0.75))


def test_buckets_reach_from_microseconds_to_minutes() -> None:
    assert (BOUNDS_S[0], BOUNDS_S[-1], BUCKETS) == (2.0**-16, 512.0, 27)


def test_histograms_add_up() -> None:
    both = SOME + Histogram(counts=(0, 4) + (0,) * (BUCKETS - 2), sum_s=1.0)
    assert (both.counts[:3], both.sum_s, both.count) == ((2, 5, 0), 1.25, 7)
    assert SOME.mean_s == pytest.approx(0.25 / 3)
    assert Histogram().mean_s == 0


def test_empty_buckets_at_the_end_need_not_be_told() -> None:
    assert trimmed(SOME.counts) == (2, 1)
    assert padded((2, 1)) == SOME.counts
    assert trimmed((0, 3, 0)) == (0, 3)
    assert trimmed(Histogram().counts) == ()
    assert padded(()) == Histogram().counts


@pytest.mark.parametrize(
    "bad",
    [
        Measures(batches=-1),
        Measures(records=-1),
        Measures(waited_for_ranks_s=math.nan),
        Measures(waited_for_ranks_s=math.inf),
        Measures(waited_for_ranks_s=-0.5),
        Measures(timed=-1),
        Measures(read_s=-0.5),
        Measures(transform_s=math.nan),
        Measures(waited=Histogram(counts=(1,) * (BUCKETS + 1))),
        Measures(waited=Histogram(counts=(-1,) * BUCKETS)),
        Measures(stepped=Histogram(sum_s=1e300)),
    ],
    ids=str,
)
def test_measures_that_cannot_be_are_refused_and_nothing_is_noted(bad: Measures) -> None:
    master = joined()
    with pytest.raises(InvalidArgument):
        master.heartbeat("s", 1, 5.0, 1, bad)
    (trainer,) = master.status(5.0).trainers
    assert (trainer.measures, trainer.idle_s) == (None, 5.0)


def test_the_last_measures_are_shown_of_each_trainer() -> None:
    master = joined()
    assert master.status(0.0).trainers[0].measures is None
    master.heartbeat("s", 1, 1.0, 1, MEASURED)
    assert master.status(1.0).trainers[0].measures == MEASURED
    master.heartbeat("s", 1, 2.0, 2)  # as of a trainer that sends none
    assert master.status(2.0).trainers[0].measures == MEASURED
    with pytest.raises(SessionLost):
        master.heartbeat("other", 1, 2.0, 1, MEASURED)


def test_measures_are_not_journalled() -> None:
    master = joined()
    before = dump(master)
    master.heartbeat("s", 1, 1.0, 1, MEASURED)
    assert dump(master) == before
    assert load(before, ledger_id="ledger", now=0.0).status(0.0).trainers[0].measures is None


def joined() -> Dispatcher:
    master = Dispatcher(ledger_id="ledger")
    Trainer(master, "s").register()
    return master


def test_a_heartbeat_with_another_count_is_progress() -> None:
    master = joined()
    for now, count in ((10.0, 0), (20.0, 7), (25.0, 7)):
        master.heartbeat("s", 1, now, count)
    (member,) = master.members
    assert (member.progressed, member.seen) == (20.0, 25.0)


# The picture of an epoch says of each cell how many of its records are in which state -----------------------


STATES = ("waiting", "lent", "done", "returned", "quarantined")
UNEVEN = tuple(Source(name=f"s{i}", count=count) for i, count in enumerate((17, 5, 40, 8, 1, 33)))


def naive(ledger: ShardLedger) -> dict[str, list[int]]:
    """Each record by itself."""
    plan, epoch = ledger.plan, ledger.shown_epoch
    order = [
        (window, position)
        for place in range(plan.num_windows)
        for window in [plan.window_at(epoch, place)]
        for position in range(plan.records_in(epoch, window))
    ]
    state = dict.fromkeys(order[: ledger.backlog.passed_of(epoch)], "done")
    state |= dict.fromkeys(order[ledger.backlog.passed_of(epoch) :], "waiting")
    for name, slices in ledger.slices_by_state(epoch).items():
        for item in slices:
            state |= {(item.shard, position): name for position in range(item.skip, item.stop)}
    cells = min(CELLS, plan.size)
    edges = [plan.size * i // cells for i in range(cells + 1)]
    return {
        name: [sum(state[key] == name for key in order[a:b]) for a, b in pairwise(edges)] for name in STATES
    }


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("shuffle_shards", [False, True])
@pytest.mark.parametrize("size", [1, 104, 500])
def test_it_agrees_with_a_look_at_each_record(size: int, shuffle_shards: bool, window: int) -> None:
    seed = size * 8 + shuffle_shards * 4 + window
    print(f"seed {seed}")
    luck = random.Random(seed)
    sources = UNEVEN if size == 104 else (Source(name="a", count=size),)
    dispatcher = Dispatcher(ledger_id="L")
    trainers = [Trainer(dispatcher, name, batch_size=3) for name in "abc"]
    for trainer in trainers:
        trainer.register(
            Registration(
                name="training",
                sources=sources,
                records_per_shard=7,
                shuffle_shards=shuffle_shards,
                shuffle_window=window,
                shuffle_in_shard=True,
                num_epochs=2,
                max_bad_records=1000,
            )
        )
    (ledger,) = dispatcher.ledgers
    held: dict[str, list] = {trainer.session: [] for trainer in trainers}
    for _ in range(60):
        trainer = luck.choice(trainers)
        if luck.random() < 0.6:
            held[trainer.session] += trainer.lease(count=luck.randint(1, 3)).grants
        elif held[trainer.session]:
            grant = held[trainer.session].pop(luck.randrange(len(held[trainer.session])))
            name = {"task": grant.task, "attempt": grant.attempt}
            some = luck.randint(grant.slice.skip, grant.slice.stop)
            trainer.report(
                luck.choice(
                    [
                        whole(grant),
                        Acknowledgement(**name, upto=some),
                        GiveBack(**name, start=some),
                        Failure(**name, position=min(some, grant.slice.stop - 1), reason="torn"),
                    ]
                )
            )
        drawn = dispatcher.status(0.0).datasets[0].picture
        assert isinstance(drawn, Picture)
        assert {name: list(getattr(drawn, name)) for name in STATES} == naive(ledger)


def test_a_trillion_records_cost_no_more() -> None:
    spec = DatasetSpec(
        name="huge", sources=(Source(name="a", count=10**12),), records_per_shard=256, shuffle_shards=True
    )
    ledger = ShardLedger(spec)
    ledger.join("a", 32)
    ledger.lease("a", epoch=0, count=1000)
    slices = ledger.slices_by_state(0)
    drawn = draw(ledger.plan, 0, ledger.backlog.passed_of(0), **slices)
    assert sum(drawn.lent) == 256_000
    assert sum(sum(getattr(drawn, name)) for name in STATES) == 10**12
    assert len(drawn.waiting) == CELLS


def test_slices_of_other_epochs_are_no_part_of_it() -> None:
    ledger = ShardLedger(
        DatasetSpec(name="d", sources=(Source(name="a", count=10),), records_per_shard=5, num_epochs=2)
    )
    other = [Slice(epoch=1, shard=0, skip=0, limit=5)]
    drawn = draw(ledger.plan, 0, 0, lent=other, returned=[], quarantined=[])
    assert sum(drawn.lent) == 0
