"""The files that a reader's list names: those that are not there, and those that it names twice.

For readers with `listed_files()`; it must not open a file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import cast

import numpy as np

from edl_torch.checking.findings import Finding, found
from edl_torch.readers.base import AbstractDataReader


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
