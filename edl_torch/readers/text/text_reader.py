"""Text files of any size, a record a line: unpacked, indexed, and read by byte range, for CSV files too.

It holds no line: they are found through an index in a memory-mapped file. It must not know what a line means.
"""

from __future__ import annotations

import codecs
import gzip
import io
import logging
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from edl_torch.errors import BadRecord, DataFormatError, InvalidArgument, ReaderError
from edl_torch.fingerprint import Part
from edl_torch.readers.shared.files import FileStamp, Read, file_lock, read_range, readable
from edl_torch.readers.shared.finder import Finder, Paths
from edl_torch.readers.shared.looks import arguments, blocks, looked
from edl_torch.readers.shared.mapped import Array, MappedArrays, cached_index, index_place, write_arrays
from edl_torch.readers.shared.sources import (
    REQUEST_BYTES,
    FilesReader,
    ObjectStamp,
    ObjectStream,
    Sources,
    can_be_kept,
    each_looked_at,
    look_at,
    read_once,
    whole_digest,
)
from edl_torch.readers.storage import Storage, StorageOptions, is_elsewhere
from edl_torch.readers.text.csv_values import check_encoding
from edl_torch.readers.text.row_index import (
    CHUNK_BYTES,
    Positions,
    RowIndex,
    RowRules,
    build_row_index,
    scanning_threads,
)
from edl_torch.shard import Task
from edl_torch.system.whole_files import whole_file

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
_GZIP, _HEAD_BYTES = b"\x1f\x8b\x08", 1 << 16
_LATEST_NS = 1 << 60  # a time that file systems can keep
_THREADS_AWAY = 16  # files in stores that are indexed at once

