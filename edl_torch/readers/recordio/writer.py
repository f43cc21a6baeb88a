"""`RecordIOWriter`: one RecordIO file, whole or not at all.

It must not know where records come from or what they mean.
"""

from __future__ import annotations

import os
import uuid
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import BinaryIO, TypeVar

from edl_torch.errors import InvalidArgument, OutputError
from edl_torch.readers.recordio.format import dialect_named

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
        sync_folder(os.path.dirname(self.path) or ".")

    def _guard(self, do: Callable[[], _T]) -> _T:
        try:
            return do()
        except OSError as exc:
            self.abort()
            raise OutputError(
                f"'{self.path}' cannot be written: {exc.strerror}; nothing of it was left"
            ) from exc


def sync_folder(folder: str) -> None:
    """Bring a folder's names to the disk, where the file system can."""
    number = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            os.fsync(number)
    finally:
        os.close(number)


def part_name(name: str) -> str:
    """A name for what is not finished, which no reader of the folder takes for data."""
    return f".{name[:100]}.{uuid.uuid4().hex}.part"


def _discard(opened: list[BinaryIO], temporary: str, owner: int) -> None:
    """Only the process that made the file removes it: a forked child that ends must not."""
    if os.getpid() != owner:
        return
    with suppress(OSError):  # what is still in the buffer may not fit on the disk either
        for file in opened:
            file.close()
    with suppress(OSError):
        os.unlink(temporary)
