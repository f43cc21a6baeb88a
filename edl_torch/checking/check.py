"""Reads a dataset through its reader, as a job would, and reports what the job would trip over.

Files that are missing or twice in a reader's list are found by their names; spans of records are read. Of the
findings a bounded number is kept. It must not know command lines, or how a report is shown.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Literal, cast

import numpy as np

from edl_torch.core.registration import validate_spec
from edl_torch.errors import BadRecord, EdlError, InvalidArgument, ReaderError, SourceChanged
from edl_torch.readers.base import (
    AbstractDataReader,
    IndexedReader,
    is_source_error,
    name_record,
    reader_fingerprint,
    reader_sources,
)
from edl_torch.readers.storage import is_url
from edl_torch.shard import DatasetSpec, IndexArray, Shard, Source, Task, TaskType


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """What a dataset has, how much of it was read, and what is wrong with it."""

    reader: str
    sources: tuple[Source, ...]
    read: int
    seconds: float
    workers: int
    findings: Flaws
    fingerprint: str

    @property
    def records(self) -> int:
        """Records in all sources."""
        return sum(source.count for source in self.sources)


def validate_sources(sources: tuple[Source, ...], mode: TaskType) -> None:
    """Raises InvalidArgument for sources that no dataset can be made of."""
    validate_spec(DatasetSpec(name=mode.name.lower(), sources=sources, records_per_shard=1, task_type=mode))


def check(
    reader: AbstractDataReader,
    sources: Sequence[Source],
    mode: TaskType = TaskType.TRAINING,
    *,
    workers: int = 0,
    limit: int | None = None,
    drawn: Collection[tuple[str, int]] = (),
    progress: Callable[[int], object] = lambda records: None,
    whole: bool = False,
) -> CheckReport:
    """Read all records, or a sample of `limit` and those to be `drawn`, in so many processes (0: in here).

    `progress` is told the number of records so far. The fingerprint is a job's, or of the `whole` data.
    Raises ReaderError where no record can be read at all, and where a source is out of reach on the way: what
    failed then says nothing of its records.
    """
    if workers < 0:
        raise InvalidArgument(f"workers={workers}: expected 0 or more")
    began = time.monotonic()
    lists = limit is not None and any(
        listed_files(reader)
    )  # then missing files are looked for in the whole list
    job = _Job(progress, missing_as="unreadable" if lists else "missing")
    spans = all_records(sources, workers) if limit is None else a_sample(sources, limit, drawn)
    if workers == 0:
        _read_here(reader, mode, spans, job.tell)
    else:
        with Workers(reader, mode, workers) as processes:
            processes.read(spans, job.tell)
    if lists:
        job.findings.add(missing(reader, sources[0].name))
    job.findings.add(duplicates(reader, sources[0].name))
    return CheckReport(
        reader=type(reader).__name__,
        sources=tuple(sources),
        read=job.read,
        seconds=time.monotonic() - began,
        workers=workers,
        findings=job.findings,
        fingerprint=reader_fingerprint(reader, whole=whole),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What reading all records once asks a store for."""

    requests: int
    nbytes: int


def cost_of_epoch(reader: AbstractDataReader, *, shuffled: bool) -> Cost | None:
    """What an epoch asks a store for, in leases of the usual length; None where the reader cannot say.

    Nothing is asked for: names and sizes are known since the reader was made.
    """
    if not isinstance(reader, IndexedReader):
        leases = [
            (source.name, at, min(at + _LEAST, source.start + source.count))
            for source in reader_sources(reader)
            for at in range(source.start, source.start + source.count, _LEAST)
        ]
        wanted = reader.requests_of(leases)  # a shuffle of blocks asks for the same ones in another order
        return None if wanted is None else _cost_of(wanted)
    order: IndexArray = np.arange(reader.count)
    if shuffled:
        order = np.random.default_rng(0).permutation(reader.count)
    cost = Cost(requests=0, nbytes=0)
    for at in range(0, reader.count, _LEAST):
        wanted = reader.requests(order[at : at + _LEAST].tolist())
        if wanted is None:
            return None
        one = _cost_of(wanted)
        cost = Cost(requests=cost.requests + one.requests, nbytes=cost.nbytes + one.nbytes)
    return cost


def _cost_of(wanted: Sequence[tuple[object, int, int]]) -> Cost:
    lengths = [length for _, _, length in wanted if length]
    return Cost(requests=len(lengths), nbytes=sum(lengths))


class _Job:
    """Adds up what is told."""

    def __init__(self, progress: Callable[[int], object], *, missing_as: Kind) -> None:
        self.read = 0
        self.findings = Flaws()
        self._progress = progress
        self._missing_as = missing_as

    def tell(self, records: int, told: Told) -> None:
        self.read += records
        # A missing file that a sample has met is counted in the list, where all of them are.
        self.findings.add(
            replace(each, kind=self._missing_as) if each.kind == "missing" else each for each in told.findings
        )
        self._progress(self.read)


def _read_here(
    reader: AbstractDataReader,
    mode: TaskType,
    spans: Iterator[RecordSpan],
    tell: Callable[[int, Told], object],
) -> None:
    for span in spans:
        at = span.start

        def heard(told: Told) -> None:
            nonlocal at
            tell(told.at - at, told)
            at = told.at

        SpanReader(reader, mode, heard).read(span)


# Worker processes that read spans; one that dies costs the record that killed it, and is replaced ----------

MOST_DEATHS = 16  # in one span
_JOIN_S = 5.0


