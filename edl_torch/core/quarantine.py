"""Records that could not be read, in the order in which that was told, and how much of a token they take.

Each epoch that meets a bad record adds an outcome of its own; how many records are bad is another number.

Knows no leases; it keeps what it is told.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from edl_torch.core.changes import Mark, unrecorded
from edl_torch.core.codec import row_maker
from edl_torch.shard import DatasetSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantinedRecord:
    """A record that could not be read in one epoch, with its place in the order and in its storage."""

    epoch: int
    shard: int
    position: int
    name: str
    index: int
    reason: str

    @property
    def cause(self) -> str:
        """The reason without the record's name, which a reader's error begins with."""
        return self.reason.removeprefix(f"record {self.index} of {self.name!r}: ")

    def __str__(self) -> str:
        return f"record {self.index} of {self.name!r}: {self.cause}"


def token_bytes(records: Iterable[QuarantinedRecord]) -> int:
    """Return the bytes that these records add to a token; in a message each takes up to 64 bytes more."""
    rows = list(map(row_maker(QuarantinedRecord), records))
    # Of all at once: a comma stands behind each but the last, and the list has two brackets.
    return len(json.dumps(rows, separators=(",", ":"))) - 1 if rows else 0


class Quarantine:
    """The outcomes by number, and their size: a token that holds them all must fit into one message."""

    __slots__ = ("_bad", "_mark", "_records", "bytes")

    def __init__(self, mark: Mark = unrecorded) -> None:
        self.bytes = 0
        self._mark = mark
        self._records: list[QuarantinedRecord] = []
        self._bad: set[tuple[str, int]] = set()  # one that several epochs met counts once

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[QuarantinedRecord]:
        return iter(self._records)

    def __getitem__(self, number: int) -> QuarantinedRecord:
        return self._records[number]

    def add(self, bad: QuarantinedRecord) -> None:
        """Add a record."""
        self._mark("bad", len(self._records))
        self._records.append(bad)
        self._bad.add((bad.name, bad.index))
        self.bytes += token_bytes((bad,))

    def replace(self, records: Iterable[QuarantinedRecord]) -> None:
        """Keep these records only."""
        before = len(self._records)
        self._records = list(records)
        self._bad = {(bad.name, bad.index) for bad in self._records}
        self.bytes = token_bytes(self._records)
        for number in range(max(before, len(self._records))):
            self._mark("bad", number)

    def failure(self, spec: DatasetSpec, on: str = "") -> str:
        """Return why a job fails that has these, '' where it does not. `on` says whose they are."""
        bad, allowed = len(self._bad), spec.max_bad_records
        if bad <= allowed:
            return ""
        return (
            f"dataset {spec.name!r} has {bad} bad record(s){on}, max_bad_records is {allowed}; the last is "
            f"{self._records[-1]}. Repair the data, or allow more with max_bad_records"
        )

    def first(self, number: int) -> tuple[QuarantinedRecord, ...]:
        """Return so many of the first records."""
        return tuple(self._records[:number])

    def within(self, size: int) -> tuple[QuarantinedRecord, ...]:
        """Return as many of the first records as add no more than so many bytes to a token."""
        if self.bytes <= size:
            return tuple(self._records)
        shown = []
        for bad in self._records:
            size -= token_bytes((bad,))
            if size < 0:
                break
            shown.append(bad)
        return tuple(shown)

    def __repr__(self) -> str:
        return f"<Quarantine n={len(self)} bytes={self.bytes}>"
