"""Plan of a dataset: its shards, and the record at each position of an epoch; all of it is computed.

Knows numbers and names only: not who leases a shard, what has been trained on, or how a record is read.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

import numpy as np

from edl_torch.core.mixture import Segments, component_spec, heard_of, mixed_name
from edl_torch.core.permutation import Permutation, derive_key
from edl_torch.core.registration import folder_of, validate_spec
from edl_torch.errors import InvalidArgument
from edl_torch.shard import (
    DatasetSpec,
    IndexArray,
    Indices,
    MixtureSegment,
    Shard,
    Shuffle,
    Slice,
    Source,
)

# The purposes that keys are derived for: a part of the order, so never changed.
_SHARDS, _RECORDS, _GLOBAL = "shards", "records", "global"

# Records of a component of a mixture that are computed together, a power of two: more cost hardly more time.
_LEAST, _MOST = 1 << 8, 1 << 11


class Plan:
    """A dataset cut into shards `0` to `num_shards - 1`, and the order of shards and records in every epoch.

    Sources stand in the order given, each cut into pieces of `records_per_shard` with a shorter last piece;
    an empty source has none. With `spec.shuffle` all records together are one storage named ''. Time and
    memory grow with the number of sources, never with that of records or shards.

    The shards in the order of an epoch are cut into windows of `window` shards, the last one maybe of fewer.
    Records are mixed inside windows, and slices are parts of them. A window is called by the number of the
    shard that stands first in it: where it has one shard, by that one's.

    Three keyed permutations make the order: π(epoch) of the shards, ω(epoch, window) of one window's records,
    ρ(epoch) of all records. The order is a function of (spec, epoch) and stable for ever.

    The shards of a mixture are cut from its indices. Which record an index is, its segments and the plans of
    its components say.
    """

    __slots__ = (
        *("mixed", "num_shards", "num_windows", "order", "size", "spec", "window"),
        *("_ends", "_folder", "_global", "_pi", "_pieces", "_rho", "_shard_ends", "_short", "_storage"),
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
        self.window = min(spec.window, self.num_shards)
        self.num_windows = -(-self.num_shards // self.window)
        rests = enumerate(piece.count % per for piece in self._pieces)
        self._short = {self._shard_ends[place] - 1: rest for place, rest in rests if rest}
        record_ends = accumulate(source.count for source in spec.sources)
        self._global = _Storages(spec.sources, record_ends, 1) if spec.shuffle else None
        self._storage = _Storages(spec.sources, self._shard_ends, per) if self.window > 1 else None
        self._pi = _EpochPermutation(self.num_shards, spec.seed, _SHARDS)
        self._rho = _EpochPermutation(self.size, spec.seed, _GLOBAL)
        self._ends: tuple[int, _ShardEnds] | None = None
        self._folder: str | None = None
        self.mixed = MixedRecords(spec) if spec.components else None

    @property
    def newest_segment(self) -> int:
        """The number of the newest segment of a mixture that is known here; 0 of other datasets."""
        return 0 if self.mixed is None else self.mixed.segments.newest

    def segments_after(self, number: int) -> tuple[MixtureSegment, ...]:
        """Return the segments of a mixture that began after the one of this number, in order."""
        if self.mixed is None:
            return ()
        return tuple(segment for segment in self.mixed.segments.all if segment.number > number)

    @property
    def known_spec(self) -> DatasetSpec:
        """The dataset, of a mixture with the segments that are known here by now."""
        return self.spec if self.mixed is None else replace(self.spec, segments=self.mixed.segments.all)

    def learn(self, segments: Iterable[MixtureSegment]) -> None:
        """Take over segments of a mixture that have begun since the dataset was registered."""
        if self.mixed is None:
            return
        self.mixed.segments.learn(segments)
        if self.spec.stops:  # it ends elsewhere: of what is lent nothing moves
            fresh = Plan(heard_of(self.spec, self.mixed.segments.all))
            for name in (
                "spec",
                "size",
                "num_shards",
                "num_windows",
                "_pieces",
                "_shard_ends",
                "_short",
                "_ends",
            ):
                setattr(self, name, getattr(fresh, name))

    @property
    def folder(self) -> str:
        """What the names of the sources begin with on this machine, and nothing of it may count."""
        if self._folder is None:
            self._folder = folder_of([source.name for source in self.spec.sources])
        return self._folder

    # Shards -----------------------------------------------------------------------------------------------

    def shard_at(self, epoch: int, position: int) -> int:
        """Return the shard that stands at `position` (0 to `num_shards - 1`) of the epoch: π(epoch)."""
        self._check_shard("position", position)
        return self._pi(epoch)(position) if self.spec.shuffle_shards else position

    def position_of(self, epoch: int, shard: int) -> int:
        """Return the position of `shard` in the epoch: the inverse of `shard_at`."""
        self._check_shard("shard", shard)
        return self._pi(epoch).inverse(shard) if self.spec.shuffle_shards else shard

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

    def indices_of(self, slice: Slice) -> tuple[int, int]:
        """Return the index of a slice's first record, in a mixture, and the one after its last."""
        start = self.bounds(slice.shard)[1]
        return start + slice.skip, start + slice.stop

    # Windows ----------------------------------------------------------------------------------------------

    def window_at(self, epoch: int, position: int) -> int:
        """Return the window at `position` (of `num_windows`) of the epoch."""
        return self.shard_at(epoch, position * self.window)

    def windows_at(self, epoch: int, start: int, stop: int) -> list[int]:
        """Return the windows at positions `start` to `stop`: `window_at` for many, which costs far less."""
        firsts = range(start * self.window, stop * self.window, self.window)
        return self._shards_at(epoch, firsts)

    def window_position(self, epoch: int, window: int) -> int:
        """Return the position of a window in the epoch. Raises InvalidArgument where none begins so."""
        position, after = divmod(self.position_of(epoch, window), self.window)
        if after:
            raise InvalidArgument(
                f"no window of dataset {self.spec.name!r} begins with shard {window} in epoch {epoch}"
            )
        return position

    def records_in(self, epoch: int, window: int) -> int:
        """Return how many records a window has."""
        if self.window == 1:
            return self.length(window)
        first, after = self._range(epoch, window)
        return after - first

    def window_bounds(self, epoch: int, windows: IndexArray) -> tuple[IndexArray, IndexArray]:
        """Return where windows begin among the records of the epoch, which stand window by window, and where
        they end; of a shard that is no window's first the end is the beginning."""
        places = self._pi(epoch).many_inverse(windows) if self.spec.shuffle_shards else windows
        whole = places + np.where(places % self.window, 0, self.window)
        ends = self._ends_in(epoch)
        return ends.before(places), ends.before(np.minimum(whole, self.num_shards))

    def window_starts(self, epoch: int, numbers: IndexArray) -> IndexArray:
        """Return where the windows begin that these records are in, among the records of the epoch."""
        places, _ = self._ends_in(epoch).find(numbers)
        return self._ends_in(epoch).before(places - places % self.window)

    def window_position_at(self, epoch: int, number: int) -> int:
        """Return the position of the window that a record is in, by its number among those of the epoch."""
        places, _ = self._ends_in(epoch).find(np.array([number]))
        return int(places[0]) // self.window

    def records_before(self, epoch: int, position: int) -> int:
        """Return records of the windows that stand before `position` of the epoch."""
        return self._ends_in(epoch).before_one(min(position * self.window, self.num_shards))

    def shards_in(self, epoch: int, window: int) -> list[int]:
        """Return the shards of a window, in the order of the epoch."""
        if self.window == 1:
            return [window]
        first = self.window_position(epoch, window) * self.window
        return self._shards_at(epoch, range(first, min(first + self.window, self.num_shards)))

    def num_shards_in(self, epoch: int, window: int) -> int:
        """Return how many shards a window has."""
        return min(self.window, self.num_shards - self.window_position(epoch, window) * self.window)

    def _shards_at(self, epoch: int, positions: range) -> list[int]:
        if not self.spec.shuffle_shards:
            return list(positions)
        numbers = np.arange(positions.start, positions.stop, positions.step, dtype=np.int64)
        shards: list[int] = self._pi(epoch).many(numbers).tolist()
        return shards

    def _range(self, epoch: int, window: int) -> tuple[int, int]:
        """Return where a window begins and ends among the records of the epoch, counted shard by shard."""
        position = self.window_position(epoch, window)
        return self.records_before(epoch, position), self.records_before(epoch, position + 1)

    def _ends_in(self, epoch: int) -> _ShardEnds:
        last = self._ends  # read once, as in `_EpochPermutation`
        if last is None or last[0] != epoch:
            short = np.fromiter(self._short, np.int64, len(self._short))
            lengths = np.fromiter(self._short.values(), np.int64, len(self._short))
            places = self._pi(epoch).many_inverse(short) if self.spec.shuffle_shards else short
            last = self._ends = epoch, _ShardEnds(places, lengths, self.spec.records_per_shard)
        return last[1]

    # Records ----------------------------------------------------------------------------------------------

    def indices(self, slice: Slice) -> Indices:
        """Return name and record number of each position of the slice, in order: what a slice means."""
        source, start, end = self._bounds_of(slice)
        if self.mixed is not None:
            return self.mixed.many(start + slice.skip, start + slice.stop)
        positions = np.arange(slice.skip, slice.stop, dtype=np.int64)
        if self._global is not None:
            return self._global.many(self._rho(slice.epoch).many(positions + start))
        if self.order is Shuffle.SHARD:
            positions = self._omega(slice.epoch, slice.shard, end - start).many(positions)
        if self._storage is None:
            return Indices((self.spec.sources[source].name,), positions + start)
        places, inside = self._ends_in(slice.epoch).find(positions + start)
        shards = self._pi(slice.epoch).many(places) if self.spec.shuffle_shards else places
        return self._storage.many(shards, inside)

    def locate(self, epoch: int, shard: int, position: int) -> tuple[str, int]:
        """Return name and record number of one position of a window."""
        return self.indices(Slice(epoch=epoch, shard=shard, skip=position, limit=1))[0]

    def stream(self, first: int, after: int) -> Iterator[tuple[int, Indices]]:
        """Yield the records `first` to `after` of all epochs one after the other, in runs with their
        epoch."""
        if self._global is not None and not self.spec.shuffle_shards:
            while first < after:
                epoch, inside = divmod(first, self.size)
                stop = min(inside + after - first, self.size)
                numbers = self._rho(epoch).many(np.arange(inside, stop, dtype=np.int64))
                yield epoch, self._global.many(numbers)
                first += stop - inside
        else:
            for part in self.slices(first, after):
                yield part.epoch, self.indices(part)

    def slices(self, first: int, after: int) -> Iterator[Slice]:
        """Yield the slices that the records `first` to `after` of all epochs one after the other make."""
        while first < after:
            epoch, inside = divmod(first, self.size)
            position = self.window_position_at(epoch, inside)
            skip = inside - self.records_before(epoch, position)
            window = self.window_at(epoch, position)
            limit = min(after - first, self.records_in(epoch, window) - skip)
            yield Slice(epoch=epoch, shard=window, skip=skip, limit=limit)
            first += limit

    def seeding(self, slice: Slice) -> Indices:
        """As `indices`, for random numbers of records: a mixture's names are without the components'
        folders."""
        found = self.indices(slice)
        if self.mixed is None:
            return found
        return Indices(self.mixed.below, found.numbers, found.sources, found.passes)

    def shard(self, slice: Slice) -> Shard:
        """Return the slice as users see it.

        Unshuffled, its bounds are exactly the slice's records; shuffled, they are those of the whole shard,
        and `indices()` says which of its records are meant. A window of several shards has no name, and its
        bounds count the records of the epoch.
        """
        source, start, end = self._bounds_of(slice)
        name = "" if self.window > 1 else self._pieces[max(source, 0)].name
        if self.order is Shuffle.NONE:
            return Shard(name=name, start=start + slice.skip, end=start + slice.stop, epoch=slice.epoch)
        resolve = partial(self.indices, slice)
        return Shard(name=name, start=start, end=end, epoch=slice.epoch, shuffled=True, resolve=resolve)

    def storage_of(self, epoch: int, window: int) -> Iterator[Shard]:
        """Yield where the records of a window lie: its shards, unshuffled. Not for the global shuffle."""
        for shard in self.shards_in(epoch, window):
            source, start, end = self.bounds(shard)
            yield Shard(name=self.spec.sources[source].name, start=start, end=end, epoch=epoch)

    def __reduce__(self) -> tuple[type[Plan], tuple[DatasetSpec]]:
        return Plan, (self.spec,)

    def __repr__(self) -> str:
        window = f" window={self.window}" if self.window > 1 else ""
        return (
            f"<Plan {self.spec.name!r} shards={self.num_shards} records={self.size} "
            f"order={self.order.value}{window}>"
        )

    def _omega(self, epoch: int, window: int, records: int) -> Permutation:
        return Permutation(records, derive_key(self.spec.seed, epoch, _RECORDS, window))

    def _bounds_of(self, slice: Slice) -> tuple[int, int, int]:
        """As `bounds`; of a window of several shards the source is -1 and the numbers are the epoch's."""
        if self.window > 1:
            source, (start, end) = -1, self._range(slice.epoch, slice.shard)
        else:
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


