"""A reader of numbers, and what tests of our client under their master need to be typed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from their_master import TheirMaster

from edl_torch import ElasticDLMasterClient
from edl_torch.readers.base import AbstractDataReader
from edl_torch.shard import TaskType

SIZE = 40

Start = Callable[..., TheirMaster]
Connect = Callable[..., ElasticDLMasterClient]


class Numbers(AbstractDataReader):
    """Record i of the storage called name is base + i; those in `bad` cannot be read."""

    def __init__(self, counts: dict[str, int] | None = None, bad: frozenset[int] = frozenset()) -> None:
        self.counts = {"": SIZE} if counts is None else counts
        self.bases = dict(zip(self.counts, (1000 * n for n in range(len(self.counts))), strict=True))
        self.bad = bad

    def create_shards(self, mode: TaskType = TaskType.TRAINING) -> dict[str, int]:
        return self.counts

    def read_records(self, task: Any) -> Iterator[int]:
        return (self.read_record(task.shard.name, index) for index in range(task.start, task.end))

    def read_record(self, name: str, index: int) -> int:
        if self.bases[name] + index in self.bad:
            raise ValueError("broken")
        return self.bases[name] + index
