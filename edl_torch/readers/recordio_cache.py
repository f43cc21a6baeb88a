"""The chunks that were used last, bounded in bytes.

It must not know what a chunk holds or where it is read.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import NoReturn

from edl_torch.errors import DataFormatError
from edl_torch.readers.recordio_chunk import Chunk


class ChunkCache:
    """Chunks by key; the last one is kept whatever its size.

    A chunk that is damaged is remembered too: each of its records is asked for when bad records are set
    aside, and it is read once. Threads may share a cache, and a forked process goes on with its copy.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._kept: OrderedDict[int, Chunk] = OrderedDict()
        self._damaged: dict[int, str] = {}
        self._bytes = 0
        self._latest = -1
        self._lock, self._pid = Lock(), os.getpid()

    def get(self, key: int) -> Chunk | None:
        """The chunk, if it is kept."""
        chunk = self._kept.get(key)
        if chunk is not None and key != self._latest:
            self._latest = key
            self._touch(key)
        return chunk

    def put(self, key: int, read: Callable[[], Chunk]) -> Chunk:
        """`read()`, kept. Raises what it raises, DataFormatError again without reading again."""
        if key in self._damaged:
            self._refuse(self._damaged[key])
        try:
            chunk = read()
        except DataFormatError as exc:
            self._damaged[key] = str(exc)
            raise
        with self._own_lock():
            if key not in self._kept:
                self._kept[key] = chunk
                self._bytes += chunk.nbytes
            self._latest = key
            while self._bytes > self._limit and len(self._kept) > 1:
                _, oldest = self._kept.popitem(last=False)
                self._bytes -= oldest.nbytes
        return chunk

    def _own_lock(self) -> Lock:
        """In a forked process a new one: the old one may be held by a thread that stayed behind."""
        if self._pid != os.getpid():
            self._lock, self._pid = Lock(), os.getpid()
            self._bytes = sum(chunk.nbytes for chunk in self._kept.values())
        return self._lock

    def _touch(self, key: int) -> None:
        try:
            self._kept.move_to_end(key)
        except KeyError:  # another thread has just thrown it out
            return

    def _refuse(self, why: str) -> NoReturn:
        raise DataFormatError(why)

    @property
    def nbytes(self) -> int:
        """About what is held."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._kept)
