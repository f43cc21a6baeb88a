"""What a reader keeps for its next records: the chunks that were used last, and open files.

It must not know what a chunk or a file holds.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable

from edl_torch.errors import DataFormatError
from edl_torch.readers.recordio.chunk import Chunk
from edl_torch.readers.recordio.scan import DataFile
from edl_torch.readers.shared.index_cache import FileStamp

_MOST_FILES = 64  # open: a process may have some 1,000 descriptors, and several readers


class ChunkCache:
    """Chunks by key, bounded in bytes; the last one is kept whatever its size.

    A damaged chunk is remembered too: when bad records are set aside each of its records is asked for, and it
    is read once. There is no lock that a forked process could find held: threads that share a cache may at
    worst read a chunk twice.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._kept: OrderedDict[int, Chunk] = OrderedDict()
        self._damaged: dict[int, str] = {}
        self._bytes = 0
        self._latest = -1

    def get(self, key: int) -> Chunk | None:
        """The chunk, if it is kept."""
        chunk = self._kept.get(key)
        if chunk is not None and key != self._latest:
            self._latest = key
            try:
                self._kept.move_to_end(key)
            except KeyError:  # another thread has just thrown it out
                return chunk
        return chunk

    def put(self, key: int, read: Callable[[], Chunk]) -> Chunk:
        """`read()`, kept. Raises what it raises; a DataFormatError again, without reading again."""
        if key in self._damaged:
            raise DataFormatError(self._damaged[key])
        try:
            chunk = read()
        except DataFormatError as exc:
            self._damaged[key] = str(exc)
            raise
        before = self._kept.pop(key, None)
        self._bytes += chunk.nbytes - (0 if before is None else before.nbytes)
        self._kept[key] = chunk
        self._latest = key
        while self._bytes > self._limit and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= oldest.nbytes
        return chunk

    @property
    def nbytes(self) -> int:
        """About what is held."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._kept)


class OpenFiles:
    """Opens files on first use. One that is closed here stays open for whoever still reads from it."""

    def __init__(self, limit: int = _MOST_FILES) -> None:
        self._limit = limit
        self._open: OrderedDict[str, DataFile] = OrderedDict()

    def get(self, path: str, size: int, mtime_ns: int) -> DataFile:
        """The file, which must be as large and as old as when it was indexed. Raises SourceChanged."""
        file = self._open.get(path)
        if file is None:
            FileStamp(path=os.path.realpath(path), size=size, mtime_ns=mtime_ns).check()
            try:
                file = DataFile(path)
            except OSError as exc:
                raise DataFormatError(f"'{path}' cannot be opened: {exc.strerror}; check the path") from exc
            self._open[path] = file
            if len(self._open) > self._limit:
                self._open.popitem(last=False)
        return file
