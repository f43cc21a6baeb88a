"""The picture of an epoch says of each cell how many of its records are in which state."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from dispatcher_kit import Trainer, whole

from edl_torch.core.calls import Acknowledgement, Failure, GiveBack, Registration
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.core.ledger import ShardLedger
from edl_torch.core.status import CELLS, Picture, draw
from edl_torch.shard import DatasetSpec, Slice, Source

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
