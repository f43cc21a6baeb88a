"""Many strings as two arrays: the index of a dataset with millions of files stays small and pickles fast.

It must not know what the strings mean.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

import numpy as np

# Python's names of undecodable files and JSON's lone surrogates both survive this codec.
_CODEC = "utf-8", "surrogatepass"


class StringTable:
    """An immutable sequence of `str`, held as one UTF-8 blob and int64 bounds (8 bytes an entry)."""

    __slots__ = ("_blob", "_bounds")

    def __init__(self, strings: Iterable[str] = ()) -> None:
        blob, bounds = bytearray(), array("q", [0])
        for string in strings:
            blob += string.encode(*_CODEC)
            bounds.append(len(blob))
        self._blob = bytes(blob)
        self._bounds = np.array(bounds, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < len(self):
            raise IndexError(f"entry {index} of a table of {len(self)}")
        return self._blob[self._bounds[index] : self._bounds[index + 1]].decode(*_CODEC)

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))

    @property
    def nbytes(self) -> int:
        """Bytes held, which is also about the size of its pickle."""
        return len(self._blob) + self._bounds.nbytes

    def __repr__(self) -> str:
        return f"<StringTable n={len(self)} nbytes={self.nbytes}>"
