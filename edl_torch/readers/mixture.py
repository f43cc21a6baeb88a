"""Reader of a mixture: hands each record on to the reader of its component.

It must not know the order: names of records say which component they are of.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat, starmap
from operator import call
from typing import Any, NamedTuple

import numpy as np

from edl_torch.errors import ReaderError
from edl_torch.readers.base import (
    AbstractDataReader,
    Begun,
    IndexedReader,
    Range,
    can_begin,
    changed_since,
    has_expectations,
    has_random_access,
    no_source,
    reader_fingerprint,
    reader_sources,
)
from edl_torch.readers.map_dataset import MapDatasetReader
from edl_torch.shard import Component, IndexArray, Indices, MixtureWeights, Shard, Task, TaskType


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentReader:
    """Reader of one component, and the fields of its `Component` that say in which order it is read.

    The reader of one that has `left` is never asked.
    """

    name: str
    reader: AbstractDataReader
    order: Mapping[str, Any] = field(default_factory=dict)
    left: bool = False


class Ways(NamedTuple):
    """How records of each source of a mixture are read, by its place among `names`."""

    names: tuple[str, ...]
    places: IndexArray  # of components
    # Functions of a record's number. None may hold the `MixtureReader`: an array is no part of a circle that
    # Python's collector finds, so that the circle would stay for ever.
    loads: np.ndarray[Any, np.dtype[np.object_]]
    counts: IndexArray  # records that are there, where `loads` do not look
    together: set[int]  # sources of which `load_each` reads many in less time
    asking: set[int]  # and those whose bytes are asked for before


def read_alone(reader: AbstractDataReader, name: str, index: int) -> Any:
    """Return a record of any reader."""
    if has_random_access(reader):
        return reader.read_record(name, index)
    shard = Shard(name=name, start=index, end=index + 1)
    return next(iter(reader.read_records(Task(shard=shard))))


def _next_of(records: Iterator[Any], number: int) -> Any:
    return next(records)


class MixtureReader(AbstractDataReader):
    """Reads the records of a mixture, each through the reader of its component.

    A record's name is that of its source behind the component's: `code:/data/code/0.parquet`. With
    `tagged` it is read as the pair of its component's place and itself.

    Args:
        parts: the components, in order.
        weights: their first weights, or a schedule of them.
        size: the mixture's records.
        stops: what its size follows from, as `DatasetSpec.stops`.
        turn: records of one component in a row, as `DatasetSpec.turn`.
        tagged: see above.
    """

    def __init__(
        self,
        parts: Sequence[ComponentReader],
        *,
        weights: Sequence[MixtureWeights],
        size: int,
        stops: str = "",
        turn: int = 1,
        tagged: bool = False,
    ) -> None:
        super().__init__()
        self.parts = tuple(parts)
        self.weights = tuple(weights)
        self.stops = stops
        self.turn = turn
        self.tagged = tagged
        self._size = size
        self._ways: Ways | None = None
        self._places = {part.name: place for place, part in enumerate(self.parts)}
        readers = [part.reader for part in self.parts]
        self.thread_safe = all(reader.thread_safe and has_random_access(reader) for reader in readers)
        self.imports = tuple(module for reader in readers for module in getattr(reader, "imports", ()))
        self.expecting = frozenset(place for place, reader in enumerate(readers) if has_expectations(reader))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ways": None}

    def components(self, mode: TaskType = TaskType.TRAINING) -> tuple[Component, ...]:
        """Return the components as they are registered. Their readers are asked for sources and
        fingerprint."""
        return tuple(
            Component(name=part.name, sources=(), records_per_shard=1, left=True)
            if part.left
            else Component(
                name=part.name,
                sources=reader_sources(part.reader, mode),
                fingerprint=reader_fingerprint(part.reader),
                **part.order,
            )
            for part in self.parts
        )

    def changed(self, components: Sequence[Component], *, is_own: bool = False) -> str:
        """Say what of the data differs from when the components were registered, as `changed_since` does."""
        pairs = [(part, known) for part, known in zip(self.parts, components, strict=False) if not part.left]
        each = (changed_since(part.reader, known.fingerprint, is_own=is_own) for part, known in pairs)
        return "; ".join(filter(None, each))

    def create_shards(self, mode: TaskType = TaskType.TRAINING) -> dict[str, int]:
        """One source without a name: the indices of the mixture."""
        return {"": self._size}

    def read_records(self, task: Task) -> Iterator[Any]:
        """Yield records of one source, which the task names as the mixture does."""
        place, name = self._find(task.shard_name)
        shard = Shard(name=name, start=task.start, end=task.end, epoch=task.shard.epoch)
        records = self.parts[place].reader.read_records(
            Task(shard=shard, type=task.type, task_id=task.task_id)
        )
        return zip(repeat(place), records) if self.tagged else iter(records)

    def read_record(self, name: str, index: int) -> Any:
        """Record `index` of a source, which is named as the mixture does."""
        place, own = self._find(name)
        record = read_alone(self.parts[place].reader, own, index)
        return (place, record) if self.tagged else record

    def begin(self, indices: Indices) -> Begun | None:
        """Ask for the bytes of records of those components whose readers do so; None where none does."""
        assert indices.sources is not None
        ways = self.ways(indices.names)
        asked = ways.asking.intersection(indices.sources.tolist())
        if not asked:
            return None
        loads = ways.loads[indices.sources]
        numbers = indices.numbers.copy()
        begun = []
        for source in asked:
            of_it = np.flatnonzero(indices.sources == source)
            reader = self.parts[ways.places[source]].reader
            assert isinstance(reader, IndexedReader)
            if (one := reader.begin(numbers[of_it].tolist())) is not None:
                begun.append(one)
                loads[of_it], numbers[of_it] = one.record, np.arange(len(of_it))
        load_of, number_of, place_of = loads.tolist(), numbers.tolist(), ways.places[indices.sources].tolist()

        def record(at: int) -> Any:
            found = load_of[at](number_of[at])
            return (place_of[at], found) if self.tagged else found

        return Begun(*begun, record=record) if begun else None

    def read_each(self, indices: Indices) -> Iterator[Any]:
        """Yield what `read_record` returns for each of `indices`; who reads many together is asked once."""
        assert indices.sources is not None
        ways = self.ways(indices.names)
        if (indices.numbers >= ways.counts[indices.sources]).any():
            return starmap(self.read_record, indices)  # raises where it comes to the one that is not there
        loads = ways.loads
        if ways.together:
            loads = loads.copy()
            for source in ways.together.intersection(indices.sources.tolist()):
                numbers = indices.numbers[indices.sources == source]
                records = self.parts[ways.places[source]].reader.load_each(numbers.tolist())
                loads[source] = partial(_next_of, records)
        each = map(call, loads[indices.sources].tolist(), indices.numbers.tolist())
        places = ways.places[indices.sources].tolist() if self.tagged else []
        return zip(places, each, strict=False) if self.tagged else each

    def ways(self, names: tuple[str, ...]) -> Ways:
        """How records of these sources are read."""
        known = self._ways  # read once: threads share the reader
        if known is not None and known.names is names:  # a plan names all sources by one tuple
            return known
        places, loads, counts, together, asking = [], [], [], set(), set()
        for source, name in enumerate(names):
            place, own = self._find(name)
            reader = self.parts[place].reader
            load: Callable[[int], Any] = partial(read_alone, reader, own)
            count = sys.maxsize
            if isinstance(reader, IndexedReader) and reader.reads_by_load(own):
                count = reader.count
                if (alone := reader.load_alone) is not None:
                    load = alone
                else:
                    together.add(source)
                    load = reader.load
                if can_begin(reader):
                    asking.add(source)
            places.append(place)
            loads.append(load)
            counts.append(count)
        self._ways = known = Ways(
            names,
            np.array(places),
            np.fromiter(loads, object, len(loads)),
            np.array(counts),
            together,
            asking,
        )
        return known

    def expect_of_each(self, ranges: Iterable[tuple[int, bool, Shard]]) -> None:
        """Tell components' readers where the records lie that come next, and whether these come in order."""
        by_place: dict[tuple[int, bool], list[Range]] = {}
        for place, in_order, shard in ranges:
            by_place.setdefault((place, in_order), []).append((shard.name, shard.start, shard.end))
        for (place, in_order), own in by_place.items():
            with suppress(ReaderError):  # who reads what is not there is told
                self.parts[place].reader.expect(own, in_order=in_order)

    def check_unchanged(self) -> None:
        """Raise SourceChanged where a map-style dataset has fewer records than when it was given."""
        for part in self.parts:
            if isinstance(part.reader, MapDatasetReader):
                part.reader.check_unchanged()

    def _find(self, name: str) -> tuple[int, str]:
        """The component's place, and the name of the source there."""
        component, _, own = name.partition(":")
        if component not in self._places:
            raise no_source(name, self._places, self)
        return self._places[component], own

    def __repr__(self) -> str:
        return f"<MixtureReader {', '.join(part.name for part in self.parts[:5])}>"
