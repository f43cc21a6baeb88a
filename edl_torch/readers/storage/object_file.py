"""An object as a file that is read at any place, for libraries that want one."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator

from edl_torch.readers.storage.drivers import Object
from edl_torch.readers.storage.storage import Storage

Piece = tuple[int, bytes]  # the place of its first byte, and its bytes
_GAP = 1 << 16  # bytes: ranges that lie so close are one request
_REQUEST = 8 << 20  # bytes: a longer range is several


class ObjectFile(io.RawIOBase):
    """Reads from the pieces that are `kept`, and what is in none of them from the store."""

    def __init__(self, storage: Storage, one: Object) -> None:
        self._storage, self._one, self._at = storage, one, 0
        self.kept: list[Piece] = []

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._one.size}[whence]
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        """So many bytes, fewer at the end. Raises SourceChanged and SourceUnavailable."""
        start = min(self._at, self._one.size)
        self._at = self._one.size if size is None or size < 0 else min(start + size, self._one.size)
        return self.range(start, self._at)

    def range(self, start: int, end: int) -> bytes:
        """The bytes from … to before …."""
        return next(self.each([(start, end)]))

    def each(self, ranges: Iterable[tuple[int, int]]) -> Iterator[bytes]:
        """Yield ranges in this order; of those that are not kept many requests are under way."""
        known = [(start, end, self._kept(start, end)) for start, end in ranges]
        missing = self._storage.read_many(
            (self._one, at, end - at) for at, end, data in known if data is None
        )
        for _, _, data in known:
            yield next(missing) if data is None else data

    def _kept(self, start: int, end: int) -> bytes | None:
        for first, data in self.kept:
            if first <= start and end <= first + len(data):
                return data[start - first : end - first]
        return None

    def pieces(self, ranges: Iterable[tuple[int, int]]) -> list[Piece]:
        """Ask for ranges, all at once; those that lie together are joined."""
        joined = list(_joined(ranges))
        parts = self._storage.read_many(request for each in joined for request in self._cut(*each))
        return [(each[0], b"".join(next(parts) for _ in self._cut(*each))) for each in joined]

    def requests_of(self, ranges: Iterable[tuple[int, int]]) -> list[tuple[Object, int, int]]:
        """What `pieces` asks for."""
        return [request for each in _joined(ranges) for request in self._cut(*each)]

    def _cut(self, start: int, end: int) -> list[tuple[Object, int, int]]:
        return [(self._one, at, min(_REQUEST, end - at)) for at in range(start, end, _REQUEST)]


def _joined(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    first, last = -1, -1
    for start, end in sorted(ranges):
        if first >= 0 and start <= last + _GAP:
            last = max(last, end)
            continue
        if first >= 0:
            yield first, last
        first, last = start, end
    if first >= 0:
        yield first, last
