"""Reads a span record by record, past those that cannot be read, and tells how far it came.

It runs in a process of its own or in the caller's; it must not know which.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from edl_torch.checking.findings import Finding, Kind, found, joined
from edl_torch.checking.spans import Span
from edl_torch.errors import BadRecord, SourceChanged
from edl_torch.readers.base import AbstractDataReader
from edl_torch.readers.error_classification import is_source_error, name_record
from edl_torch.shard import Shard, Task, TaskType

_TELL_EVERY_S = 0.2
_LOOK_EVERY = 32  # records


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """All records of the span below `at` are read; `findings` are new ones among them."""

    at: int
    findings: tuple[Finding, ...] = ()


class SpanReader:
    """Reads with one reader and tells `tell`, some times a second."""

    def __init__(self, reader: AbstractDataReader, mode: TaskType, tell: Callable[[Told], object]) -> None:
        self._reader = reader
        self._mode = mode
        self._tell = tell
        self._found: list[Finding] = []
        self._next = 0.0

    def read(self, span: Span) -> None:
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
