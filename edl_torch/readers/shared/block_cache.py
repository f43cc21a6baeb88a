"""Decoded blocks of data, the last ones used, bounded in bytes; it must not know what is in a block."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Generic, TypeVar

from edl_torch.errors import BadRecord, DataFormatError, ReaderError

B = TypeVar("B")


class BlockCache(Generic[B]):
    """Blocks by key; the last one and those that are expected are kept whatever their size.

    A damaged block is remembered too: when bad records are set aside each of its records is asked for, and it
    is read once. There is no lock that a forked process could find held: threads that share a cache may at
    worst read a block twice.

    Args:
        limit_bytes: How much is kept, but for those; each block says its `nbytes`.
        dropped: Told of each block that is let go.
    """

    def __init__(self, limit_bytes: int, dropped: Callable[[B], Any] = lambda _: None) -> None:
        self._limit = limit_bytes
        self._dropped = dropped
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()
        self._expected: frozenset[Hashable] = frozenset()
        self._damaged: dict[Hashable, tuple[type[ReaderError], str]] = {}
        self._latest: Hashable = None
        self.nbytes = 0

    def get(self, key: Hashable) -> B | None:
        """Return the block, if it is kept."""
        block: B | None = self._kept.get(key)
        if block is not None and key != self._latest:
            self._latest = key
            try:
                self._kept.move_to_end(key)
            except KeyError:  # another thread has just thrown it out
                return block
        return block

    def put(self, key: Hashable, read: Callable[[], B]) -> B:
        """Return `read()`, kept. Raises what it raises: of a damaged block again, without reading again."""
        if key in self._damaged:
            kind, said = self._damaged[key]
            raise kind(said)
        try:
            block: Any = read()
        except (BadRecord, DataFormatError) as exc:
            self._damaged[key] = type(exc), str(exc)
            raise
        before = self._kept.pop(key, None)
        self.nbytes += block.nbytes - (0 if before is None else before.nbytes)
        self._kept[key] = block
        self._latest = key
        if self.nbytes > self._limit:
            self._drop_oldest()
        return block  # type: ignore[no-any-return]

    def _drop_oldest(self) -> None:
        for key in [key for key in list(self._kept) if key != self._latest and key not in self._expected]:
            if self.nbytes <= self._limit:
                break
            oldest = self._kept.pop(key, None)
            if oldest is not None:
                self.nbytes -= oldest.nbytes
                self._dropped(oldest)

    def expect(self, keys: Iterable[Hashable]) -> None:
        """Keep these, once they are read, until others are expected."""
        self._expected = frozenset(keys)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._kept

    def __len__(self) -> int:
        return len(self._kept)
