"""What is wrong with data: findings by kind and record, a bounded number of them, and who looks for them.

Files that are missing or twice in a reader's list are found by their names; spans of records are read.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from typing import Any, Literal, cast

import numpy as np

from edl_torch.errors import BadRecord, InvalidArgument, SourceChanged
from edl_torch.readers.base import AbstractDataReader
from edl_torch.readers.error_classification import is_source_error, name_record
from edl_torch.shard import IndexArray, Shard, Source, Task, TaskType

Kind = Literal["unreadable", "missing", "duplicate"]
KINDS: tuple[Kind, ...] = ("unreadable", "missing", "duplicate")

_MOST_KEPT = 10_000
_LONGEST_REASON = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Flaw:
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


def found(kind: Kind, name: str, start: int, reason: str, *, entry: bool = False) -> Flaw:
    """A finding of one record, or entry; the reason becomes one line of bounded length."""
    line = " ".join(reason.split())
    if len(line) > _LONGEST_REASON:
        line = line[:_LONGEST_REASON] + " …"
    return Flaw(kind=kind, name=name, start=start, end=start + 1, reason=line, entries=entry)


def joined(findings: Iterable[Flaw]) -> Iterator[Flaw]:
    """Neighbours with one reason as one finding."""
    last: Flaw | None = None
    for item in findings:
        if last is not None and item == replace(last, start=last.end, end=item.end):
            last = replace(last, end=item.end)
            continue
        if last is not None:
            yield last
        last = item
    if last is not None:
        yield last


class Flaws:
    """Counts all findings and keeps the first ten thousand."""

    def __init__(self) -> None:
        self.counts: Counter[Kind] = Counter()  # records
        self._kept: list[Flaw] = []

    def add(self, findings: Iterable[Flaw]) -> None:
        """Take findings, in any order."""
        for item in findings:
            self.counts[item.kind] += len(item)
            if len(self._kept) < _MOST_KEPT:
                self._kept.append(item)

    def __bool__(self) -> bool:
        return bool(self.counts)

    def kept(self, kind: Kind) -> list[Flaw]:
        """Those of one kind that were kept, by source and record."""
        of_kind = (item for item in self._kept if item.kind == kind)
        return list(joined(sorted(of_kind, key=lambda item: (item.name, item.start))))

    def __repr__(self) -> str:
        return f"<Flaws {dict(self.counts)} kept={len(self._kept)}>"


def listed_files(reader: AbstractDataReader) -> Iterable[str]:
    """The paths, by entry of the reader's list; none for readers without such a list."""
    files = getattr(reader, "listed_files", None)
    return () if files is None else cast(Iterable[str], files())


def has_list(reader: AbstractDataReader) -> bool:
    """Whether the reader lists files."""
    return next(iter(listed_files(reader)), None) is not None


def missing(reader: AbstractDataReader, name: str) -> Iterator[Flaw]:
    """Entries whose file is not there."""
    for entry, path in enumerate(listed_files(reader)):
        if not os.path.exists(path):
            yield found("missing", name, entry, f"the file '{path}' is missing", entry=True)


def duplicates(reader: AbstractDataReader, name: str) -> Iterator[Flaw]:
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


# Spans of records -------------------------------------------------------------------------------------

_SPANS_PER_WORKER = 16  # so that the last ones end at about the same time
_LEAST, _MOST = 256, 1 << 20  # records
_TELL_EVERY_S = 0.2
_LOOK_EVERY = 32  # records


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSpan:
    """Records `start … end - 1` of a source.

    `careful`: a process died in it, so the next one says before each record that it is at it. `deaths`: how
    many have died.
    """

    name: str
    start: int
    end: int
    careful: bool = False
    deaths: int = 0


def all_records(sources: Sequence[Source], workers: int) -> Iterator[RecordSpan]:
    """Every record once."""
    total = sum(source.count for source in sources)
    length = min(max(total // (_SPANS_PER_WORKER * max(1, workers)), _LEAST), _MOST)
    for source in sources:
        last = source.start + source.count
        for start in range(source.start, last, length):
            yield RecordSpan(name=source.name, start=start, end=min(start + length, last))


def a_sample(
    sources: Sequence[Source], limit: int, drawn: Collection[tuple[str, int]] = ()
) -> Iterator[RecordSpan]:
    """`limit` records, one of each of as many equal parts of the dataset, the same each time; and `drawn`."""
    if limit < 1:
        raise InvalidArgument(f"limit={limit}: expected 1 or more records")
    total = sum(source.count for source in sources)
    if limit >= total:
        yield from all_records(sources, 1)
        return
    yield from (RecordSpan(name=name, start=number, end=number + 1) for name, number in drawn)
    there = set(drawn)
    parts = np.arange(limit, dtype=np.float64) + np.random.default_rng(0).random(limit)
    positions = np.minimum((parts * (total / limit)).astype(np.int64), total - 1)
    for name, number in named(sources, np.unique(positions)):
        if (name, number) not in there:
            yield RecordSpan(name=name, start=number, end=number + 1)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """All records of the span below `at` are read; `findings` are new ones among them."""

    at: int
    findings: tuple[Flaw, ...] = ()


class SpanReader:
    """Reads with one reader and tells `tell`, some times a second."""

    def __init__(self, reader: AbstractDataReader, mode: TaskType, tell: Callable[[Told], object]) -> None:
        self._reader = reader
        self._mode = mode
        self._tell = tell
        self._found: list[Flaw] = []
        self._next = 0.0

    def read(self, span: RecordSpan) -> None:
        """Read all of it. Raises ReaderError where any other record would have failed as well."""
        at = span.start
        self._next = time.monotonic() + _TELL_EVERY_S
        while at < span.end:
            try:
                for _ in islice(self._records(span.name, at, span.end), span.end - at):
                    at += 1
                    if span.careful or at % _LOOK_EVERY == 0:
                        self._note(at, at_once=span.careful)
            except SourceChanged as exc:  # the rest of it would be asked for in vain, record by record
                lost = found("unreadable", span.name, at, reason_of(exc))
                self._found.append(replace(lost, end=span.end))
                break
            except Exception as exc:
                if is_source_error(exc):
                    raise name_record(exc, span.name, at) from exc
                self._found.append(found(kind_of(exc), span.name, at, reason_of(exc)))
            else:
                if at == span.end:
                    break
                self._found.append(found("unreadable", span.name, at, self._too_few()))
            at += 1
            self._note(at, at_once=span.careful)
        self._note(span.end, at_once=True)

    def _records(self, name: str, start: int, end: int) -> Any:
        return self._reader.read_records(Task(shard=Shard(name=name, start=start, end=end), type=self._mode))

    def _too_few(self) -> str:
        return (
            f"{type(self._reader).__name__}.read_records() ended before it, "
            "although create_shards() promised the record"
        )

    def _note(self, at: int, *, at_once: bool) -> None:
        if not at_once and time.monotonic() < self._next:
            return
        self._tell(Told(at=at, findings=tuple(joined(self._found))))
        self._found.clear()
        self._next = time.monotonic() + _TELL_EVERY_S


def kind_of(error: BaseException) -> Kind:
    """Whether it is a missing file, or anything else."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, FileNotFoundError):
            return "missing"
        cause = cause.__cause__
    return "unreadable"


def reason_of(error: BaseException) -> str:
    """The error as text; readers' own errors are sentences already."""
    return str(error) if isinstance(error, BadRecord) else f"{type(error).__name__}: {error}"
