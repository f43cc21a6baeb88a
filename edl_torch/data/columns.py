"""Reads one leased slice as columnar batches: one call of the reader for each, no Python loop over records.

When a batch cannot be read its records are tried one by one, so that only the bad ones are named.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from edl_torch.core.calls import Grant
from edl_torch.core.plan import Plan
from edl_torch.data.reading import OnBad, announce
from edl_torch.readers.base import AbstractDataReader
from edl_torch.readers.error_classification import is_source_error, name_record
from edl_torch.shard import IndexArray, Indices

Runs = list[tuple[int, int]]  # (first position, position after)


def read_columns(
    reader: AbstractDataReader, plan: Plan, grant: Grant, batch_size: int, on_bad: OnBad
) -> Iterator[tuple[Runs, Any]]:
    """Yield `(runs of positions, batch)` of at most `batch_size` records each, in the order of the slice.

    A batch has records of several sources where these are mixed and the reader makes arrays, or arrays by
    column; where it makes something else its batches are of one source, and smaller.
    """
    announce(reader, plan, grant.slice)
    indices = plan.indices(grant.slice)
    for skip in range(0, len(indices), batch_size):
        part = indices[skip : skip + batch_size]
        mixed = None if part.sources is None else _mixed(reader, part)
        if mixed is not None:
            yield [(grant.slice.skip + skip, grant.slice.skip + skip + len(part))], mixed
            continue
        for first, after in _same_source(part):
            name, position = part[first][0], grant.slice.skip + skip + first
            yield from _read(reader, name, part.numbers[first:after], position, on_bad)


def _mixed(reader: AbstractDataReader, part: Indices) -> Any | None:
    """Return the records of several sources as one batch; None where one cannot be read, or batches of this
    reader not be put together."""
    assert part.sources is not None
    by_source = np.argsort(part.sources, kind="stable")
    edges = np.flatnonzero(np.diff(part.sources[by_source])) + 1
    batches = []
    for places in np.split(by_source, edges):
        name, numbers = part.names[int(part.sources[places[0]])], part.numbers[places]
        try:
            batches.append(reader.read_batch(name, numbers))
        except Exception as exc:
            if is_source_error(exc):
                raise name_record(exc, name, int(numbers[0])) from exc
            return None  # whoever reads it alone is told which record it is
    return _joined(batches, np.argsort(by_source))


def _joined(batches: list[Any], order: IndexArray) -> Any | None:
    first = batches[0]
    if all(isinstance(batch, dict) and batch.keys() == first.keys() for batch in batches):
        columns = {name: _joined([batch[name] for batch in batches], order) for name in first}
        return None if any(column is None for column in columns.values()) else columns
    if all(type(batch) is np.ndarray for batch in batches):
        kinds = {(batch.dtype, batch.shape[1:]) for batch in batches}
        return np.concatenate(batches)[order] if len(kinds) == 1 else None
    return None


def _same_source(indices: Indices) -> Iterator[tuple[int, int]]:
    """The longest runs of one source."""
    if indices.sources is None:
        yield 0, len(indices)
        return
    edges = [0, *(np.flatnonzero(np.diff(indices.sources)) + 1).tolist(), len(indices)]
    yield from pairwise(edges)


def _read(
    reader: AbstractDataReader, name: str, numbers: IndexArray, position: int, on_bad: OnBad
) -> Iterator[tuple[Runs, Any]]:
    try:
        batch = reader.read_batch(name, numbers)
    except Exception as exc:
        if is_source_error(exc):  # to try its records one by one would be no better
            raise name_record(exc, name, int(numbers[0])) from exc
        good = _readable(reader, name, numbers, position, on_bad)
        if good.any():
            runs = [(position + int(at), position + int(at) + 1) for at in np.flatnonzero(good)]
            yield runs, reader.read_batch(name, numbers[good])
        return
    yield [(position, position + len(numbers))], batch


def _readable(
    reader: AbstractDataReader, name: str, numbers: IndexArray, position: int, on_bad: OnBad
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    good = np.zeros(len(numbers), dtype=bool)
    for at, number in enumerate(numbers.tolist()):
        try:
            reader.read_batch(name, numbers[at : at + 1])
        except Exception as exc:  # noqa: BLE001  as above
            on_bad(position + at, name_record(exc, name, number))
        else:
            good[at] = True
    return good
