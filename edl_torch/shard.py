"""Values that every package shares: sources, shards, slices, tasks and the description of a dataset.

Values only: nothing here knows who leases a shard, how it travels or how its records are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from itertools import repeat
from typing import overload

import numpy as np
import numpy.typing as npt

IndexArray = npt.NDArray[np.int64]

LARGEST_LEASE = 1 << 20  # records: names and numbers of so many are computed together


class TaskType(IntEnum):
    """What a task is for; the numbers are ElasticDL's."""

    NONE = 0
    TRAINING = 1
    EVALUATION = 2
    PREDICTION = 3
    WAIT = 4
    TRAIN_END_CALLBACK = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A named storage (file, folder, table) and the run of its records that belongs to the dataset."""

    name: str
    start: int = 0
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A run of one window's records *in that epoch's order*: positions `skip` to `skip + limit`.

    `shard` is the number of the window's first shard in the plan; a window is one shard unless the dataset
    has another `shuffle_window`. Everything that the master hands out, takes back or saves is a slice.
    """

    epoch: int
    shard: int
    skip: int
    limit: int

    @property
    def stop(self) -> int:
        """The position after the last one."""
        return self.skip + self.limit


class Indices(Sequence[tuple[str, int]]):
    """Name and record number of each position of a slice, as a sequence of `(name, index)`.

    `numbers` is an int64 array of record numbers; `sources` says for each the place of its name in
    `names`, or is None where all have `names[0]`.
    """

    __slots__ = ("names", "numbers", "sources")

    def __init__(self, names: Sequence[str], numbers: IndexArray, sources: IndexArray | None = None) -> None:
        self.names = tuple(names)
        self.numbers = numbers
        self.sources = sources

    @classmethod
    def joined(cls, parts: Sequence[Indices]) -> Indices:
        """Several one after the other."""
        if len(parts) == 1:
            return parts[0]
        place: dict[str, int] = {}
        sources = []
        for part in parts:
            own = np.array([place.setdefault(name, len(place)) for name in part.names], np.int64)
            where = np.zeros(len(part), np.int64) if part.sources is None else part.sources
            sources.append(own[where] if len(part) else where)
        empty = np.empty(0, np.int64)
        numbers = np.concatenate([part.numbers for part in parts]) if parts else empty
        return cls(list(place), numbers, np.concatenate(sources) if parts else empty)

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, item: int) -> tuple[str, int]: ...
    @overload
    def __getitem__(self, item: slice) -> Indices: ...
    def __getitem__(self, item: int | slice) -> tuple[str, int] | Indices:
        if isinstance(item, slice):
            return Indices(
                self.names, self.numbers[item], None if self.sources is None else self.sources[item]
            )
        name = self.names[0 if self.sources is None else int(self.sources[item])]
        return name, int(self.numbers[item])

    def __iter__(self) -> Iterator[tuple[str, int]]:
        if self.sources is None:
            name = self.names[0] if self.names else ""
            return zip(repeat(name), self.numbers.tolist(), strict=False)
        return zip(map(self.names.__getitem__, self.sources.tolist()), self.numbers.tolist(), strict=True)

    def __repr__(self) -> str:
        return f"<Indices n={len(self)} of {len(self.names)} source(s)>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Records `start` (inclusive) to `end` (exclusive) of the storage called `name`.

    For a shuffled slice `indices()` alone says which records are meant and in which order; `start` and
    `end` then delimit the shard that the slice is a part of.
    """

    name: str
    start: int
    end: int
    epoch: int = 0
    shuffled: bool = False
    resolve: Callable[[], Indices] | None = field(default=None, repr=False, compare=False)

    def indices(self) -> Indices:
        """Name and record number of each position, in the order in which they are to be read."""
        if self.resolve is not None:
            return self.resolve()
        return Indices((self.name,), np.arange(self.start, self.end, dtype=np.int64))

    def __len__(self) -> int:
        return self.end - self.start if self.resolve is None else len(self.resolve())


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What `read_records` is asked for: one shard, and what it is for."""

    shard: Shard
    type: TaskType = TaskType.TRAINING
    task_id: int = 0

    @property
    def shard_name(self) -> str:
        """The storage's name."""
        return self.shard.name

    @property
    def start(self) -> int:
        """The first record number."""
        return self.shard.start

    @property
    def end(self) -> int:
        """The record number after the last one."""
        return self.shard.end


class Shuffle(Enum):
    """Among which records a record is shuffled: none, those of a window of shards, all. See `core.plan`."""

    NONE = "none"
    SHARD = "shard"
    GLOBAL = "global"


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSpec:
    """A registered dataset: its identity, and the options of the job that reads it.

    The identity is `sources`, `fingerprint`, `records_per_shard`, `seed`, the three shuffles and
    `shuffle_window`: with `epoch` it fixes the order of every record. `fingerprint` tells which data these
    are (`edl_torch.fingerprint`; '' where none is known). The rest may be changed by whoever uses the dataset
    alone.

    With `shuffle_in_shard` records are mixed inside windows of `shuffle_window` shards, which stand one after
    the other in the epoch's order of shards.
    """

    name: str
    sources: tuple[Source, ...]
    records_per_shard: int
    seed: int = 0
    shuffle: bool = False
    shuffle_shards: bool = False
    shuffle_in_shard: bool | None = False  # None: the first trainer says
    task_type: TaskType = TaskType.TRAINING
    num_epochs: int = 1
    epoch_barrier: bool = True
    max_bad_records: int = 0
    shuffle_window: int = 1
    fingerprint: str = ""

    @property
    def size(self) -> int:
        """Records in one epoch."""
        return sum(source.count for source in self.sources)

    @property
    def order(self) -> Shuffle:
        """The order of records: the service's global shuffle stands above the dataset's own."""
        if self.shuffle:
            return Shuffle.GLOBAL
        return Shuffle.SHARD if self.shuffle_in_shard else Shuffle.NONE

    @property
    def largest_lease(self) -> int:
        """The most records that are lent at once, unless a batch is larger.

        A window is lent as a whole, so that one process reads its shards, up to a million records.
        """
        window = self.shuffle_window if self.order is Shuffle.SHARD else 1
        return max(self.records_per_shard, min(window * self.records_per_shard, LARGEST_LEASE))