log = logging.getLogger("edl_torch.readers")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFile:
    """One file: the name it was given, its records, and the file that is read (of a packed one, its copy).

    `looks` is a digest of its size, some blocks, and where one record in 64 begins. The first `skips`
    entries of the index are no records.
    """

    name: str
    index: RowIndex
    stamp: FileStamp
    looks: str
    count: int
    skips: int = 0

    def is_same(self, read: Read) -> bool:
        """Whether what is read is what was indexed, as far as `looks` tell."""
        return blocks(self.stamp.size, read, self.index.layout) == self.looks

    def span(self, start: int, end: int) -> tuple[int, int]:
        """The bytes from … to before … that have the records `start … end - 1`, of which there is one."""
        return self.index.span(start + self.skips, end + self.skips)

    def looked_at(self, storage: Storage, *, whole: bool) -> str:
        """What `looks` would be now, or of the `whole` file."""
        return digest_of(self.stamp, self.index, storage, whole=whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexing:
    """How files are indexed.

    Args:
        storage: Where objects are, indexes are kept and packed files unpacked.
        rules: What a record is.
        chunk_bytes: The piece of a file that one thread indexes at a time.
        binary: Whether records may hold any bytes.
    """

    storage: Storage
    rules: RowRules
    chunk_bytes: int = CHUNK_BYTES
    binary: bool = False

    def files(self, names: Sequence[str]) -> dict[str, TextFile]:
        """Index files, or find their indexes; those in stores several at once. Raises DataFormatError, with
        the name, for the first one that cannot be used, and what the storage raises."""
        if not any(map(is_elsewhere, names)):  # each is indexed by several threads
            return {name: self.file(name) for name in names}
        return dict(zip(names, each_looked_at(names, self.file, away=_THREADS_AWAY), strict=True))

    def file(self, name: str) -> TextFile:
        """Index a file, or find its index."""
        with readable(f"'{name}'", "check its permissions"):
            stamp = look_at(name, self.storage, "a text file")
            head = self._head(stamp)
            if head.startswith(_GZIP):
                stamp = unpacked_copy(stamp, self.storage)
                head = self._head(stamp)
            if not self.binary:
                _refuse_foreign(name, head)
            arrays = self._kept_index(name, stamp)
            index = RowIndex(arrays)
            if isinstance(stamp, ObjectStamp):
                looks = arrays["looks"].tobytes().hex()
            else:
                looks = digest_of(stamp, index, self.storage)
        return TextFile(name=name, index=index, stamp=stamp, looks=looks, count=index.count)

    def _head(self, stamp: FileStamp) -> bytes:
        return read_once(stamp, self.storage)(0, min(stamp.size, _HEAD_BYTES))

    def _kept_index(self, name: str, stamp: FileStamp) -> Mapping[str, Array]:
        rules = self.rules
        options = f"{rules.quote} {rules.delimiter} {rules.cr_ends_line} {rules.keeps_empty}"
        build = partial(self._index, name, stamp)
        if not can_be_kept(stamp):
            return MappedArrays.spill(build(), label=_KIND)
        return cached_index(stamp, _KIND, build, options=options, storage=self.storage)

    def _index(self, name: str, stamp: FileStamp) -> Mapping[str, Array]:
        """The arrays of its index; of an object with a digest of what a fingerprint looks at."""
        sources = Sources(self.storage, keep=2 * scanning_threads() + 3)
        is_object = isinstance(stamp, ObjectStamp)
        chunk = min(self.chunk_bytes, REQUEST_BYTES) if is_object else self.chunk_bytes  # many are in memory
        sources.expect([(stamp, 0, stamp.size)], piece=chunk)
        arrays = build_row_index(sources.reading(stamp), stamp.size, name, self.rules, chunk_bytes=chunk)
        if is_object:
            looks = digest_of(stamp, RowIndex(arrays), self.storage)
            arrays["looks"] = np.frombuffer(bytes.fromhex(looks), np.uint8)
        return arrays


def digest_of(stamp: FileStamp, index: RowIndex, storage: Storage, *, whole: bool = False) -> str:
    """A digest of a file's size, some of its blocks or the `whole`, and where one record in 64 begins."""

    def look(read: Read) -> str:
        return blocks(stamp.size, read, index.layout, whole=whole)

    if isinstance(stamp, ObjectStamp):
        return looked(storage, stamp.object, look)
    with open(stamp.path, "rb", buffering=0) as file:  # as it is now
        return look(partial(read_range, file.fileno()))


def _refuse_foreign(name: str, head: bytes) -> None:
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


def unpacked_copy(packed: FileStamp, storage: Storage) -> FileStamp:
    """The plain copy of a gzip file beside its index, made now if it is not there.

    It is made by one process of the machine, streamed and checked (length and CRC of each member, as gzip has
    them). It has the packed file's modification time, so that every process that makes one makes the same. A
    newer packed file's copy replaces the old one. Raises DataFormatError for a file that is cut short or
    damaged, and ReaderError where there is no room.
    """
    if not can_be_kept(packed):  # what is in it tells it from others, then
        tag = int(whole_digest(packed.path, storage)[:15], 16)
        packed = replace(packed, mtime_ns=tag, ctime_ns=tag)
    place = index_place(packed, _UNPACKED, "", storage.index_dir).with_suffix(".data")
    note = place.with_suffix(".note")
    header = asdict(packed)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with file_lock(place):
            if not _is_there(place, note, header):
                _unpack(packed, place, storage)
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


def _unpack(packed: FileStamp, place: Path, storage: Storage) -> None:
    log.info("path=%s is unpacked once to '%s'", packed.path, place)
    opened: Any = packed.path
    if isinstance(packed, ObjectStamp):
        opened = io.BufferedReader(ObjectStream(storage, packed.object))
    with whole_file(place, mtime_ns=packed.mtime_ns % _LATEST_NS) as target:
        with gzip.open(opened, "rb") as source:
            shutil.copyfileobj(source, target, 1 << 20)
        packed.check()


class TextFilesReader(FilesReader[TextFile]):
    """A reader of text files: what is looked at in them, and the bytes of several records at once."""

    @property
    def reads_blocks(self) -> bool:  # type: ignore[override]
        """Whether files are in a store, where one record costs as much as those that lie with it."""
        return any(isinstance(file.stamp, ObjectStamp) for file in self._files.values())

    def _named(self) -> str:
        """The first names, for messages."""
        return ", ".join(map(repr, self.files[:3]))

    def _line(self, file: TextFile, number: int) -> str:
        """Where a record is, for messages: file and line."""
        return f"'{file.name}' line {file.index.line(number + file.skips, self._read(file))}"

    def _gather(self, file: TextFile, numbers: Positions) -> Gathered:
        """Records in the order asked for, read in as few ranges as is sensible."""
        starts, ends = file.index.spans(numbers + file.skips)
        if not len(numbers) or (starts[1:] == ends[:-1]).all():
            begin, end = (int(starts[0]), int(ends[-1])) if len(numbers) else (0, 0)
            return Gathered(self._read(file)(begin, end), starts - begin, ends - begin, in_order=True)
        order = np.argsort(starts, kind="stable")
        first, after = starts[order], ends[order]
        group_begins = np.concatenate(([True], first[1:] - after[:-1] > _GAP_BYTES))
        begins = first[group_begins]
        finishes = after[np.append(np.flatnonzero(group_begins)[1:] - 1, len(order) - 1)]
        spans = list(zip(begins.tolist(), finishes.tolist(), strict=True))
        if isinstance(file.stamp, ObjectStamp):
            pieces = self._bytes.each(file.stamp, spans)
        else:
            pieces = (self._read(file)(*span) for span in spans)
        shifts = begins - np.concatenate(([0], np.cumsum(finishes - begins)[:-1]))
        shift = np.empty_like(starts)
        shift[order] = shifts[np.cumsum(group_begins) - 1]
        return Gathered(b"".join(pieces), starts - shift, ends - shift, in_order=False)

    def _blocks(self, task: Task) -> Iterator[tuple[TextFile, int, Gathered]]:
        """Yield the file, the number of the first record, and the records of a task, some at a time."""
        start, end = task.start, task.end
        file = self._file(task.shard_name, start, end)
        self.expect([(file.name, start, end)], in_order=True)
        while start < end:
            numbers = np.arange(start, min(start + _BLOCK_ROWS, end))
            starts, ends = file.index.spans(numbers + file.skips)
            fits = max(int(np.searchsorted(ends, starts[0] + _BLOCK_BYTES, side="right")), 1)
            yield file, start, self._gather(file, numbers[:fits])
            start += fits


class TextReader(TextFilesReader):
    """Records are the lines of text files, as `str` without their line ends.

    Each file is a source, named by its path as given. Lines are indexed once, in parallel, and the index is
    kept; gzip files are unpacked once beside it. A byte order mark and a missing last line end do not matter.

    Args:
        data: A file, a folder with `.txt`, `.jsonl` or `.ndjson` files (or these and `.gz`), a glob, a range,
            a manifest, or a list of those; paths or URLs.
        encoding: UTF-8, or another in which line ends are bytes of their own.
        errors: What becomes of bytes that are not of the encoding, as for `open`; "strict" makes the record
            bad.
        as_bytes: Records are `bytes`, whatever the encoding.
        skip_empty: Lines without anything in them are no records.
        universal_newlines: LF, CRLF and CR end a line, as for `open(path)`; False: only LF does, and a CR is
            data.
        chunk_bytes: The piece of a file that one thread indexes at a time.
        store: Options of the store, and where indexes are kept: see `StorageOptions`.

    Raises DataFormatError, naming the file, for data that cannot be used; in reading, BadRecord with file
    and line for a line that is not of the encoding, and SourceChanged when a file changes.
    """

    finder = Finder(suffixes=(".txt", ".jsonl", ".ndjson"))

    def __init__(
        self,
        data: Paths,
        *,
        encoding: str = "utf-8",
        errors: str = "strict",
        as_bytes: bool = False,
        skip_empty: bool = False,
        universal_newlines: bool = True,
        chunk_bytes: int = CHUNK_BYTES,
        **store: Unpack[StorageOptions],
    ) -> None:
        super().__init__(Storage.of(self, store))
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
        with self._indexing() as apart:
            indexing = Indexing(storage=apart, rules=rules, chunk_bytes=chunk_bytes, binary=as_bytes)
            self._files = indexing.files(self.finder.files(data, apart))
        if not self.count:
            raise DataFormatError(f"{self._named()}: there is no line")

    def _made_by(self) -> list[Part]:
        """How lines become text."""
        text = "" if self._as_bytes else (codecs.lookup(self._encoding).name, self._errors)
        rules = self._as_bytes, text, self._line_ends
        # As by default it is no entry: tokens of before have none.
        return [] if rules == (False, ("utf-8", "strict"), b"\r\n") else arguments("encoding", *rules)

    def read_records(self, task: Task) -> Iterator[str | bytes]:
        """Yield the lines. Raises ReaderError for another source or a range outside of it."""
        for file, start, block in self._blocks(task):
            for number, line in enumerate(block.rows(), start):
                yield self._record(file, number, line)

    def read_record(self, name: str, index: int) -> str | bytes:
        """Line `index`. Raises ReaderError for another source or a number outside of it."""
        number = int(index)
        file = self._file(name, number, number + 1)
        return self._record(file, number, self._read(file)(*file.span(number, number + 1)))

    def _record(self, file: TextFile, number: int, line: bytes) -> str | bytes:
        data = line.rstrip(self._line_ends)
        if self._as_bytes:
            return data
        try:
            return data.decode(self._encoding, self._errors)
        except UnicodeDecodeError as exc:
            raise BadRecord(
                f"{self._line(file, number)} is not {self._encoding}: {exc.reason} at its byte "
                f"{exc.start}; name the file's own with encoding=, or pass errors='replace'"
            ) from exc
