"""Ledgers for tests, and calls on them in few words."""

from __future__ import annotations

from dataclasses import replace

from edl_torch.core.calls import NEW_PASS, Grant, PassState
from edl_torch.core.ledger import ShardLedger
from edl_torch.shard import DatasetSpec, Source

SPEC = DatasetSpec(name="training", sources=(Source(name="a", count=16),), records_per_shard=8)


def ledger_of(size: int = 16, per: int = 8, **options: object) -> ShardLedger:
    spec = replace(SPEC, sources=(Source(name="a", count=size),), records_per_shard=per, **options)  # type: ignore[arg-type]
    return ShardLedger(spec)


def lease_all(ledger: ShardLedger, session: str, epoch: int = NEW_PASS, count: int = 1000) -> list[Grant]:
    return list(ledger.lease(session, epoch=epoch, count=count)[2])


def records(grants: list[Grant]) -> list[tuple[int, int, int]]:
    return [
        (g.slice.epoch, g.slice.shard, position)
        for g in grants
        for position in range(g.slice.skip, g.slice.stop)
    ]


def acknowledge(ledger: ShardLedger, session: str, *grants: Grant) -> None:
    for grant in grants:
        ledger.acknowledge(session, grant.task, grant.attempt, grant.slice.stop)


def verdict(ledger: ShardLedger, session: str, epoch: int = NEW_PASS) -> PassState:
    _, state, grants = ledger.lease(session, epoch=epoch, count=1, drained=True)
    assert not grants
    return state
