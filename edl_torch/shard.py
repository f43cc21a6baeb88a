"""Values that every package shares: sources, shards, slices, tasks, and a dataset with its options.

Values only: nothing here knows who leases a shard, how it travels or how its records are read. An option of a
dataset is declared here, three times over: `DatasetSpec` is what is registered, `Registration` what somebody
asks for, `DatasetOptions` the keywords of who gives it. All else goes by these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum, IntEnum
from itertools import repeat
from typing import Any, TypedDict, overload

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
    has wider ones. Everything that the master hands out, takes back or saves is a slice.
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
    `names`, or is None where all have `names[0]`. Of a mixture `passes` says in which pass over its component
    each is; else it is None.
    """

    __slots__ = ("names", "numbers", "passes", "sources")

    def __init__(
        self,
        names: Sequence[str],
        numbers: IndexArray,
        sources: IndexArray | None = None,
        passes: IndexArray | None = None,
    ) -> None:
        self.names = tuple(names)
        self.numbers = numbers
        self.sources = sources
        self.passes = passes

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
        if not parts:
            empty = np.empty(0, np.int64)
            return cls((), empty, empty)
        passes = [part.passes for part in parts if part.passes is not None]
        return cls(
            list(place),
            np.concatenate([part.numbers for part in parts]),
            np.concatenate(sources),
            np.concatenate(passes) if len(passes) == len(parts) else None,
        )

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, item: int) -> tuple[str, int]: ...
    @overload
    def __getitem__(self, item: slice) -> Indices: ...
    def __getitem__(self, item: int | slice) -> tuple[str, int] | Indices:
        if isinstance(item, slice):
            of_each = (None if of is None else of[item] for of in (self.sources, self.passes))
            return Indices(self.names, self.numbers[item], *of_each)
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
    """Among which records a record is shuffled: none, those of a window of shards, all. See `core.plan`.

    In a mixture the records of several datasets take turns; each has an order of its own.
    """

    NONE = "none"
    SHARD = "shard"
    GLOBAL = "global"
    MIXTURE = "mixture"


