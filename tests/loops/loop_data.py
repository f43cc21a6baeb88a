"""What loops read: records that are their own number, so that a batch says what it holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from edl_torch import AbstractDataReader


class Numbers(AbstractDataReader):
    """Record `i` is the number `i`; some cannot be read."""

    thread_safe = True

    def __init__(self, records: int, unreadable: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.records = records
        self.unreadable = unreadable

    def create_shards(self, mode: Any = None) -> dict[str, int]:
        return {"numbers": self.records}

    def read_records(self, task: Any) -> Iterator[int]:
        return (self.read_record("numbers", index) for index in range(task.start, task.end))

    def read_record(self, name: str, index: int) -> int:
        if index in self.unreadable:
            raise ValueError("no such number")
        return index


class NumbersInOrder(Numbers):
    """Read in order only, by one thread at a time."""

    thread_safe = False
    read_record = AbstractDataReader.read_record

    def read_records(self, task: Any) -> Iterator[int]:
        return (Numbers.read_record(self, "numbers", index) for index in range(task.start, task.end))


class NumberColumns(Numbers):
    """By the batch."""

    def read_batch(self, name: str, indices: Any) -> Any:
        return np.array([self.read_record(name, int(index)) for index in indices])


def reading_ahead(
    iterator: Iterator[Any], count: int, passed_on: Callable[[], object] = lambda: None
) -> Iterator[Any]:
    """As wrappers do that must know which batch is the last: pass each on when `count` more are there."""
    waiting: deque[Any] = deque()
    for batch in iterator:
        waiting.append(batch)
        if len(waiting) > count:
            passed_on()
            yield waiting.popleft()
    for batch in waiting:
        passed_on()
        yield batch
    passed_on()
