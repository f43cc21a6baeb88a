"""Records that could not be read, in the order in which that was told, and how much of a token they take.

Each epoch that meets a bad record adds an outcome of its own; how many records are bad is another number.
Of a mixture a record is kept once, with the passes that met it: thousands may meet that of a small component.

Knows no leases; it keeps what it is told.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from edl_torch.core.changes import Mark, unrecorded
from edl_torch.core.codec import Row, from_row, row_of
from edl_torch.core.mixture import mixed_name
from edl_torch.shard import DatasetSpec, Indices

_RUN_BYTES = 40  # of a token, that a run of passes takes at most


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantinedRecord:
    """A record that could not be read in one epoch, with its place in the order and in its storage.

    Of a mixture `passes` over the component met it: of each run of them the first, and the one after its
    last. Then its place in the order is that of the first time.
    """

    epoch: int
    shard: int
    position: int
    name: str
    index: int
    reason: str
    passes: tuple[int, ...] = ()

    @property
    def times(self) -> int:
        """How many outcomes it is."""
        return sum(self.passes[1::2]) - sum(self.passes[::2]) if self.passes else 1

    def was_met_in(self, number: int) -> bool:
        """Whether a pass over its component met it."""
        return bisect_right(self.passes, number) % 2 == 1  # behind the beginning of a run, before its end

    def runs(self) -> Iterator[tuple[int, int]]:
        """Return the runs of passes that met it."""
        return zip(self.passes[::2], self.passes[1::2], strict=True)

    def with_passes_of(self, other: QuarantinedRecord) -> QuarantinedRecord:
        """Return it with the passes that met it then, none of which is among its own."""
        joined: list[int] = []
        for first, after in sorted([*self.runs(), *other.runs()]):
            if joined and first == joined[-1]:
                joined[-1] = after
            else:
                joined += first, after
        return replace(self, passes=tuple(joined))

    @property
    def cause(self) -> str:
        """The reason without the record's name, which a reader's error begins with."""
        return self.reason.removeprefix(f"record {self.index} of {self.name!r}: ")

    def __str__(self) -> str:
        return f"record {self.index} of {self.name!r}: {self.cause}"


def quarantine_row(bad: QuarantinedRecord) -> Row:
    """Return a bad record as journals and tokens have it: its passes stand at the end."""
    *row, passes = row_of(bad)
    return (*row, *passes)


def quarantined(row: Sequence[Any]) -> QuarantinedRecord:
    """Return the record of a row. Raises ValueError or TypeError for what is none."""
    bad = from_row(QuarantinedRecord, [*row[:6], tuple(row[6:])])
    edges = bad.passes
    if (
        len(edges) % 2
        or not all(type(edge) is int for edge in edges)
        or any(a >= b for a, b in pairwise(edges))
    ):
        raise ValueError("a bad record's passes are no runs of such")
    return bad


def moved(
    records: Iterable[QuarantinedRecord], before: Mapping[str, str], now: Mapping[str, str]
) -> tuple[QuarantinedRecord, ...]:
    """Return bad records of a mixture by their names once its data lie elsewhere.

    The folders of its components were `before`, and are `now`; one that is none of these has ''.
    """
    found = []
    for bad in records:
        component, _, source = bad.name.partition(":")
        below = source.removeprefix(before.get(component, ""))
        found.append(replace(bad, name=mixed_name(component, now.get(component, "") + below)))
    return tuple(found)


def places_of(records: Iterable[QuarantinedRecord], indices: Indices) -> list[int]:
    """Return the places in a mixture's `indices` at which passes met bad records, by these names."""
    bad = {(each.name, each.index): each for each in records}
    names = {name for name, _ in bad}
    assert indices.passes is not None
    may_be = np.isin(indices.numbers, [index for _, index in bad])
    if indices.sources is not None:
        sources = [place for place, name in enumerate(indices.names) if name in names]
        may_be &= np.isin(indices.sources, sources)
    found = []
    for place in np.flatnonzero(may_be).tolist():
        record = bad.get(indices[place])
        if record is not None and record.was_met_in(int(indices.passes[place])):
            found.append(place)
    return found


def token_bytes(records: Iterable[QuarantinedRecord]) -> int:
    """Return the bytes that these records add to a token; in a message each takes up to 64 bytes more."""
    rows = list(map(quarantine_row, records))
    # Of all at once: a comma stands behind each but the last, and the list has two brackets.
    return len(json.dumps(rows, separators=(",", ":"))) - 1 if rows else 0


class Quarantine:
    """Outcomes, and the records by number; and their size: a token that holds them all must fit into one
    message."""

    __slots__ = ("_bad", "_mark", "_outcomes", "bytes", "records")

    def __init__(self, mark: Mark = unrecorded) -> None:
        self.bytes = 0
        self._mark = mark
        self._outcomes = 0
        self.records: list[QuarantinedRecord] = []
        # The number of its last one: a record that several epochs met counts once.
        self._bad: dict[tuple[str, int], int] = {}

    def __len__(self) -> int:
        """How many outcomes there are."""
        return self._outcomes

    def __iter__(self) -> Iterator[QuarantinedRecord]:
        return iter(self.records)

    def add(self, bad: QuarantinedRecord) -> None:
        self._outcomes += bad.times
        number = self._known(bad)
        if number is None:
            number = self._bad[bad.name, bad.index] = len(self.records)
            self.records.append(bad)
        else:
            before = self.records[number]
            self.records[number] = bad = before.with_passes_of(bad)
            self.bytes -= token_bytes((before,))
        self._mark("bad", number)
        self.bytes += token_bytes((bad,))

    def with_more(self, new: Iterable[QuarantinedRecord]) -> tuple[int, int]:
        """Return how many records and bytes there would be with these, too."""
        new = list(new)
        rows = [bad for bad in new if self._known(bad) is None]
        runs = _RUN_BYTES * (len(new) - len(rows))
        return len(self.records) + len(rows), self.bytes + token_bytes(rows) + runs

    def _known(self, bad: QuarantinedRecord) -> int | None:
        """The number of the record of which another pass over its component met this one, if any."""
        return self._bad.get((bad.name, bad.index)) if bad.passes else None

    def replace(self, records: Iterable[QuarantinedRecord]) -> None:
        """Keep these records only."""
        before = len(self.records)
        self.records = list(records)
        self._outcomes = sum([bad.times for bad in self.records])
        self._bad = {(bad.name, bad.index): number for number, bad in enumerate(self.records)}
        self.bytes = token_bytes(self.records)
        for number in range(max(before, len(self.records))):
            self._mark("bad", number)

    def failure(self, spec: DatasetSpec, on: str = "") -> str:
        """Return why a job fails that has these, '' where it does not. `on` says whose they are."""
        bad, allowed = len(self._bad), spec.max_bad_records
        if bad <= allowed:
            return ""
        return (
            f"dataset {spec.name!r} has {bad} bad record(s){on}, max_bad_records is {allowed}; the last is "
            f"{self.records[-1]}. Repair the data, or allow more with max_bad_records"
        )

    def first(self, number: int) -> tuple[QuarantinedRecord, ...]:
        return tuple(self.records[:number])

    def within(self, size: int) -> tuple[QuarantinedRecord, ...]:
        """Return as many of the first records as add no more than so many bytes to a token."""
        if self.bytes <= size:
            return tuple(self.records)
        shown = []
        for bad in self.records:
            size -= token_bytes((bad,))
            if size < 0:
                break
            shown.append(bad)
        return tuple(shown)

    def __repr__(self) -> str:
        return f"<Quarantine n={len(self)} bytes={self.bytes}>"
