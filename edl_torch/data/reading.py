"""Reads one leased slice through a reader, sample by sample, and says which position each sample is.

It names the record when reading fails; what becomes of the failure is decided by `on_bad`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from edl_torch.core.calls import Grant
from edl_torch.core.plan import Plan
from edl_torch.errors import AccountingError, BadRecord
from edl_torch.readers.base import AbstractDataReader, has_random_access
from edl_torch.shard import Shard, Shuffle, Slice, Task


class OnBad(Protocol):
    """Called with the failed position and its error; returns to skip the record, or raises."""

    def __call__(self, position: int, error: BadRecord) -> None: ...


class SampleReader:
    """A reader, and how its records become samples: `to_sample(record, name, index)`."""

    def __init__(self, reader: AbstractDataReader, to_sample: Callable[[Any, Slice, str, int], Any]) -> None:
        self._reader = reader
        self._to_sample = to_sample
        self._random = has_random_access(reader)

    def samples(self, plan: Plan, grant: Grant, on_bad: OnBad) -> Iterator[tuple[int, Any]]:
        """Yield `(position, sample)` for every readable record of the lease, in the order of the slice."""
        if plan.order is Shuffle.NONE:
            return self._sequential(plan, grant, on_bad)
        if self._random:
            return self._picked(plan, grant, on_bad)
        return self._permuted(plan, grant, on_bad)

    def _sequential(self, plan: Plan, grant: Grant, on_bad: OnBad) -> Iterator[tuple[int, Any]]:
        cut = grant.slice
        shard = plan.shard(cut)
        offset = cut.skip - shard.start  # position of record number 0
        index = shard.start
        while index < shard.end:
            records = iter(self._range(plan, shard, index, grant.task))
            try:
                for record in records:
                    sample = self._to_sample(record, cut, shard.name, index)
                    index += 1
                    yield index - 1 + offset, sample
                    if index == shard.end:
                        return
            except Exception as exc:  # noqa: BLE001  a reader is the user's code: whatever it raises is named
                error = name_record(exc, shard.name, index)
            else:
                error = too_few(self._reader, shard, index)
            on_bad(index + offset, error)
            index += 1

    def _range(self, plan: Plan, shard: Shard, start: int, task: int) -> Any:
        part = Shard(name=shard.name, start=start, end=shard.end, epoch=shard.epoch)
        return self._reader.read_records(Task(shard=part, type=plan.spec.task_type, task_id=task))

    def _picked(self, plan: Plan, grant: Grant, on_bad: OnBad) -> Iterator[tuple[int, Any]]:
        read = self._reader.read_record
        cut = grant.slice
        for position, (name, index) in enumerate(plan.indices(cut), cut.skip):
            try:
                sample = self._to_sample(read(name, index), cut, name, index)
            except Exception as exc:  # noqa: BLE001  as above
                on_bad(position, name_record(exc, name, index))
            else:
                yield position, sample

    def _permuted(self, plan: Plan, grant: Grant, on_bad: OnBad) -> Iterator[tuple[int, Any]]:
        """Without random access: the shard's records are read in storage order and kept, then picked."""
        if plan.order is Shuffle.GLOBAL:
            raise AccountingError(
                f"{type(self._reader).__name__} has no read_record(name, index), which a global shuffle needs: "
                f"use shuffle_shards=True at the service and shuffle=True at the dataset"
            )
        kept = self._whole_shard(plan, grant)
        cut = grant.slice
        for position, (name, index) in enumerate(plan.indices(cut), cut.skip):
            found = kept[index]
            if isinstance(found, BadRecord):
                on_bad(position, found)
                continue
            try:
                sample = self._to_sample(found, cut, name, index)
            except Exception as exc:  # noqa: BLE001  as above
                on_bad(position, name_record(exc, name, index))
            else:
                yield position, sample

    def _whole_shard(self, plan: Plan, grant: Grant) -> dict[int, Any]:
        shard = plan.shard(grant.slice)
        wanted = set(shard.indices().numbers.tolist())
        kept: dict[int, Any] = {}
        index = shard.start
        while index < shard.end:
            try:
                for record in self._range(plan, shard, index, grant.task):
                    if index in wanted:
                        kept[index] = record
                    index += 1
                    if index == shard.end:
                        return kept
            except Exception as exc:  # noqa: BLE001  as above
                kept[index] = name_record(exc, shard.name, index)
            else:
                kept[index] = too_few(self._reader, shard, index)
            index += 1
        return kept


def name_record(error: Exception, name: str, index: int) -> BadRecord:
    """The error with the record's name in front."""
    if isinstance(error, BadRecord):
        bad = BadRecord(f"record {index} of {name!r}: {error}")
    else:
        bad = BadRecord(f"record {index} of {name!r}: {type(error).__name__}: {error}")
    bad.__cause__ = error
    return bad


def too_few(reader: AbstractDataReader, shard: Shard, index: int) -> BadRecord:
    """The reader ended before the range did."""
    return BadRecord(
        f"record {index} of {shard.name!r}: {type(reader).__name__}.read_records() ended {shard.end - index} "
        f"record(s) early; create_shards() promised them"
    )