class Workers:
    """A context manager of `count` processes, each with a copy of the reader."""

    def __init__(self, reader: AbstractDataReader, mode: TaskType, count: int) -> None:
        self._reader, self._mode = reader, mode
        self._count = count
        self._workers: list[_Worker] = []

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        """No worker outlives this, whatever happened."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.close()
        self._workers.clear()

    def read(self, spans: Iterator[RecordSpan], tell: Callable[[int, Told], object]) -> None:
        """Read every span; `tell(records, told)` hears of `records` more that were read, and of findings.

        Raises ReaderError for a reader that does not come to life in another process, and what ends a worker
        that cannot go on.
        """
        for span in spans:
            self._start(span)
            if len(self._workers) == self._count:
                break
        while self._workers:
            ready = wait([worker.connection for worker in self._workers])
            for worker in [w for w in self._workers if w.connection in ready]:
                self._hear(worker, spans, tell)

    def _start(self, span: RecordSpan) -> None:
        worker = _Worker(self._reader, self._mode)
        self._workers.append(worker)
        worker.give(span)

    def _hear(
        self, worker: _Worker, spans: Iterator[RecordSpan], tell: Callable[[int, Told], object]
    ) -> None:
        try:
            message = worker.connection.recv()
        except (EOFError, ConnectionError):
            following = self._after_death(worker, tell) or next(spans, None)
            self._remove(worker)
            if following is not None:
                self._start(following)
            return
        if isinstance(message, EdlError):
            raise message
        worker.alive = True
        if message is None:
            return
        tell(message.at - worker.at, message)
        worker.at = message.at
        if worker.at == worker.span.end:
            following = next(spans, None)
            if following is None:
                self._remove(worker)
            else:
                worker.give(following)

    def _remove(self, worker: _Worker) -> None:
        worker.process.kill()  # it waits for a span, or is dead
        worker.close()
        self._workers.remove(worker)

    def _after_death(self, worker: _Worker, tell: Callable[[int, Told], object]) -> RecordSpan | None:
        """What is left of its span, to be read with care if it was not."""
        worker.process.join(_JOIN_S)
        if not worker.alive:
            raise ReaderError(
                f"a process that was to read {type(self._reader).__name__} {worker.how_it_died} before it "
                "began: read in this process, with workers=0"
            )
        span, at = worker.span, worker.at
        deaths = span.deaths + 1
        if not span.careful:
            return replace(span, start=at, careful=True, deaths=deaths)
        stop = span.end if deaths > MOST_DEATHS else at + 1
        lost = found("unreadable", span.name, at, f"the process that read it {worker.how_it_died}")
        tell(stop - at, Told(at=stop, findings=(replace(lost, end=stop),)))
        return replace(span, start=stop, careful=False, deaths=deaths) if stop < span.end else None


class _Worker:
    """One process and the span that it reads; all below `at` has been heard of."""

    def __init__(self, reader: AbstractDataReader, mode: TaskType) -> None:
        context = multiprocessing.get_context("spawn")  # threads of this process do not survive a fork
        self.connection, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=_work, args=(theirs, reader, mode), daemon=True)
        self.span = RecordSpan(name="", start=0, end=0)
        self.at = 0
        self.alive = False  # it has said something
        # Ctrl-C reaches the whole group; blocked from the first instruction on, it is the parent's alone.
        resource_tracker.ensure_running()  # first: to start it lets the signal through again
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.process.start()
        except Exception as exc:  # pickling runs the reader's code
            self.connection.close()
            raise ReaderError(
                f"{type(reader).__name__} cannot be sent to another process, which spawned workers need "
                f"({type(exc).__name__}: {exc}): read in this process, with workers=0"
            ) from exc
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()

    def give(self, span: RecordSpan) -> None:
        """Let it read a span."""
        self.span, self.at = span, span.start
        try:
            self.connection.send(span)
        except ConnectionError:
            return  # it died: the next look at the connection says so

    @property
    def how_it_died(self) -> str:
        """For messages, once it is dead."""
        code = self.process.exitcode
        if code is None or code >= 0:
            return f"ended with status {code}"
        return f"was killed by {signal.Signals(-code).name}"

    def close(self) -> None:
        """Wait for the process, and let go of it."""
        self.connection.close()
        self.process.join(_JOIN_S)


def _work(connection: Connection, reader: AbstractDataReader, mode: TaskType) -> None:
    spans = SpanReader(reader, mode, connection.send)
    try:
        connection.send(None)  # the reader has arrived
        while True:
            spans.read(connection.recv())
    except EdlError as exc:
        connection.send(exc)
    except (EOFError, ConnectionError):
        return  # the parent is gone


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


def missing(reader: AbstractDataReader, name: str) -> Iterator[Flaw]:
    """Entries whose file is not there."""
    for entry, path in enumerate(listed_files(reader)):
        if not is_url(path) and not os.path.exists(path):  # of a store reading tells
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
                rest = Task(shard=Shard(name=span.name, start=at, end=span.end), type=self._mode)
                for _ in islice(self._reader.read_records(rest), span.end - at):
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
                ended = (
                    f"{type(self._reader).__name__}.read_records() ended before it, although create_shards() "
                    "promised the record"
                )
                self._found.append(found("unreadable", span.name, at, ended))
            at += 1
            self._note(at, at_once=span.careful)
        self._note(span.end, at_once=True)

    def _note(self, at: int, *, at_once: bool) -> None:
        if not at_once and time.monotonic() < self._next:
            return
        self._tell(Told(at=at, findings=tuple(joined(self._found))))
        self._found.clear()
        self._next = time.monotonic() + _TELL_EVERY_S


def kind_of(error: BaseException) -> Kind:
    """Whether it is a missing file, or anything else."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, FileNotFoundError):
        cause = cause.__cause__
    return "unreadable" if cause is None else "missing"


def reason_of(error: BaseException) -> str:
    """The error as text; readers' own errors are sentences already."""
    return str(error) if isinstance(error, BadRecord) else f"{type(error).__name__}: {error}"
