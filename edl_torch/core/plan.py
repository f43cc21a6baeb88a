"""Plan of a dataset: its shards, and the record at each position of an epoch; all of it is computed.

Knows numbers and names only: not who leases a shard, what has been trained on, or how a record is read.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import partial
from itertools import accumulate

import numpy as np

from edl_torch.core.permutation import Permutation, derive_key
from edl_torch.core.spec import validate_spec
from edl_torch.errors import InvalidArgument
from edl_torch.shard import DatasetSpec, IndexArray, Indices, Shard, Shuffle, Slice, Source

# The purposes that keys are derived for: a part of the order, so never changed.
_SHARDS, _RECORDS, _GLOBAL = "shards", "records", "global"


class Plan:
    """A dataset cut into shards `0` to `num_shards - 1`, and the order of shards and records in every epoch.

    Sources stand in the order given, each cut into pieces of `records_per_shard` with a shorter last piece;
    an empty source has none. With `spec.shuffle` all records together are one storage named ''. Time and
    memory grow with the number of sources, never with that of records or shards.

    Three keyed permutations make the order: π(epoch) of the shards, σ(epoch, shard) of one shard's records,
    ρ(epoch) of all records. The order is a function of (spec, epoch) and stable for ever.
    """

    __slots__ = (
        *("num_shards", "order", "size", "spec"),
        *("_global", "_pi", "_pieces", "_rho", "_shard_ends", "_short", "_short_places"),
    )

    def __init__(self, spec: DatasetSpec) -> None:
        validate_spec(spec)
        self.spec = spec
        self.size = spec.size
        self.order = spec.order
        self._pieces = (Source(name="", count=self.size),) if spec.shuffle else spec.sources
        # How many shards there are up to the end of each source: a shard's source is found by bisection.
        per = spec.records_per_shard
        self._shard_ends = tuple(accumulate(-(-source.count // per) for source in self._pieces))
        self.num_shards = self._shard_ends[-1]
        pieces = zip(self._shard_ends, self._pieces, strict=True)
        self._short = {end - 1: piece.count % per for end, piece in pieces if piece.count % per}
        self._short_places: tuple[int, IndexArray, IndexArray] | None = None  # of one epoch: see `starts`
        self._global = _GlobalNumbers(spec.sources) if spec.shuffle else None
        self._pi = _EpochPermutation(self.num_shards, spec.seed, _SHARDS)
        self._rho = _EpochPermutation(self.size, spec.seed, _GLOBAL)

    def shard_at(self, epoch: int, position: int) -> int:
        """Return the shard that stands at `position` (0 to `num_shards - 1`) of the epoch: π(epoch)."""
        self._check_shard("position", position)
        return self._pi(epoch)(position) if self.spec.shuffle_shards else position

    def shards_at(self, epoch: int, start: int, stop: int) -> list[int]:
        """Return the shards at positions `start` to `stop`: `shard_at` for many, which costs far less."""
        if not self.spec.shuffle_shards:
            return list(range(start, stop))
        shards: list[int] = self._pi(epoch).many(np.arange(start, stop, dtype=np.int64)).tolist()
        return shards

    def position_of(self, epoch: int, shard: int) -> int:
        """Return the position of `shard` in the epoch: the inverse of `shard_at`."""
        self._check_shard("shard", shard)
        return self._pi(epoch).inverse(shard) if self.spec.shuffle_shards else shard

    def records_before(self, epoch: int, position: int) -> int:
        """Return records of the shards that stand before `position` of the epoch."""
        per = self.spec.records_per_shard
        short = np.fromiter(self._short, np.int64, len(self._short))
        places = self._pi(epoch).many_inverse(short) if self.spec.shuffle_shards else short
        passed = short[places < position].tolist()
        return position * per - sum(per - self._short[shard] for shard in passed)

    def starts(self, epoch: int, shards: IndexArray) -> IndexArray:
        """Return how many records of the epoch stand before each of these shards, int64 of shape (k,)."""
        places = self._places(epoch, shards)
        last = self._short_places
        if last is None or last[0] != epoch:
            short = np.fromiter(self._short, np.int64, len(self._short))
            lengths = np.fromiter(self._short.values(), np.int64, len(self._short))
            where = self._places(epoch, short)
            order = np.argsort(where)
            missing = np.cumsum(self.spec.records_per_shard - lengths[order])
            last = self._short_places = epoch, where[order], np.concatenate(([0], missing))
        _, short_places, missing = last
        starts: IndexArray = (
            places * self.spec.records_per_shard - missing[np.searchsorted(short_places, places)]
        )
        return starts

    def _places(self, epoch: int, shards: IndexArray) -> IndexArray:
        return self._pi(epoch).many_inverse(shards) if self.spec.shuffle_shards else shards

    def bounds(self, shard: int) -> tuple[int, int, int]:
        """The shard's source (its place in `spec.sources`) and the source's record numbers, start and end.

        With the global shuffle the source is -1 and the numbers count through all sources.
        """
        self._check_shard("shard", shard)
        place = bisect_right(self._shard_ends, shard)
        piece = self._pieces[place]
        first_shard = self._shard_ends[place - 1] if place else 0
        skip = (shard - first_shard) * self.spec.records_per_shard
        stop = min(skip + self.spec.records_per_shard, piece.count)
        return (-1 if self.spec.shuffle else place), piece.start + skip, piece.start + stop

    def length(self, shard: int) -> int:
        """Return how many records the shard has."""
        self._check_shard("shard", shard)
        return self._short.get(shard, self.spec.records_per_shard)

    def indices(self, slice: Slice) -> Indices:
        """Return name and record number of each position of the slice, in order: what a slice means."""
        source, start, _ = self._bounds_of(slice)
        positions = np.arange(slice.skip, slice.stop, dtype=np.int64)
        if self._global is not None:
            return self._global.many(self._rho(slice.epoch).many(positions + start))
        if self.order is Shuffle.SHARD:
            positions = self._sigma(slice.epoch, slice.shard).many(positions)
        return Indices((self.spec.sources[source].name,), positions + start)

    def locate(self, epoch: int, shard: int, position: int) -> tuple[str, int]:
        """Return name and record number of one position of a shard: `indices` for a single record."""
        source, start, _ = self._bounds_of(Slice(epoch=epoch, shard=shard, skip=position, limit=1))
        if self._global is not None:
            return self._global.one(self._rho(epoch)(start + position))
        if self.order is Shuffle.SHARD:
            position = self._sigma(epoch, shard)(position)
        return self.spec.sources[source].name, start + position

    def shard(self, slice: Slice) -> Shard:
        """Return the slice as users see it.

        Unshuffled, its bounds are exactly the slice's records; shuffled, they are those of the whole shard,
        and `indices()` says which of its records are meant.
        """
        source, start, end = self._bounds_of(slice)
        name = self._pieces[max(source, 0)].name
        if self.order is Shuffle.NONE:
            return Shard(name=name, start=start + slice.skip, end=start + slice.stop, epoch=slice.epoch)
        resolve = partial(self.indices, slice)
        return Shard(name=name, start=start, end=end, epoch=slice.epoch, shuffled=True, resolve=resolve)

    def __reduce__(self) -> tuple[type[Plan], tuple[DatasetSpec]]:
        return Plan, (self.spec,)

    def __repr__(self) -> str:
        return (
            f"<Plan {self.spec.name!r} shards={self.num_shards} records={self.size} order={self.order.value}>"
        )

    def _sigma(self, epoch: int, shard: int) -> Permutation:
        return Permutation(self.length(shard), derive_key(self.spec.seed, epoch, _RECORDS, shard))

    def _bounds_of(self, slice: Slice) -> tuple[int, int, int]:
        source, start, end = self.bounds(slice.shard)
        if not 0 <= slice.skip <= slice.stop <= end - start:
            raise InvalidArgument(
                f"positions {slice.skip}..{slice.stop} are outside of shard {slice.shard} of dataset "
                f"{self.spec.name!r}, which has {end - start} records"
            )
        return source, start, end

    def _check_shard(self, what: str, number: int) -> None:
        if not 0 <= number < self.num_shards:
            raise InvalidArgument(
                f"{what} {number} is not in dataset {self.spec.name!r}, which has {self.num_shards} shard(s)"
            )


class _EpochPermutation:
    """One permutation an epoch; the last one is kept, as almost every call is about the same epoch."""

    __slots__ = ("_last", "_n", "_purpose", "_seed")

    def __init__(self, n: int, seed: int, purpose: str) -> None:
        self._n = n
        self._seed = seed
        self._purpose = purpose
        self._last: tuple[int, Permutation] | None = None

    def __call__(self, epoch: int) -> Permutation:
        # Epoch and permutation are one value, read once: threads may use a plan together.
        last = self._last
        if last is None or last[0] != epoch:
            last = self._last = epoch, Permutation(self._n, derive_key(self._seed, epoch, self._purpose))
        return last[1]


class _GlobalNumbers:
    """Turns record numbers that count through all sources into name and number within the source."""

    __slots__ = ("_ends", "_names", "_shifts")

    def __init__(self, sources: tuple[Source, ...]) -> None:
        self._names = tuple(source.name for source in sources)
        counts = np.array([source.count for source in sources], dtype=np.int64)
        self._ends = np.cumsum(counts)
        # Added to a global number it gives the number within the source's storage.
        self._shifts = np.array([source.start for source in sources], dtype=np.int64) + counts - self._ends

    def many(self, numbers: IndexArray) -> Indices:
        """Return the pairs of `numbers`, an int64 array."""
        if len(self._names) == 1:
            return Indices(self._names, numbers + self._shifts[0])
        sources = np.searchsorted(self._ends, numbers, side="right")
        return Indices(self._names, numbers + self._shifts[sources], sources)

    def one(self, number: int) -> tuple[str, int]:
        """Return the pair of one number."""
        source = int(np.searchsorted(self._ends, number, side="right"))
        return self._names[source], number + int(self._shifts[source])
