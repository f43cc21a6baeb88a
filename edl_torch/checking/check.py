"""Reads a dataset through its reader, as a job would, and reports what the job would trip over.

It must not know command lines, or how a report is shown.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from edl_torch.checking.findings import (
    Flaw,
    Flaws,
    Kind,
    RecordSpan,
    SpanReader,
    Told,
    a_sample,
    all_records,
    duplicates,
    found,
    has_list,
    missing,
)
from edl_torch.core.registration import validate_spec
from edl_torch.errors import EdlError, InvalidArgument, ReaderError
from edl_torch.readers.base import AbstractDataReader, reader_fingerprint
from edl_torch.shard import DatasetSpec, Source, TaskType


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
    lists = limit is not None and has_list(reader)  # then missing files are looked for in the whole list
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


class _Job:
    """Adds up what is told."""

    def __init__(self, progress: Callable[[int], object], *, missing_as: Kind) -> None:
        self.read = 0
        self.findings = Flaws()
        self._progress = progress
        self._missing_as = missing_as

    def tell(self, records: int, told: Told) -> None:
        self.read += records
        self.findings.add(map(self._counted, told.findings))
        self._progress(self.read)

    def _counted(self, finding: Flaw) -> Flaw:
        """A missing file that a sample has met is counted in the list, where all of them are."""
        return replace(finding, kind=self._missing_as) if finding.kind == "missing" else finding


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


# Worker processes ----------------------------------------------------------------------------------------

# Worker processes that read spans; one that dies costs the record that killed it, and is replaced.
#
# It must not know what a finding means, or where spans come from.

_MOST_DEATHS = 16  # in one span
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
        stop = span.end if deaths > _MOST_DEATHS else at + 1
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
