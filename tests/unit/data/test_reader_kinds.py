"""What is known of a reader that has the methods of one, and is no `AbstractDataReader`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from plan_kit import COUNTS, PLANS

from edl_torch import ElasticDataLoader, ShardedDataset
from edl_torch.data.loop.opening import reads_records_alone
from edl_torch.data.reading.record_jobs import can_pick


class Own:
    """Record `i` of each source is `i`."""

    def create_shards(self) -> dict[str, int]:
        return COUNTS

    def read_records(self, task: Any) -> Iterator[int]:
        return iter(range(task.start, task.end))

    def read_record(self, name: str, index: int) -> int:
        return index


class Safe(Own):
    thread_safe = True


class Blocks(Safe):
    reads_blocks = True


def test_threads_read_records_of_a_reader_that_says_that_they_may() -> None:
    """Where it reads blocks, a stream of records in their order is faster."""
    picked = {
        (kind, order): can_pick(kind(), PLANS[order])  # type: ignore[arg-type]
        for kind in (Own, Safe, Blocks)
        for order in ("stored", "global")
    }
    assert [key for key, picks in picked.items() if picks] == [
        (Safe, "stored"),
        (Safe, "global"),
        (Blocks, "global"),
    ]


def test_records_are_mixed_over_all_where_each_costs_no_more_than_itself() -> None:
    assert [reads_records_alone(kind()) for kind in (Own, Safe, Blocks)] == [True, True, False]  # type: ignore[arg-type]
    with ElasticDataLoader(Own(), 4, shuffle=True) as loader:
        assert type(loader.dataset) is ShardedDataset, "records are images of readers that say so"
        assert sorted(n for batch in loader for n in batch.tolist()) == sorted([*range(23), *range(9)])
