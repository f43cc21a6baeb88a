"""Where the records of an ElasticDL task lie in this trainer's sources: tasks become slices of its plan.

A task of an unnamed shard numbers the records of all sources together, one of a named shard those of that
storage. Knows nothing of leases or of the wire.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from edl_torch.core.elasticdl import ForeignTask
from edl_torch.core.permutation import Permutation, derive_key
from edl_torch.errors import DatasetConflict
from edl_torch.shard import DatasetSpec, IndexArray, Slice

_PURPOSE = "elasticdl task records"


class SourceMap:
    """Slices for tasks, in a plan in which each source that has records is one shard.

    With `shuffle` the records of a task that come in storage order are permuted among themselves.
    """

    def __init__(self, spec: DatasetSpec, *, shuffle: bool) -> None:
        self._spec = spec
        self._shuffle = shuffle
        self._sources = [source for source in spec.sources if source.count]
        counts = np.array([source.count for source in self._sources], dtype=np.int64)
        self._firsts = np.cumsum(counts) - counts  # the number of each source's first record, over all

    def slices(self, task: ForeignTask, epoch: int) -> tuple[Slice, ...]:
        """The records of the task in its order; runs of one source that ascend by one are one slice.

        Raises DatasetConflict for records that the sources do not have.
        """
        numbers = task.numbers
        if numbers is None and self._shuffle:
            permutation = Permutation(
                task.end - task.start, derive_key(self._spec.seed, epoch, _PURPOSE, task.start)
            )
            numbers = permutation.many(np.arange(task.end - task.start)) + task.start
        if numbers is not None:
            return tuple(self._runs(task.name, numbers, epoch))
        return tuple(self._range(task, epoch))

    def _range(self, task: ForeignTask, epoch: int) -> Iterator[Slice]:
        """Return the slices of a task that is a range of records; makes no list of their numbers."""
        at = task.start
        while at < task.end:
            shard, skip = self._place(task.name, at)
            limit = min(task.end - at, self._sources[shard].count - skip)
            yield Slice(epoch=epoch, shard=shard, skip=skip, limit=limit)
            at += limit

    def _runs(self, name: str, numbers: IndexArray, epoch: int) -> Iterator[Slice]:
        begins = np.flatnonzero(np.diff(numbers, prepend=numbers[0] - 2) != 1)
        for first, last in zip(begins, np.append(begins[1:], len(numbers)), strict=True):
            start = int(numbers[first])
            yield from self._range(ForeignTask(name=name, start=start, end=start + int(last - first)), epoch)

    def _place(self, name: str, number: int) -> tuple[int, int]:
        if not name:
            shard = int(np.searchsorted(self._firsts, number, side="right")) - 1
            if 0 <= number < self._spec.size:
                return shard, number - int(self._firsts[shard])
        for shard, source in enumerate(self._sources):
            if source.name == name and source.start <= number < source.start + source.count:
                return shard, number - source.start
        known = ", ".join(repr(source.name) for source in self._sources[:5])
        raise DatasetConflict(
            f"the master hands out record {number} of {name!r}, and this trainer's dataset "
            f"{self._spec.name!r} of {self._spec.size} records in {known} has none: give trainers and master "
            f"the same data, by the same names"
        )

    def __repr__(self) -> str:
        return f"<SourceMap {self._spec.name!r} sources={len(self._sources)}>"