class _ShardEnds:
    """Where each shard ends in the order of one epoch: after `per` records, but for the short ones.

    Numbers wrap around where there are more shards of `per` than 64 bits hold, and wrap back: what is
    returned is below 2**62.
    """

    __slots__ = ("_ends", "_missing", "_per", "_places")

    def __init__(self, places: IndexArray, lengths: IndexArray, per: int) -> None:
        by_place = np.argsort(places)
        self._per = per
        self._places = places[by_place]  # of the short shards
        # Records that the first so many of them lack, and the records up to the end of each.
        self._missing = np.concatenate((np.zeros(1, np.int64), np.cumsum(per - lengths[by_place])))
        self._ends = (self._places + 1) * per - self._missing[1:]

    def before(self, places: IndexArray) -> IndexArray:
        """Return the records of the shards that stand before each of these places."""
        before: IndexArray = places * self._per - self._missing[np.searchsorted(self._places, places)]
        return before

    def before_one(self, place: int) -> int:
        """Return the same for one place: for so little numpy's calls take longer than all else."""
        missing = int(self._missing[bisect_left(self._places, place)])
        return (place * self._per - missing) % 2**64

    def find(self, numbers: IndexArray) -> tuple[IndexArray, IndexArray]:
        """Return the place of the shard that each record is in, and its number inside of it."""
        full = numbers + self._missing[np.searchsorted(self._ends, numbers, side="right")]
        return full // self._per, full % self._per


