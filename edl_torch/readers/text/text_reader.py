"""Text files of any size, a record a line: unpacked, indexed, and read by byte range, for CSV files too.

It holds no line: they are found through an index in a memory-mapped file. It must not know what a line means.
"""

from __future__ import annotations

import gzip
import logging
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from edl_torch.errors import BadRecord, DataFormatError, InvalidArgument, ReaderError
from edl_torch.fingerprint import Fingerprint, Part
from edl_torch.readers.base import AbstractDataReader, check_range, no_source
from edl_torch.readers.shared.files import (
    FileStamp,
    OpenFiles,
    Read,
    file_lock,
    read_range,
    whole_file,
)
from edl_torch.readers.shared.finder import Finder, Paths
from edl_torch.readers.shared.looks import below, blocks, listing
from edl_torch.readers.shared.mapped import MappedArrays, cached_index, index_place, write_arrays
from edl_torch.readers.storage import is_url
from edl_torch.readers.text.csv_values import check_encoding
from edl_torch.readers.text.row_index import (
    CHUNK_BYTES,
    Positions,
    RowIndex,
    RowRules,
    build_row_index,
)
from edl_torch.shard import Task, TaskType

_KIND = "rows1"
_GAP_BYTES = 16 << 10  # what lies between two wanted records is read too if it is less
_BLOCK_ROWS, _BLOCK_BYTES = 4096, 1 << 20  # what a run of records is read in
_FOREIGN = {
    b"PK\x03\x04": "a zip archive",
    b"BZh": "packed with bzip2",
    b"\xfd7zXZ": "packed with xz",
    b"\x28\xb5\x2f\xfd": "packed with zstd",
    b"PAR1": "a Parquet file",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
_UNPACKED = "unpacked1"

log = logging.getLogger("edl_torch.readers")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSource:
    """One file: the name it was given, its records, and the file that is read (of a packed one, its copy).

    `looks` is a digest of its size, some blocks, and where its records begin.
    """

    name: str
    index: RowIndex
    stamp: FileStamp
    looks: str

    def is_same(self, read: Read) -> bool:
        """Whether what is read is what was indexed, as far as `looks` tell."""
        return blocks(self.stamp.size, read, self.index.layout) == self.looks


def open_source(
    name: str,
    rules: RowRules,
    *,
    index_dir: str | os.PathLike[str] | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    binary: bool = False,
) -> TextSource:
    """Index a file, or find its index.

    Raises DataFormatError, with the name, for a file that cannot be used.
    """
    if not os.path.isfile(name):
        what = "is a folder" if os.path.isdir(name) else "is no regular file"
        raise DataFormatError(f"'{name}' {what}: expected a text file")
    try:
        stamp = FileStamp.of(name)
        if is_packed(name):
            stamp = unpacked_copy(stamp, index_dir)
        if not binary:
            _refuse_foreign(name, stamp.path)
        arrays = cached_index(
            stamp,
            _KIND,
            lambda: build_row_index(stamp.path, rules, chunk_bytes=chunk_bytes),
            options=f"{rules.quote} {rules.delimiter} {rules.cr_ends_line} {rules.keeps_empty}",
            index_dir=index_dir,
        )
        index = RowIndex(arrays)
        looks = _digest_of(stamp, index)
    except OSError as exc:
        raise DataFormatError(f"'{name}' cannot be read: {exc.strerror}; check its permissions") from exc
    return TextSource(name=name, index=index, stamp=stamp, looks=looks)


def _digest_of(stamp: FileStamp, index: RowIndex, *, whole: bool = False) -> str:
    with open(stamp.path, "rb", buffering=0) as file:
        return blocks(stamp.size, partial(read_range, file.fileno()), index.layout, whole=whole)


def _refuse_foreign(name: str, path: str) -> None:
    with open(path, "rb") as file:
        head = file.read(1 << 16)
    for magic, what in _FOREIGN.items():
        if head.startswith(magic):
            raise DataFormatError(
                f"'{name}' is {what}, not plain text: convert it to UTF-8 text (or .gz) first"
            )
    if b"\0" in head:
        raise DataFormatError(
            f"'{name}' is no text: it has a NUL byte at byte {head.index(0)} (a binary file, or UTF-16 or "
            "UTF-32: convert it to UTF-8 first)"
        )


class Gathered:
    """Records as places in some bytes; `in_order` where these are the records one after the other."""

    __slots__ = ("_data", "_ends", "_in_order", "_starts")

    def __init__(self, data: bytes, starts: Positions, ends: Positions, *, in_order: bool) -> None:
        self._data, self._starts, self._ends, self._in_order = data, starts, ends, in_order

    def __len__(self) -> int:
        return len(self._starts)

    def rows(self) -> list[bytes]:
        """Each record's bytes with its line end; a file's last line may have none."""
        return list(map(self._data.__getitem__, map(slice, self._starts.tolist(), self._ends.tolist())))

    def joined(self) -> bytes:
        """All of them in one piece, with blank lines between."""
        return self._data if self._in_order else b"\n".join(self.rows())


class SourceFiles:
    """The sources of a reader by name, and their bytes: the files that were read last stay open."""

    def __init__(self, sources: Iterable[TextSource]) -> None:
        self.sources = {source.name: source for source in sources}
        self._open = OpenFiles()

    def fingerprint(self, *, whole: bool, also: Sequence[Part] = ()) -> Fingerprint:
        """Of each file its size, some blocks, and where its records begin; `also` comes before them."""
        each = enumerate(self.sources.values())
        looks = {
            n: _digest_of(source.stamp, source.index, whole=True) if whole else source.looks
            for n, source in each
        }
        return listing("whole" if whole else "sampled", below(list(self.sources)), looks, also)

    def names(self) -> str:
        """The first names, for messages."""
        return ", ".join(map(repr, list(self.sources)[:3]))

    def read(self, source: TextSource, start: int, end: int) -> bytes:
        """Bytes `start … end - 1`. Raises SourceChanged if the file is not the one that was indexed."""
        return self._open.get(source.stamp, source.is_same).read(start, end)

    def line(self, source: TextSource, number: int) -> str:
        """Where a record is, for messages: file and line."""
        line = source.index.line(number, lambda start, end: self.read(source, start, end))
        return f"'{source.name}' line {line}"

    def gather(self, source: TextSource, numbers: Positions) -> Gathered:
        """Records in the order asked for, read in as few ranges as is sensible."""
        starts, ends = source.index.spans(numbers)
        if not len(numbers) or (starts[1:] == ends[:-1]).all():
            begin, end = (int(starts[0]), int(ends[-1])) if len(numbers) else (0, 0)
            return Gathered(self.read(source, begin, end), starts - begin, ends - begin, in_order=True)
        order = np.argsort(starts, kind="stable")
        first, after = starts[order], ends[order]
        group_begins = np.concatenate(([True], first[1:] - after[:-1] > _GAP_BYTES))
        begins = first[group_begins]
        finishes = after[np.append(np.flatnonzero(group_begins)[1:] - 1, len(order) - 1)]
        pieces = [self.read(source, *span) for span in zip(begins.tolist(), finishes.tolist(), strict=True)]
        shifts = begins - np.concatenate(([0], np.cumsum(finishes - begins)[:-1]))
        shift = np.empty_like(starts)
        shift[order] = shifts[np.cumsum(group_begins) - 1]
        return Gathered(b"".join(pieces), starts - shift, ends - shift, in_order=False)

    def blocks(self, source: TextSource, start: int, end: int) -> Iterator[tuple[int, Gathered]]:
        """Yield `(number of the first, records)` for a run of records, some of them at a time."""
        while start < end:
            numbers = np.arange(start, min(start + _BLOCK_ROWS, end))
            ends = source.index.spans(numbers)[1]
            most = source.index.span(start)[0] + _BLOCK_BYTES
            fits = max(int(np.searchsorted(ends, most, side="right")), 1)
            yield start, self.gather(source, numbers[:fits])
            start += fits

    def __reduce__(self) -> tuple[type[SourceFiles], tuple[list[TextSource]]]:
        return type(self), (list(self.sources.values()),)


def is_packed(path: str) -> bool:
    """Whether a file begins as gzip does, whatever its name. Raises OSError."""
    with open(path, "rb") as file:
        return file.read(3) == b"\x1f\x8b\x08"


def unpacked_copy(packed: FileStamp, index_dir: str | os.PathLike[str] | None = None) -> FileStamp:
    """The plain copy of a gzip file beside its index, made now if it is not there.

    It is made by one process of the machine, streamed and checked (length and CRC of each member, as gzip has
    them). It has the packed file's modification time, so that every process that makes one makes the same. A
    newer packed file's copy replaces the old one. Raises DataFormatError for a file that is cut short or
    damaged, and ReaderError where there is no room.
    """
    place = index_place(packed, _UNPACKED, "", index_dir).with_suffix(".data")
    note = place.with_suffix(".note")
    header = asdict(packed)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with file_lock(place):
            if not _is_there(place, note, header):
                _unpack(packed, place)
                made = FileStamp.of(place)  # not every file system keeps a time to the nanosecond
                arrays = {"size": np.array([made.size]), "mtime_ns": np.array([made.mtime_ns])}
                write_arrays(note, arrays, header)
        return FileStamp.of(place)
    except (EOFError, zlib.error, gzip.BadGzipFile) as exc:
        raise DataFormatError(f"'{packed.path}' is no whole gzip file: {exc}; copy it again") from exc
    except OSError as exc:
        raise ReaderError(
            f"'{packed.path}' cannot be unpacked into '{place.parent}': {exc.strerror}; index_dir= or "
            "EDL_INDEX_DIR name another folder with room for the plain data"
        ) from exc


def _is_there(place: Path, note: Path, header: dict[str, object]) -> bool:
    try:
        noted = MappedArrays(note)
        found = FileStamp.of(place)
        made = int(noted["size"][0]), int(noted["mtime_ns"][0])
        return noted.header == header and (found.size, found.mtime_ns) == made
    except (OSError, DataFormatError, KeyError):
        return False


def _unpack(packed: FileStamp, place: Path) -> None:
    log.info("path=%s is unpacked once to '%s'", packed.path, place)
    with whole_file(place, mtime_ns=packed.mtime_ns) as target:
        with gzip.open(packed.path, "rb") as source:
            shutil.copyfileobj(source, target, 1 << 20)
        packed.check()


_FINDER = Finder(suffixes=(".txt", ".jsonl", ".ndjson"))


class TextFilesReader(AbstractDataReader):
    """A reader of text files, of which each is a source; the first `_skips` records of each are none."""

    _files: SourceFiles
    _skips = 0

    def create_shards(self, mode: TaskType = TaskType.TRAINING) -> dict[str, int]:
        """A source for each file, the same ones for every mode."""
        return {
            name: max(source.index.count - self._skips, 0) for name, source in self._files.sources.items()
        }

    def fingerprint(self, *, whole: bool = False) -> Fingerprint:
        """Of each file its size, some blocks, and where its records begin."""
        return self._files.fingerprint(whole=whole)

    def _source(self, name: str, start: int, end: int) -> TextSource:
        source = self._files.sources.get(name)
        if source is None:
            raise no_source(name, self._files.sources, self)
        check_range(start, end, 0, max(source.index.count - self._skips, 0), name)
        return source


class TextReader(TextFilesReader):
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
        index_dir: Where indexes are kept; see `edl_torch.readers.shared.mapped.cached_index`.
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
        return {"data": data} if not is_url(data) and _FINDER.is_all_of(data) else None

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
