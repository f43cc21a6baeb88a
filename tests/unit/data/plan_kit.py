"""Plans of two small sources, in each order that records have."""

from __future__ import annotations

from collections.abc import Mapping

from edl_torch.core.plan import Plan
from edl_torch.shard import DatasetSpec, Source

COUNTS = {"a": 23, "b": 9}


def planned(
    *,
    shuffle: bool = False,
    shards: bool = False,
    in_shard: bool = False,
    window: int = 1,
    counts: Mapping[str, int] = COUNTS,
) -> Plan:
    """Return the plan of sources with so many records each, in shards of 6."""
    spec = DatasetSpec(
        name="d",
        sources=tuple(Source(name=name, count=count) for name, count in counts.items()),
        records_per_shard=6,
        seed=3,
        shuffle=shuffle,
        shuffle_shards=shards,
        shuffle_in_shard=in_shard,
        shuffle_window=window,
    )
    return Plan(spec)


PLANS = {
    "stored": planned(),
    "in shard": planned(in_shard=True),
    "windows": planned(in_shard=True, window=8),
    "global": planned(shuffle=True),
}
