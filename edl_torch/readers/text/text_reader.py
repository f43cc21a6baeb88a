"""Text files of any size, a record a line.

It holds no line: they are found through an index in a memory-mapped file. It must not know what a line means.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from edl_torch.errors import BadRecord, DataFormatError, InvalidArgument
from edl_torch.fingerprint import Fingerprint
from edl_torch.readers.base import AbstractDataReader, check_range, no_source
from edl_torch.readers.shared.finder import Finder, Paths
from edl_torch.readers.text.csv_values import check_encoding
from edl_torch.readers.text.row_index import CHUNK_BYTES, RowRules
from edl_torch.readers.text.sources import (
    SourceFiles,
    TextSource,
    open_source,
)
from edl_torch.shard import Task, TaskType

_FINDER = Finder(suffixes=(".txt", ".jsonl", ".ndjson"))


class TextReader(AbstractDataReader):
    """Records are the lines of text files, as `str` without their line ends.

    Each file is a source, named by its path as given. Lines are indexed once, in parallel, and the index is
    kept; gzip files are unpacked once beside it. A byte order mark and a missing last line end do not matter.

    Args:
        data: A file, a folder with `.txt`, `.jsonl` or `.ndjson` files (or these and `.gz`), a glob, or a
            list of those.
        encoding: UTF-8, or another in which line ends are bytes of their own.
        errors: What becomes of bytes that are not of the encoding, as for `open`; "strict" makes the record
            bad.
        as_bytes: Records are `bytes`, whatever the encoding.
        skip_empty: Lines without anything in them are no records.
        universal_newlines: LF, CRLF and CR end a line, as for `open(path)`; False: only LF does, and a CR is
            data.
        index_dir: Where indexes are kept; see `edl_torch.readers.shared.index_cache.cached_index`.
        chunk_bytes: The piece of a file that one thread indexes at a time.

    Raises DataFormatError, naming the file, for data that cannot be used; in reading, BadRecord with file
    and line for a line that is not of the encoding, and SourceChanged when a file changes.
    """

    def __init__(
        self,
        data: Paths,
        *,
        encoding: str = "utf-8",
        errors: str = "strict",
        as_bytes: bool = False,
        skip_empty: bool = False,
        universal_newlines: bool = True,
        index_dir: str | os.PathLike[str] | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        super().__init__()
        check_encoding(encoding, ())
        try:
            b"\xff".decode("ascii", errors)
        except LookupError as exc:
            raise InvalidArgument(f"errors={errors!r} is not known to Python; as for open()") from exc
        except UnicodeDecodeError:
            pass  # strict
        self._encoding, self._errors, self._as_bytes = encoding, errors, as_bytes
        self._line_ends = b"\r\n" if universal_newlines else b"\n"
        rules = RowRules(cr_ends_line=universal_newlines, keeps_empty=not skip_empty)
        self._files = SourceFiles(
            open_source(path, rules, index_dir=index_dir, chunk_bytes=chunk_bytes, binary=as_bytes)
            for path in _FINDER.files(data)
        )
        if not any(self.create_shards().values()):
            raise DataFormatError(f"{self._files.names()}: there is no line")

    def create_shards(self, mode: TaskType = TaskType.TRAINING) -> dict[str, int]:
        """A source for each file, the same ones for every mode."""
        return {name: source.index.count for name, source in self._files.sources.items()}

    def fingerprint(self, *, whole: bool = False) -> Fingerprint:
        """Of each file its size, some blocks, and where its records begin."""
        return self._files.fingerprint(whole=whole)

    def read_records(self, task: Task) -> Iterator[str | bytes]:
        """Yield the lines. Raises ReaderError for another source or a range outside of it."""
        source = self._source(task.shard_name, task.start, task.end)
        for start, block in self._files.blocks(source, task.start, task.end):
            for number, line in enumerate(block.rows(), start):
                yield self._record(source, number, line)

    def read_record(self, name: str, index: int) -> str | bytes:
        """Line `index`. Raises ReaderError for another source or a number outside of it."""
        number = int(index)
        source = self._source(name, number, number + 1)
        return self._record(source, number, self._files.read(source, *source.index.span(number)))

    @classmethod
    def arguments_for(cls, data: str, mode: TaskType, given: Mapping[str, Any]) -> dict[str, Any] | None:
        """Constructor arguments for a text file by its suffix (or with `.gz`), or a folder of those."""
        return {"data": data} if _FINDER.is_all_of(data) else None

    def _source(self, name: str, start: int, end: int) -> TextSource:
        source = self._files.sources.get(name)
        if source is None:
            raise no_source(name, self._files.sources, self)
        check_range(start, end, 0, source.index.count, name)
        return source

    def _record(self, source: TextSource, number: int, line: bytes) -> str | bytes:
        data = line.rstrip(self._line_ends)
        if self._as_bytes:
            return data
        try:
            return data.decode(self._encoding, self._errors)
        except UnicodeDecodeError as exc:
            raise BadRecord(
                f"{self._files.line(source, number)} is not {self._encoding}: {exc.reason} at its byte "
                f"{exc.start}; name the file's own with encoding=, or pass errors='replace'"
            ) from exc

    def __repr__(self) -> str:
        counts = self.create_shards().values()
        return f"<TextReader files={len(counts)} records={sum(counts)}>"
