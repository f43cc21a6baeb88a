"""Plans of two small sources, in each order that records have, and a reader of these."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from edl_torch.core.calls import Grant
from edl_torch.core.plan import Plan
from edl_torch.readers.base import AbstractDataReader, Range
from edl_torch.shard import DatasetSpec, Slice, Source

COUNTS = {"a": 23, "b": 9}


def planned(
    *,
    shuffle: bool = False,
    shards: bool = False,
    in_shard: bool = False,
    window: int = 1,
    per: int = 6,
    counts: Mapping[str, int] = COUNTS,
) -> Plan:
    """Return the plan of sources with so many records each, in shards of `per`."""
    spec = DatasetSpec(
        name="d",
        sources=tuple(Source(name=name, count=count) for name, count in counts.items()),
        records_per_shard=per,
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


def part(plan: Plan, shard: int = 0, skip: int = 0, stop: int | None = None) -> Grant:
    """Return a lease of a shard of the second epoch, or of a part of it."""
    stop = plan.records_in(1, shard) if stop is None else stop
    return Grant(task=7, attempt=1, slice=Slice(epoch=1, shard=shard, skip=skip, limit=stop - skip))


def in_order(plan: Plan, grant: Grant) -> list[int]:
    """Return the records of a lease in the plan's order, as `Stored` has them."""
    return [number + 1000 * (name == "b") for name, number in plan.indices(grant.slice)]


class Stored(AbstractDataReader):
    """Record `i` of "a" is `i`, of "b" `1000 + i`; some are `bad`. Reads ranges only, and notes them."""

    def __init__(self, bad: Collection[int] = (), ends: int = 1 << 30) -> None:
        super().__init__()
        self.bad, self.ends = bad, ends
        self.ranges: list[Range] = []

    def create_shards(self, mode: Any = None) -> dict[str, int]:
        return COUNTS

    def number(self, name: str, index: int) -> int:
        number = index + 1000 * (name == "b")
        if number in self.bad:
            raise ValueError(f"no byte of {number}")
        return number

    def read_records(self, task: Any) -> Iterator[int]:
        self.ranges.append((task.shard_name, task.start, task.end))
        return (self.number(task.shard_name, n) for n in range(task.start, min(task.end, self.ends)))
