"""RecordIO files written: one file, or any reader's records as a file or a folder; whole or not at all.

It must not know command lines, or how records become bytes.
"""

from __future__ import annotations

import os
import shutil
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from types import TracebackType
from typing import Any, BinaryIO, TypeVar

from edl_torch.errors import BadRecord, InvalidArgument, OutputError, ReaderError
from edl_torch.readers.base import AbstractDataReader, name_record, reader_sources
from edl_torch.readers.recordio.format import dialect_named
from edl_torch.shard import Shard, Source, Task, TaskType
from edl_torch.system.whole_files import part_name, sync

DEFAULT_CHUNK_BYTES = 1 << 18
_LARGEST_CHUNK = 1 << 30  # with the lengths: what a reader decompresses at once
_LARGEST_RECORD = (1 << 32) - 5

_T = TypeVar("_T")


class RecordIOWriter:
    """Writes records to a temporary file beside `path`, which takes its name when the `with` block ends well.

    An exception in the block, or a process that ends before it does, leaves nothing; readers of `path` see
    the old file or the new one.

    Args:
        path: The file; an existing one is replaced at the end.
        dialect: "python" for pyrecordio, "go" for wangkuiyi/recordio; `RecordIODataReader` reads both.
        compressor: "none", "snappy" or "gzip".
        max_chunk_bytes: A chunk is written when the next record would make its records, without their
            lengths, larger than this; a record that is larger by itself has a chunk of its own. Small chunks
            are quick to reach at random, large ones compress better. The Go library refuses to *write* such
            a record, and reads it.

    Raises OutputError, and leaves nothing, where the file cannot be written: no space, no permission.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        dialect: str = "python",
        compressor: str = "snappy",
        max_chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    ) -> None:
        if isinstance(max_chunk_bytes, bool) or not isinstance(max_chunk_bytes, int) or max_chunk_bytes < 1:
            raise InvalidArgument(f"max_chunk_bytes={max_chunk_bytes!r}: expected a number of bytes from 1")
        self.path = os.fspath(path)
        self.count = 0
        self._dialect = dialect_named(dialect)
        self._compressor = self._dialect.compressor(compressor)
        self._max_chunk_bytes = min(max_chunk_bytes, _LARGEST_CHUNK)
        self._pieces: list[bytes] = []
        self._bytes = 0  # of the records in the chunk, without their lengths
        folder, name = os.path.split(self.path)
        self._temporary = os.path.join(folder, part_name(name))
        opened: list[BinaryIO] = []
        # Before the file is made: an interrupt may come right after it.
        self._leftover = weakref.finalize(self, _discard, opened, self._temporary, os.getpid())
        opened.append(self._guard(lambda: open(self._temporary, "xb")))  # noqa: SIM115
        self._file = opened[0]

    def write(self, record: bytes | bytearray | memoryview) -> None:
        """Append a record, which may be empty. Raises OutputError; InvalidArgument for what is not bytes."""
        if not isinstance(record, bytes):
            if not isinstance(record, bytearray | memoryview):
                raise InvalidArgument(f"a record is bytes, not {type(record).__name__}: encode it first")
            record = bytes(record)
        if not self._leftover.alive:
            raise OutputError(f"'{self.path}' is closed")
        size = len(record)
        if size > _LARGEST_RECORD:
            raise InvalidArgument(
                f"a record of {size:,} bytes does not fit RecordIO, whose sizes have 32 bits"
            )
        records = len(self._pieces) // 2
        if self._bytes + size > self._max_chunk_bytes or self._bytes + size + 4 * records > _LARGEST_CHUNK:
            self._flush()
        self._pieces += (size.to_bytes(4, "little"), record)
        self._bytes += size
        self.count += 1

    def close(self) -> None:
        """Write the last chunk, sync, and give the file its name. Raises OutputError."""
        if not self._leftover.alive:
            return
        self._flush()
        self._guard(self._commit)
        self._leftover.detach()

    def abort(self) -> None:
        """Leave nothing."""
        self._pieces.clear()
        self._leftover()

    def __enter__(self) -> RecordIOWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def __repr__(self) -> str:
        state = "open" if self._leftover.alive else "closed"
        return f"<RecordIOWriter {self.path!r} {self._dialect.name} records={self.count} {state}>"

    def _flush(self) -> None:
        if self._pieces:
            payload = b"".join(self._pieces)
            chunk = self._dialect.chunk(len(self._pieces) // 2, payload, self._compressor)
            self._guard(lambda: self._file.write(chunk))
            self._pieces.clear()
            self._bytes = 0

    def _commit(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._temporary, self.path)
        _sync_names(os.path.dirname(self.path) or ".")

    def _guard(self, do: Callable[[], _T]) -> _T:
        try:
            return do()
        except OSError as exc:
            self.abort()
            raise not_written(self.path, exc) from exc


def not_written(path: str, exc: OSError) -> OutputError:
    """Return the error for a file or folder that cannot be written."""
    folder = os.path.dirname(path) or "."
    remedy = "choose another path"
    if not os.path.isdir(folder):
        remedy = f"make the folder '{folder}' first"
    return OutputError(f"'{path}' cannot be written: {exc.strerror}; nothing of it was left: {remedy}")


def _sync_names(folder: str) -> None:
    with suppress(OSError):  # not every file system can
        sync(folder)


def _discard(opened: list[BinaryIO], temporary: str, owner: int) -> None:
    """Only the process that made the file removes it: a forked child that ends must not."""
    if os.getpid() != owner:
        return
    with suppress(OSError):  # what is still in the buffer may not fit on the disk either
        for file in opened:
            file.close()
    with suppress(OSError):
        os.unlink(temporary)


_TASK = 4096  # records: readers are made for ranges of about a shard


def convert(
    reader: AbstractDataReader,
    target: str | os.PathLike[str],
    encode: Callable[[Any], Any],
    *,
    mode: TaskType = TaskType.TRAINING,
    records_per_file: int | None = None,
    writer: Callable[[str], RecordIOWriter] = RecordIOWriter,
    progress: Callable[[int, int], object] = lambda records, nbytes: None,
) -> list[str]:
    """Write all records, in the order of the reader's sources; returns the files.

    With `records_per_file` the target is a folder of `part-00000-of-00003.recordio` and so on, which appears
    under its name when all is in it; else it is one file. `writer` makes the writer of a path. `progress` is
    told how many records and bytes of them are written.

    Raises OutputError for a target that exists or cannot be written, BadRecord, with its name, for a record
    that cannot be read or encoded, SourceUnavailable where its source is to blame, ReaderError for a reader
    that gives too few or too many. Then, and when it is interrupted, nothing is left.
    """
    path = os.fspath(target).rstrip("/") or "/"
    if records_per_file is not None and records_per_file < 1:
        raise InvalidArgument(f"records_per_file={records_per_file}: expected a positive number")
    if os.path.lexists(path):
        raise OutputError(f"'{path}' exists: remove it, or choose another target")
    sources = reader_sources(reader, mode)
    records = _noting(_encoded(reader, sources, mode, encode), progress)
    if records_per_file is None:
        _fill(writer(path), records)
        return [path]
    total = sum(source.count for source in sources)
    parts = max(1, -(-total // records_per_file))
    names = [f"part-{number:05d}-of-{parts:05d}.recordio" for number in range(parts)]
    with _folder(path) as folder:
        for name in names:
            _fill(writer(os.path.join(folder, name)), islice(records, records_per_file))
    return [os.path.join(path, name) for name in names]


def _fill(writer: RecordIOWriter, records: Iterable[bytes]) -> None:
    with writer:
        for record in records:
            writer.write(record)


def _encoded(
    reader: AbstractDataReader, sources: Iterable[Source], mode: TaskType, encode: Callable[[Any], Any]
) -> Iterator[bytes]:
    for source in sources:
        for index, record in _records(reader, source, mode):
            try:
                encoded = encode(record)
            except Exception as exc:
                what = str(exc) if isinstance(exc, BadRecord) else f"{type(exc).__name__}: {exc}"
                raise BadRecord(f"record {index} of {source.name!r}: {what}") from exc
            if not isinstance(encoded, bytes | bytearray | memoryview):
                what = f"the encoder made {type(encoded).__name__} of it, expected bytes"
                raise BadRecord(f"record {index} of {source.name!r}: {what}")
            yield bytes(encoded)


def _records(reader: AbstractDataReader, source: Source, mode: TaskType) -> Iterator[tuple[int, Any]]:
    """Number and record. A reader that ends early, or does not end, is not taken at its word."""
    last = source.start + source.count
    for start in range(source.start, last, _TASK):
        end, index = min(start + _TASK, last), start
        task = Task(shard=Shard(name=source.name, start=start, end=end), type=mode)
        try:
            for record in reader.read_records(task):
                if index == end:
                    index += 1
                    break
                yield index, record
                index += 1
        except Exception as exc:
            raise name_record(exc, source.name, index) from exc
        if index > end:
            raise ReaderError(f"{type(reader).__name__} gave more records than were asked for")
        if index < end:
            raise ReaderError(
                f"{type(reader).__name__} ended {end - index} record(s) early, at record {index} of "
                f"{source.name!r}: create_shards() promised them"
            )


def _noting(records: Iterator[bytes], progress: Callable[[int, int], object]) -> Iterator[bytes]:
    nbytes = 0
    for count, record in enumerate(records, 1):
        yield record
        nbytes += len(record)
        progress(count, nbytes)


@contextmanager
def _folder(path: str) -> Iterator[str]:
    """A folder that becomes `path` at the end, or goes with all that is in it."""
    parent, name = os.path.split(path)
    temporary = os.path.join(parent, part_name(name))
    try:
        os.mkdir(temporary)
        yield temporary
        _sync_names(temporary)
        os.rename(temporary, path)
        _sync_names(parent or ".")
    except OSError as exc:
        raise not_written(path, exc) from exc
    except OutputError as exc:  # of a file in it, by the folder's name of now
        raise OutputError(str(exc).replace(temporary, path)) from exc
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
