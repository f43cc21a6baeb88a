"""Numbers of a ledger that the journal keeps. They are few, whatever the dataset's size."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Cursor of a ledger, its counts of outcomes, and the ids that come next."""

    lineage: int
    opened_by: tuple[int, int]  # the member that opened the lineage by a restore, and its request's number
    cursor: tuple[int, int, int]  # epoch, position of the next shard in its order, next record in that shard
    acknowledged: int
    dropped: int
    next_task: int
    next_bundle: int
