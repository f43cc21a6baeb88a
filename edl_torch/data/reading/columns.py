"""Reads one leased slice as columnar batches: one call of the reader for each, no Python loop over records.

When a batch cannot be read its records are tried one by one, so that only the bad ones are named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from edl_torch.core.calls import Grant
from edl_torch.core.plan import Plan
from edl_torch.data.reading.sample_reading import announce
from edl_torch.errors import ReaderError
from edl_torch.readers.base import AbstractDataReader, is_source_error, name_record
from edl_torch.shard import IndexArray, Indices

_MOST_BATCHES = 16  # read at once, where records lie scattered
MOST_BYTES = 16 << 20  # of these

Runs = list[tuple[int, int]]  # (first position, position after)
OnBad = Callable[[int, ReaderError], None]  # called with the position of a bad record; may raise


def read_columns(
    reader: AbstractDataReader, plan: Plan, grant: Grant, batch_size: int, on_bad: OnBad
) -> Iterator[tuple[Runs, Any]]:
    """Yield `(runs of positions, batch)` of at most `batch_size` records each, in the order of the slice.

    A batch has records of several sources where these are mixed and the reader makes arrays, or arrays by
    column; where it makes something else its batches are of one source, and smaller.
    """
    announce(reader, plan, grant.slice)
    indices = plan.indices(grant.slice)
    scattered = plan.window > 1 or indices.sources is not None
    together = _ReadTogether(reader, indices, batch_size) if scattered else None
    names, numbers, sources, begin = indices.names, indices.numbers, indices.sources, grant.slice.skip
    for skip in range(0, len(numbers), batch_size):
        stop = min(skip + batch_size, len(numbers))
        batch = None if together is None else together.batch(skip, stop - skip)
        if batch is not None:
            yield [(begin + skip, begin + stop)], batch
            continue
        runs = ((skip, stop),) if sources is None else _same_source(sources, skip, stop)
        for first, after in runs:
            name = names[0 if sources is None else int(sources[first])]
            read = _read(reader, name, numbers[first:after], begin + first, on_bad)
            if read is not None:
                yield read


class _ReadTogether:
    """Batches whose records lie in many blocks, some read at once: one row of a block costs as much."""

    def __init__(self, reader: AbstractDataReader, indices: Indices, batch_size: int) -> None:
        self._reader = reader
        self._indices = indices
        self._batch_size = batch_size
        self._batches = 1  # that are read at once
        self._start = self._stop = 0
        self._records: Any = None
        self._fits = True  # batches of this reader can be put together

    def batch(self, skip: int, size: int) -> Any | None:
        """Return the batch of these records; None where one of them cannot be read, or batches of this reader
        not be put together."""
        if skip >= self._stop and self._fits:
            self._read(skip)
            if self._records is None and self._batches > 1:
                self._batches = 1
                self._read(skip)
        first = skip - self._start
        return None if self._records is None else _rows(self._records, slice(first, first + size))

    def _read(self, skip: int) -> None:
        self._start, self._stop = skip, min(skip + self._batches * self._batch_size, len(self._indices))
        self._records = None
        part = self._indices[self._start : self._stop]
        sources = np.zeros(len(part), np.int64) if part.sources is None else part.sources
        by_source = np.argsort(sources, kind="stable")
        edges = np.flatnonzero(np.diff(sources[by_source])) + 1
        found = []
        for places in np.split(by_source, edges):
            name, numbers = part.names[int(sources[places[0]])], part.numbers[places]
            try:
                found.append(self._reader.read_batch(name, numbers))
            except Exception as exc:
                if is_source_error(exc):
                    raise name_record(exc, name, int(numbers[0])) from exc
                return  # whoever reads it alone is told which record it is
        joined = _joined(found)
        self._fits = joined is not None
        if joined is not None:
            self._records = _rows(joined, np.argsort(by_source)) if edges.size else joined
            self._batches = max(1, min(_MOST_BATCHES, MOST_BYTES * self._batches // max(1, _nbytes(joined))))


def _joined(batches: list[Any]) -> Any | None:
    """Return arrays, or arrays by column, one after the other; None for anything else."""
    first = batches[0]
    if all(isinstance(batch, dict) and batch.keys() == first.keys() for batch in batches):
        columns = {name: _joined([batch[name] for batch in batches]) for name in first}
        return None if any(column is None for column in columns.values()) else columns
    if all(type(batch) is np.ndarray and batch.ndim for batch in batches):
        kinds = {(batch.dtype, batch.shape[1:]) for batch in batches}
        return (first if len(batches) == 1 else np.concatenate(batches)) if len(kinds) == 1 else None
    return None


def _rows(records: Any, which: Any) -> Any:
    if isinstance(records, dict):
        return {name: _rows(column, which) for name, column in records.items()}
    return records[which]


def _nbytes(records: Any) -> int:
    return sum(map(_nbytes, records.values())) if isinstance(records, dict) else int(records.nbytes)


def _same_source(sources: IndexArray, first: int, stop: int) -> Iterable[tuple[int, int]]:
    """The longest runs of one source, from one place to another."""
    changes = np.flatnonzero(np.diff(sources[first:stop])) + first + 1
    return pairwise([first, *changes.tolist(), stop])


def _read(
    reader: AbstractDataReader, name: str, numbers: IndexArray, position: int, on_bad: OnBad
) -> tuple[Runs, Any] | None:
    """Return the batch of those records that can be read, with their positions; None where none can."""
    try:
        return [(position, position + len(numbers))], reader.read_batch(name, numbers)
    except Exception as exc:
        if is_source_error(exc):  # to try its records one by one would be no better
            raise name_record(exc, name, int(numbers[0])) from exc
    good = []
    for at, number in enumerate(numbers.tolist()):
        try:
            reader.read_batch(name, numbers[at : at + 1])
        except Exception as exc:  # noqa: BLE001  as above
            on_bad(position + at, name_record(exc, name, number))
        else:
            good.append(at)
    runs = [(position + at, position + at + 1) for at in good]
    return (runs, reader.read_batch(name, numbers[good])) if good else None