def _option(
    *, orders: bool = False, rare: bool = False, least: int | None = None, remedy: str = ""
) -> dict[str, Any]:
    """Metadata of an option: whether the place of a record depends on it, and if so whether tokens name it
    only where it has not its default; its least value, and what to give instead of a smaller one."""
    return {"orders": orders, "rare": rare, "least": least, "remedy": remedy}


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One of the datasets that a mixture is made of, and the order of its records in each pass over it.

    Its shards are as long as the mixture's where a registration gives 0. After `max_passes` passes its share
    is the others'; 0: it has no end. One that has `left` gives nothing more: of it there is the name, for
    what it gave before counts. Where shares are of tokens `mean_length` is how many a record has, or had.
    """

    name: str
    sources: tuple[Source, ...]
    records_per_shard: int
    shuffle: bool = False
    shuffle_shards: bool = False
    shuffle_in_shard: bool = False
    shuffle_window: int = 1
    fingerprint: str = ""
    max_passes: int = 0
    left: bool = False
    mean_length: float = 0.0

    @property
    def most(self) -> int | None:
        """Records that it gives at most; None: any number."""
        return self.size * self.max_passes or None

    @property
    def size(self) -> int:
        """Records in one pass."""
        return sum(source.count for source in self.sources)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureWeights:
    """Weights that a mixture is to have from the index `start` on.

    `parts` are whole numbers, one for each component in order: of `sum(parts)` records so many are of it.
    """

    start: int
    parts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureSegment:
    """A run of a mixture's indices from `start` on with the same weights, up to the next segment.

    Before it each component has given `counts` records, and `lags` / `scale` records less than its share
    (more where the lag is negative); the lags add up to 0. `number` grows from one segment to the next
    that a master begins. `key` names the call that it was begun by. Components take turns of `turn` records:
    it begins with one.
    """

    number: int
    start: int
    parts: tuple[int, ...]
    counts: tuple[int, ...]
    lags: tuple[int, ...]
    scale: int
    turn: int
    key: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSpec:
    """A registered dataset: sources, and options with their defaults; `core.registration` checks them.

    Those that are marked with `orders` are its identity with the sources: with `epoch` they fix the order of
    every record. `fingerprint` tells which data these are (`edl_torch.fingerprint`; '' where none is known).
    The rest may be changed by a trainer that uses the dataset alone.

    With `shuffle_in_shard` records are mixed inside windows of `shuffle_window` shards, which stand one after
    the other in the epoch's order of shards.

    A mixture has `components`, and one epoch: its records are the indices of the one source, which
    `core.mixture` resolves. `weights` are those that its program gave, `segments` what came of them and of
    later changes; they are state, and no part of the identity. `stops` says what its size follows from:
    "first_exhausted", "all_exhausted", "max_passes", or '' for a number that was given. With a `turn` of
    several records these are of one component, and in no batch are records of two turns.
    """

    name: str
    sources: tuple[Source, ...]
    records_per_shard: int = field(
        metadata=_option(orders=True, least=1, remedy="give the number of records in a shard, 1 or more")
    )
    seed: int = field(default=0, metadata=_option(orders=True))
    shuffle: bool = field(default=False, metadata=_option(orders=True))
    shuffle_shards: bool = field(default=False, metadata=_option(orders=True))
    # None: the first trainer says
    shuffle_in_shard: bool | None = field(default=False, metadata=_option(orders=True))
    task_type: TaskType = field(default=TaskType.TRAINING, metadata=_option())
    num_epochs: int = field(
        default=1, metadata=_option(least=0, remedy="give the number of epochs, or 0 for endless")
    )
    epoch_barrier: bool = field(default=True, metadata=_option())
    max_bad_records: int = field(
        default=0, metadata=_option(least=0, remedy="give the number of records that may be bad, 0 or more")
    )
    shuffle_window: int = field(
        default=1,
        metadata=_option(
            orders=True,
            rare=True,
            least=1,
            remedy="give the number of shards whose records are mixed, 1 or more",
        ),
    )
    fingerprint: str = field(default="", metadata=_option(orders=True, rare=True))
    components: tuple[Component, ...] = ()
    weights: tuple[MixtureWeights, ...] = ()
    stops: str = ""
    turn: int = 1
    segments: tuple[MixtureSegment, ...] = ()

    @property
    def size(self) -> int:
        """Records in one epoch."""
        return sum(source.count for source in self.sources)

    @property
    def mean_lengths(self) -> dict[str, float]:
        """How many tokens a record of each component of a mixture has, where weights are of them."""
        return {one.name: one.mean_length for one in self.components if one.mean_length}

    @property
    def order(self) -> Shuffle:
        """The order of records: the service's global shuffle stands above the dataset's own."""
        if self.components:
            return Shuffle.MIXTURE
        if self.shuffle:
            return Shuffle.GLOBAL
        return Shuffle.SHARD if self.shuffle_in_shard else Shuffle.NONE

    @property
    def window(self) -> int:
        """Shards whose records are mixed together; 1 where none are."""
        return self.shuffle_window if self.order is Shuffle.SHARD else 1

    @property
    def largest_lease(self) -> int:
        """The most records that are lent at once, unless a batch is larger.

        A window is lent as a whole, so that one process reads its shards, up to a million records.
        """
        return max(self.records_per_shard, min(self.window * self.records_per_shard, LARGEST_LEASE))


OPTIONS = {option.name: option for option in fields(DatasetSpec) if option.metadata}


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """Description of a dataset by a trainer: a `DatasetSpec` in which None takes what is registered, or the
    default."""

    name: str
    sources: tuple[Source, ...] | None = None
    records_per_shard: int | None = None
    seed: int | None = None
    shuffle: bool | None = None
    shuffle_shards: bool | None = None
    shuffle_in_shard: bool | None = None
    task_type: TaskType | None = None
    num_epochs: int | None = None
    epoch_barrier: bool | None = None
    max_bad_records: int | None = None
    shuffle_window: int | None = None
    fingerprint: str | None = None
    components: tuple[Component, ...] | None = None
    weights: tuple[MixtureWeights, ...] | None = None
    stops: str | None = None
    turn: int | None = None

    @property
    def given(self) -> dict[str, Any]:
        """What is asked for, by name. An unknown fingerprint asks for nothing."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        found["fingerprint"] = self.fingerprint or None
        return {name: value for name, value in found.items() if value is not None}


class DatasetOptions(TypedDict, total=False):
    """Options of a dataset as keywords of `DataShardService` and `ElasticDataLoader`.

    Args:
        task_type: what the dataset is for; passed to `create_shards()`.
        num_epochs: passes over the data; 0 is endless; None is 1, or what is registered.
        records_per_shard: records in a shard; default: 8 batches.
        seed: with the epoch it fixes every order.
        shuffle_window: records are mixed inside windows of so many shards, which stand one after the other in
            the epoch's order; 1 mixes the records of each shard only. For readers that read whole blocks: a
            loader worker holds so many shards. See docs/shuffling.md.
        epoch_barrier: False lets a pass run on into the next epoch.
        max_bad_records: so many records may go to quarantine before the job fails; each counts once, however
            many epochs meet it.
        fingerprint: what tells this data from other data, such as a version; it is compared wherever the
            dataset is registered or restored. Default: the reader's, see docs/readers.md.
    """

    task_type: TaskType
    num_epochs: int | None
    records_per_shard: int | None
    seed: int
    shuffle_window: int | None
    epoch_barrier: bool
    max_bad_records: int
    fingerprint: str | None
