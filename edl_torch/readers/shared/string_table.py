"""Many strings as two arrays: the index of a dataset with millions of files stays small and pickles fast.

It must not know what the strings mean.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from edl_torch.readers.shared.mapped import Array, shared

# Python's names of undecodable files and JSON's lone surrogates both survive this codec.
_CODEC = "utf-8", "surrogatepass"


class StringTable:
    """An immutable sequence of `str`, held as one UTF-8 blob and int64 bounds (8 bytes an entry).

    A large one is mapped from a file that all processes of the trainer share.
    """

    __slots__ = ("_arrays", "_blob", "_bounds")

    def __init__(self, strings: Iterable[str] = ()) -> None:
        blob, bounds = bytearray(), array("q", [0])
        for string in strings:
            blob += string.encode(*_CODEC)
            bounds.append(len(blob))
        arrays: dict[str, Array] = {
            "blob": np.frombuffer(blob, np.uint8),
            "bounds": np.frombuffer(bounds, np.int64),
        }
        self._hold(shared(arrays, "strings"))

    def _hold(self, arrays: Mapping[str, Array]) -> None:
        self._arrays = arrays
        self._blob = memoryview(arrays["blob"])  # type: ignore[arg-type]
        self._bounds = arrays["bounds"]

    def __reduce__(self) -> tuple[object, ...]:
        return _held, (self._arrays,)

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < len(self):
            raise IndexError(f"entry {index} of a table of {len(self)}")
        return str(self._blob[self._bounds[index] : self._bounds[index + 1]], *_CODEC)

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))

    @property
    def nbytes(self) -> int:
        """Bytes held, in memory or in the file."""
        return len(self._blob) + self._bounds.nbytes

    def __repr__(self) -> str:
        return f"<StringTable n={len(self)} nbytes={self.nbytes}>"


def _held(arrays: Mapping[str, Array]) -> StringTable:
    table = StringTable.__new__(StringTable)
    table._hold(arrays)
    return table
