"""Which records are read by which call: long runs of a source for all of them, single ones for a sample.

It must not know who reads them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from edl_torch.errors import InvalidArgument
from edl_torch.shard import IndexArray, Source

_SPANS_PER_WORKER = 16  # so that the last ones end at about the same time
_LEAST, _MOST = 256, 1 << 20  # records


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Records `start … end - 1` of a source.

    `careful`: a process died in it, so the next one says before each record that it is at it. `deaths`: how
    many have died.
    """

    name: str
    start: int
    end: int
    careful: bool = False
    deaths: int = 0


def all_records(sources: Sequence[Source], workers: int) -> Iterator[Span]:
    """Every record once."""
    total = sum(source.count for source in sources)
    length = min(max(total // (_SPANS_PER_WORKER * max(1, workers)), _LEAST), _MOST)
    for source in sources:
        last = source.start + source.count
        for start in range(source.start, last, length):
            yield Span(name=source.name, start=start, end=min(start + length, last))


def a_sample(
    sources: Sequence[Source], limit: int, drawn: Collection[tuple[str, int]] = ()
) -> Iterator[Span]:
    """`limit` records, one of each of as many equal parts of the dataset, the same each time; and `drawn`."""
    if limit < 1:
        raise InvalidArgument(f"limit={limit}: expected 1 or more records")
    total = sum(source.count for source in sources)
    if limit >= total:
        yield from all_records(sources, 1)
        return
    yield from (Span(name=name, start=number, end=number + 1) for name, number in drawn)
    there = set(drawn)
    parts = np.arange(limit, dtype=np.float64) + np.random.default_rng(0).random(limit)
    positions = np.minimum((parts * (total / limit)).astype(np.int64), total - 1)
    for name, number in named(sources, np.unique(positions)):
        if (name, number) not in there:
            yield Span(name=name, start=number, end=number + 1)


def spread(sources: Sequence[Source], count: int) -> list[tuple[str, int]]:
    """At most `count` records as (name, number), evenly over the dataset."""
    total = sum(source.count for source in sources)
    count = min(count, total)
    return list(named(sources, (np.arange(count) * total + total // 2) // max(1, count)))


def named(sources: Sequence[Source], positions: IndexArray) -> Iterator[tuple[str, int]]:
    """Source and record number of each position of the dataset."""
    ends = np.fromiter(accumulate(source.count for source in sources), np.int64, len(sources))
    for position, place in zip(
        positions.tolist(), np.searchsorted(ends, positions, "right").tolist(), strict=True
    ):
        source = sources[place]
        yield source.name, source.start + position - int(ends[place]) + source.count
