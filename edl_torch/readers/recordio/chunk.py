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
from edl_torch.shard import IndexArray

Records = tuple[bytes, ...]
Heads = memoryview | tuple[int, ...]

_LENGTH = Struct("<I").unpack_from
_FEW = 200  # records: below, walking from length to length costs less than the arrays
_SLICED = 50  # records: below, single slices cost less than what `cut` has to prepare
_PIECE_BYTES = 1 << 16  # of records that are made at once
_LONG = 300  # bytes a record: above, walking costs less too
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
    """Where each record's length stands, and the payload's end: `records + 1` positions, int64.

    Each length says where the next one stands, so this is a chain that must be walked. Where there are many
    records it is first guessed as a whole with numpy, and taken if it proves to be the chain: there is but
    one. `ends` are pairs (records, bytes) at which chunks that were joined end. Raises DataFormatError unless
    the chain ends exactly where the payload does, and passes by all of `ends`.
    """
    guess = records >= _FEW and len(payload) < _LONG * records
    heads = _guessed(payload, records) if guess else None
    # A tuple of numbers is nothing to Python's garbage collector; a view is, for each of many kept chunks.
    found: Heads = tuple(walk(payload, records)) if heads is None else heads.data
    for number, position in ends:
        if found[number] != position:
            raise DataFormatError(
                f"its {number:,} records end at byte {found[number]:,}, not at {position:,}"
            )
    return found


def walk(payload: Buffer, records: int) -> list[int]:
    """`split`, from length to length."""
    size = len(payload)
    if records == 1 and size >= 4 and 4 + _LENGTH(payload)[0] == size:
        return [0, size]
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
    return heads


def _guessed(payload: Buffer, records: int) -> IndexArray | None:
    if len(payload) < 4 * records:
        return None
    for guess in (_equal_lengths, _after_zeros):
        heads = guess(payload, records)
        if heads is not None and _is_chain(payload, heads):
            return heads
    return None


def _equal_lengths(payload: Buffer, records: int) -> IndexArray | None:
    """The heads if all records are as long as the first."""
    step, rest = divmod(len(payload), records)
    return None if rest else np.arange(0, len(payload) + 1, step, dtype=np.int64)


def _after_zeros(payload: Buffer, records: int) -> IndexArray | None:
    """The heads if two zeros stand side by side in lengths only, and three in each: as in short lines.

    Of three zeros in a row two lie in one even place, so that half as many numbers are looked at.
    """
    size = len(payload)
    pairs = np.flatnonzero(np.frombuffer(payload, dtype=np.uint16, count=size // 2) == 0)
    if len(pairs) != records:
        return _after_zeros_at_any_place(payload, records)
    last = 2 * pairs  # of the zeros 1, 2, 3 after the lowest byte of a length this is the first or the second
    before = np.frombuffer(payload, dtype=np.uint8)[last - 1]
    heads = np.empty(records + 1, dtype=np.int64)
    np.subtract(last, np.where(before != 0, 1, 2), out=heads[:-1])
    heads[-1] = size
    return heads


def _after_zeros_at_any_place(payload: Buffer, records: int) -> IndexArray | None:
    zero = np.frombuffer(payload, dtype=np.uint8) == 0
    last = np.flatnonzero(zero[1:-1] & zero[:-2] & ~zero[2:])
    if len(last) != records:
        return None
    heads = np.empty(records + 1, dtype=np.int64)
    np.subtract(last, 2, out=heads[:-1])
    heads[-1] = len(payload)
    return heads


def _is_chain(payload: Buffer, heads: IndexArray) -> bool:
    """Whether each length leads to the next head, from 0 to the payload's end."""
    at, last = heads[:-1], len(payload) - 4
    if heads[0] != 0 or at.min() < 0 or at.max() > last:
        return False
    # The number at every byte, as a view: only those at the heads are read.
    lengths: IndexArray = np.ndarray((last + 1,), dtype="<u4", buffer=payload, strides=(1,))[at]
    return bool(np.array_equal(at + 4 + lengths, heads[1:]))
