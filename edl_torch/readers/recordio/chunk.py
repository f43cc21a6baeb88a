"""The records inside decompressed chunks: where each stands, and all of them at once.

It must not know files or compressors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from struct import Struct

import numpy as np

from edl_torch.errors import DataFormatError
from edl_torch.readers.recordio.format import Buffer

Records = tuple[bytes, ...]
Heads = tuple[int, ...]  # the garbage collector looks at no tuple of numbers, and there may be many chunks

_LENGTH = Struct("<I").unpack_from
_SLICED = 50  # records: below, single slices cost less than what `cut` has to prepare
_PIECE_BYTES = 1 << 16  # of records that are made at once
_FIELDS = np.array([f"4x{length}s" for length in range(4096)], dtype=object)


class Chunk:
    """The records of one chunk; record `i` is `payload[heads[i] + 4 : heads[i + 1]]`."""

    __slots__ = ("_heads", "_payload")

    def __init__(self, payload: Buffer, records: int) -> None:
        """Raises DataFormatError unless `payload` is exactly `records` records."""
        self._payload = payload if isinstance(payload, bytes) else bytes(payload)
        self._heads = split(self._payload, records)

    def __len__(self) -> int:
        return len(self._heads) - 1

    def __getitem__(self, index: int) -> bytes:
        heads = self._heads
        return self._payload[heads[index] + 4 : heads[index + 1]]

    def records(self, start: int, end: int) -> Records:
        """Records `start … end - 1`."""
        return cut(self._payload, self._heads[start : end + 1])

    @property
    def nbytes(self) -> int:
        """About what it takes in memory."""
        return len(self._payload) + 8 * len(self._heads) + 500


def cut(payload: Buffer, heads: Heads) -> Records:
    """The records between the heads, as `bytes`.

    `struct` compiles one format for all of them, which costs less than half of a slice for each.
    """
    if len(heads) <= _SLICED:
        view = payload if isinstance(payload, bytes) else memoryview(payload)
        return tuple([bytes(view[start + 4 : end]) for start, end in pairwise(heads)])
    lengths = np.diff(np.asarray(heads, dtype=np.int64)) - 4
    if lengths.max() < len(_FIELDS):
        fields = "".join(_FIELDS[lengths])
    else:
        fields = "".join([f"4x{length}s" for length in lengths.tolist()])
    return Struct("<" + fields).unpack_from(payload, int(heads[0]))


def in_pieces(payload: Buffer, heads: Heads) -> Iterator[Records]:
    """All records, some at a time: memory that is used again soon is faster than new memory."""
    records = len(heads) - 1
    step = max(1, records * _PIECE_BYTES // max(len(payload), 1))
    for start in range(0, records, step):
        yield cut(payload, heads[start : start + step + 1])


def split(payload: Buffer, records: int, ends: Iterable[tuple[int, int]] = ()) -> Heads:
    """Where each record's length stands, and the payload's end: `records + 1` positions.

    Each length says where the next one stands. `ends` are pairs (records, bytes) at which chunks that were
    joined end. Raises DataFormatError unless the chain of lengths ends exactly where the payload does, and
    passes by all of `ends`.
    """
    size = len(payload)
    if 4 * records > size:
        raise DataFormatError(f"its header promises {records:,} records and its data has {size:,} bytes")
    at, heads = 0, [0]
    note = heads.append
    for number in range(records):
        if at > size - 4:
            raise DataFormatError(f"its data ends before record {number:,} of {records:,}")
        at += 4 + _LENGTH(payload, at)[0]
        note(at)
    if at != size:
        where = "beyond" if at > size else "before"
        raise DataFormatError(f"its {records:,} records end at byte {at:,}, {where} its data's end, {size:,}")
    for number, position in ends:
        if heads[number] != position:
            raise DataFormatError(
                f"its {number:,} records end at byte {heads[number]:,}, not at {position:,}"
            )
    return tuple(heads)
