"""What is wrong with data: findings by kind and record, a bounded number of them.

Those of a reader's list of files are found here, by their names; it must not open a file, nor know how others
were found.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, cast

import numpy as np

from edl_torch.readers.base import AbstractDataReader

Kind = Literal["unreadable", "missing", "duplicate"]
KINDS: tuple[Kind, ...] = ("unreadable", "missing", "duplicate")

_MOST_KEPT = 10_000
_LONGEST_REASON = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Records `start … end - 1` of the source `name`, or `entries` of the reader's list of files."""

    kind: Kind
    name: str
    start: int
    end: int
    reason: str
    entries: bool = False

    def __len__(self) -> int:
        return self.end - self.start

    def __str__(self) -> str:
        one, many = ("entry", "entries") if self.entries else ("record", "records")
        which = f"{one} {self.start}" if len(self) == 1 else f"{many} {self.start} to {self.end - 1}"
        return f"{which} of {self.name!r}: {self.reason}"


def found(kind: Kind, name: str, start: int, reason: str, *, entry: bool = False) -> Finding:
    """A finding of one record, or entry; the reason becomes one line of bounded length."""
    line = " ".join(reason.split())
    if len(line) > _LONGEST_REASON:
        line = line[:_LONGEST_REASON] + " …"
    return Finding(kind=kind, name=name, start=start, end=start + 1, reason=line, entries=entry)


def joined(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Neighbours with one reason as one finding."""
    last: Finding | None = None
    for item in findings:
        if last is not None and item == replace(last, start=last.end, end=item.end):
            last = replace(last, end=item.end)
            continue
        if last is not None:
            yield last
        last = item
    if last is not None:
        yield last


class Findings:
    """Counts all findings and keeps the first ten thousand."""

    def __init__(self) -> None:
        self.counts: Counter[Kind] = Counter()  # records
        self._kept: list[Finding] = []

    def add(self, findings: Iterable[Finding]) -> None:
        """Take findings, in any order."""
        for item in findings:
            self.counts[item.kind] += len(item)
            if len(self._kept) < _MOST_KEPT:
                self._kept.append(item)

    def __bool__(self) -> bool:
        return bool(self.counts)

    def kept(self, kind: Kind) -> list[Finding]:
        """Those of one kind that were kept, by source and record."""
        of_kind = (item for item in self._kept if item.kind == kind)
        return list(joined(sorted(of_kind, key=lambda item: (item.name, item.start))))

    def __repr__(self) -> str:
        return f"<Findings {dict(self.counts)} kept={len(self._kept)}>"


def listed_files(reader: AbstractDataReader) -> Iterable[str]:
    """The paths, by entry of the reader's list; none for readers without such a list."""
    files = getattr(reader, "listed_files", None)
    return () if files is None else cast(Iterable[str], files())


def has_list(reader: AbstractDataReader) -> bool:
    """Whether the reader lists files."""
    return next(iter(listed_files(reader)), None) is not None


def missing(reader: AbstractDataReader, name: str) -> Iterator[Finding]:
    """Entries whose file is not there."""
    for entry, path in enumerate(listed_files(reader)):
        if not os.path.exists(path):
            yield found("missing", name, entry, f"the file '{path}' is missing", entry=True)


def duplicates(reader: AbstractDataReader, name: str) -> Iterator[Finding]:
    """Entries whose file an earlier entry names already. Eight bytes of memory for each entry."""
    hashes = np.fromiter((hash(os.path.normpath(path)) for path in listed_files(reader)), np.int64)
    ordered = np.sort(hashes)
    repeated = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    if not len(repeated):
        return
    suspects = np.isin(hashes, repeated)
    first: dict[str, int] = {}
    for entry, path in enumerate(listed_files(reader)):
        if not suspects[entry]:
            continue
        path = os.path.normpath(path)
        if (earlier := first.setdefault(path, entry)) != entry:
            reason = f"the file '{path}' is listed again, first as entry {earlier}"
            yield found("duplicate", name, entry, reason, entry=True)
