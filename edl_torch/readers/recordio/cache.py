"""The chunks that were used last, bounded in bytes.

It must not know what a chunk holds or where it is read.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from edl_torch.errors import DataFormatError
from edl_torch.readers.recordio.chunk import Chunk


class ChunkCache:
    """Chunks by key; the last one is kept whatever its size.

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