class _Storages:
    """Turns numbers that count through all sources into names, and numbers in their storages.

    They count records, or shards of `per` records, of which the last of a source may be short.
    """

    __slots__ = ("_ends", "_names", "_per", "_shifts")

    def __init__(self, sources: tuple[Source, ...], ends: Iterable[int], per: int) -> None:
        self._names = tuple(source.name for source in sources)
        self._per = per
        self._ends = np.array(tuple(ends), dtype=np.int64)
        firsts = np.concatenate((np.zeros(1, np.int64), self._ends[:-1])) * per
        # Added to records counted so it gives the number in the storage.
        self._shifts = np.array([source.start for source in sources], dtype=np.int64) - firsts

    def many(self, places: IndexArray, inside: IndexArray | int = 0) -> Indices:
        """Return the pairs of so many records after the first of each place; int64, of one length."""
        numbers = places * self._per + inside
        if len(self._names) == 1:
            return Indices(self._names, numbers + self._shifts[0])
        sources = np.searchsorted(self._ends, places, side="right")
        return Indices(self._names, numbers + self._shifts[sources], sources)


class MixedRecords:
    """Records of a mixture by index: `segments` say which component's turn it is, plans which record that is.

    A record's name is that of its source, behind the component's: `code:/data/code/0.parquet`.
    """

    __slots__ = (
        *("below", "folders", "names", "segments"),
        *("_blocks", "_components", "_places", "_plans", "_whole"),
    )

    def __init__(self, spec: DatasetSpec) -> None:
        self.segments = Segments(spec.segments)
        self._components = spec.components
        self._plans = [
            None if component.left else Plan(component_spec(component, spec.seed))
            for component in spec.components
        ]
        names: list[str] = []
        self._places: list[dict[str, int]] = []  # of the names of each component's sources among all names
        for component in spec.components:
            own = dict.fromkeys(source.name for source in component.sources)
            self._places.append({name: len(names) + place for place, name in enumerate(own)})
            names += [mixed_name(component.name, name) for name in own]
        self.names = tuple(names)
        self._whole: list[tuple[tuple[str, ...], IndexArray] | None] = [None] * len(self._plans)
        self._blocks: list[_Blocks] = []
        # Where the data of each component lie, and the names as they are wherever that is.
        self.folders = {plan.spec.name: plan.folder for plan in self._plans if plan is not None}
        self.below = tuple(
            mixed_name(component.name, name.removeprefix(plan.folder))
            for component, plan, where in zip(spec.components, self._plans, self._places, strict=True)
            if plan is not None
            for name in where
        )

    def many(self, first: int, after: int) -> Indices:
        """Return the records of the indices `first` to `after`."""
        components, numbers = self.segments.at(first, after)
        found = np.empty((3, len(numbers)), np.int64)
        try:
            blocks = self._blocks.pop()
        except IndexError:  # another thread has them: this one gets its own
            blocks = _Blocks(len(self._plans))
        for start in range(0, len(numbers), blocks.size):
            part = slice(start, start + blocks.size)
            blocks.look_up(components[part], numbers[part], found[:, part], self._compute)
        self._blocks.append(blocks)
        return Indices(self.names, found[0], found[1], found[2])

    def _compute(self, component: int, first: int, block: IndexArray) -> None:
        """Write numbers, places of names, and passes of a component's records from `first` on."""
        at, plan = 0, self._plans[component]
        if plan is None:
            raise InvalidArgument(
                f"a record of component {self._components[component].name!r} is asked for, which has left"
            )
        for epoch, run in plan.stream(first, first + block.shape[1]):
            here = slice(at, at + len(run))
            block[0, here], block[1, here], block[2, here] = (
                run.numbers,
                self._sources_of(component, run),
                epoch,
            )
            at += len(run)

    def met_again(
        self, first: int, after: int, met: Mapping[str, Sequence[tuple[int, ...]]]
    ) -> Iterator[Indices]:
        """Yield the records of some indices, by their names below, of passes over components that were `met`:
        of each component there are runs of passes."""
        components, ranks = self.segments.at(first, after)
        for c, plan in enumerate(self._plans):
            runs = met.get(self._components[c].name)
            if plan is None or not runs or not len(own := ranks[components == c]):
                continue
            passes = np.arange(own[0] // plan.size, own[-1] // plan.size + 1)
            are_met = np.zeros(len(passes), bool)
            for edges in runs:
                are_met |= np.searchsorted(edges, passes, side="right") % 2 == 1
            for number in passes[are_met].tolist():
                low, high = max(own[0], number * plan.size), min(own[-1] + 1, (number + 1) * plan.size)
                found = [run for _, run in plan.stream(int(low), int(high))]
                sources = [np.full(len(run), self._sources_of(c, run)) for run in found]
                numbers = np.concatenate([run.numbers for run in found])
                yield Indices(self.below, numbers, np.concatenate(sources), np.full(len(numbers), number))

    def storage(self, first: int, after: int, wanted: Container[int]) -> Iterator[tuple[int, bool, Shard]]:
        """Yield where records of some indices lie: the component, whether it is read in order, and a shard.

        Of `wanted` components those that are read in order, and those of which windows are mixed, as a whole.
        """
        components, numbers = self.segments.at(first, after)
        by_component = np.argsort(components, kind="stable")
        edges = np.flatnonzero(np.diff(components[by_component])) + 1
        for run in np.split(by_component, edges):
            component = int(components[run[0]])
            plan = self._plans[component]
            if plan is None or component not in wanted or plan.order is Shuffle.GLOBAL:
                continue
            in_order = plan.order is Shuffle.NONE
            for part in plan.slices(int(numbers[run[0]]), int(numbers[run[-1]]) + 1):
                for shard in [plan.shard(part)] if in_order else plan.storage_of(part.epoch, part.shard):
                    yield component, in_order, shard

    def _sources_of(self, component: int, run: Indices) -> int | IndexArray:
        """The places among all names of those of a run of the component."""
        where = self._places[component]
        if run.sources is None:
            return where[run.names[0]]
        known = self._whole[component]
        if known is None or known[0] is not run.names:  # runs of all sources name them by one tuple
            places = np.array([where[name] for name in run.names], np.int64)
            known = self._whole[component] = run.names, places
        return known[1][run.sources]

    def __repr__(self) -> str:
        return f"<MixedRecords of {len(self._plans)} component(s) {self.segments!r}>"


class _Blocks:
    """The two blocks of each component of a mixture that were needed last. One thread at a time uses them."""

    def __init__(self, components: int) -> None:
        self.size = size = min(max(_LEAST, 1 << (1 << 16).bit_length() - components.bit_length()), _MOST)
        self._places = np.full(2 * components, -1, np.int64)
        self._records = np.empty((3, 2 * components, size), np.int64)  # memory comes as it is used

    def look_up(
        self,
        components: IndexArray,
        numbers: IndexArray,
        out: IndexArray,
        compute: Callable[[int, int, IndexArray], None],
    ) -> None:
        """Write what records are: no more than a block, and of each component some that follow each other.

        So no more than two blocks of a component are needed, an even one and an odd one.
        """
        size = self.size
        places = numbers // size
        slots = 2 * components + places % 2
        while len(unknown := np.flatnonzero(self._places[slots] != places)):
            slot, place = int(slots[unknown[0]]), int(places[unknown[0]])
            self._places[slot] = -1  # an error leaves no half of a block
            compute(slot // 2, place * size, self._records[:, slot])
            self._places[slot] = place
        self._records.reshape(3, -1).take(slots * size + numbers % size, axis=1, out=out, mode="clip")


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
