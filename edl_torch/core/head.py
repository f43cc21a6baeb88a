"""The numbers of a ledger, for who writes them down. They are small, whatever the dataset's size."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Where the cursor is, what has come of the records, which ids come next."""

    lineage: int
    opened_by: tuple[int, int]  # the member that opened the lineage by a restore, and its request's number
    cursor: tuple[int, int, int]  # epoch, position of the next shard in its order, next record in that shard
    acknowledged: int
    dropped: int
    next_task: int
    next_bundle: int
