"""Reads a dataset through its reader, as a job would, and reports what the job would trip over.

It must not know command lines, or how a report is shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

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
    has_list,
    missing,
)
from edl_torch.checking.processes import Workers
from edl_torch.core.registration import validate_spec
from edl_torch.errors import InvalidArgument
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
