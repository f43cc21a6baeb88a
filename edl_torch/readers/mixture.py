"""Reader of a mixture: hands each record on to the reader of its component.

It must not know the order: names of records say which component they are of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import Any

import numpy as np

from edl_torch.readers.base import (
    AbstractDataReader,
    IndexedReader,
    Range,
    has_expectations,
    has_random_access,
    no_source,
    reader_fingerprint,
    reader_sources,
)
from edl_torch.shard import Component, Indices, MixtureWeights, Shard, Task, TaskType


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentReader:
    """Reader of one component, and the fields of its `Component` that say in which order it is read."""

    name: str
    reader: AbstractDataReader
    order: Mapping[str, Any] = field(default_factory=dict)


class MixtureReader(AbstractDataReader):
    """Reads the records of a mixture, each through the reader of its component.

    A record's name is that of its source behind the component's: `code:/data/code/0.parquet`. With
    `tagged` it is read as the pair of its component's place and itself.

    Args:
        parts: the components, in order.
        weights: their first weights, or a schedule of them.
        size: the mixture's records.
        stops: what its size follows from, as `DatasetSpec.stops`.
        tagged: see above.
    """

    def __init__(
        self,
        parts: Sequence[ComponentReader],
        *,
        weights: Sequence[MixtureWeights],
        size: int,
        stops: str = "",
        tagged: bool = False,
    ) -> None:
        super().__init__()
        self.parts = tuple(parts)
        self.weights = tuple(weights)
        self.stops = stops
        self.tagged = tagged
        self._size = size
        self._places = {part.name: place for place, part in enumerate(self.parts)}
        readers = [part.reader for part in self.parts]
        self.thread_safe = all(reader.thread_safe and has_random_access(reader) for reader in readers)
        self.imports = tuple(module for reader in readers for module in getattr(reader, "imports", ()))
        self.expecting = frozenset(place for place, reader in enumerate(readers) if has_expectations(reader))

    def components(self, mode: TaskType = TaskType.TRAINING) -> tuple[Component, ...]:
        """Return the components as they are registered. Their readers are asked for sources and
        fingerprint."""
        return tuple(
            Component(
                name=part.name,
                sources=reader_sources(part.reader, mode),
                fingerprint=reader_fingerprint(part.reader),
                **part.order,
            )
            for part in self.parts
        )

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
        record = self._read(place, own, index)
        return (place, record) if self.tagged else record

    def _read(self, place: int, name: str, index: int) -> Any:
        reader = self.parts[place].reader
        if has_random_access(reader):
            return reader.read_record(name, index)
        shard = Shard(name=name, start=index, end=index + 1)
        return next(iter(reader.read_records(Task(shard=shard))))

    def read_each(self, indices: Indices) -> Iterator[Any]:
        """Yield what `read_record` returns for each of `indices`, faster where a component has one source."""
        assert indices.sources is not None
        runs: dict[int, Iterator[Any]] = {}
        sources = indices.sources.tolist()
        by_source = np.argsort(indices.sources, kind="stable")
        begins = np.flatnonzero(np.diff(indices.sources[by_source], prepend=-1))
        for own in np.split(by_source, begins[1:]) if sources else ():
            source = sources[own[0]]
            place, name = self._find(indices.names[source])
            reader, numbers = self.parts[place].reader, indices.numbers[own]
            if isinstance(reader, IndexedReader):
                records = reader.read_each(name, numbers)
            else:
                records = map(partial(self._read, place, name), numbers.tolist())
            runs[source] = zip(repeat(place), records) if self.tagged else records
        return map(next, map(runs.__getitem__, sources))

    def expect(self, ranges: Sequence[Range], *, in_order: bool = False) -> None:
        """Tell the components' readers which records come next."""
        by_place: dict[int, list[Range]] = {}
        for name, start, end in ranges:
            place, own = self._find(name)
            by_place.setdefault(place, []).append((own, start, end))
        for place, own_ranges in by_place.items():
            self.parts[place].reader.expect(own_ranges, in_order=in_order)

    def _find(self, name: str) -> tuple[int, str]:
        """The component's place, and the name of the source there."""
        component, _, own = name.partition(":")
        if component not in self._places:
            raise no_source(name, self._places, self)
        return self._places[component], own

    def __repr__(self) -> str:
        return f"<MixtureReader {', '.join(part.name for part in self.parts[:5])}>"
