"""One chunk in memory: its bytes, and where each record starts.

It must not know files or compressors.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from struct import Struct

import numpy as np

from edl_torch.errors import DataFormatError
from edl_torch.shard import IndexArray

_LENGTH = Struct("<I").unpack_from
_FEW = 200  # records: below, walking from length to length costs less than the arrays


class Chunk:
    """The records of one chunk; record `i` is `payload[heads[i] + 4 : heads[i + 1]]`."""

    __slots__ = ("_heads", "_payload")

    def __init__(self, payload: bytes, records: int) -> None:
        """Raises DataFormatError unless `payload` is exactly `records` records."""
        self._payload = payload
        self._heads: Sequence[int] = split(payload, records)

    def __len__(self) -> int:
        return len(self._heads) - 1

    def __getitem__(self, index: int) -> bytes:
        heads = self._heads
        return self._payload[heads[index] + 4 : heads[index + 1]]

    def records(self, start: int, end: int) -> list[bytes]:
        """Records `start … end - 1`."""
        payload = self._payload
        heads = self._heads[start : end + 1]
        if isinstance(heads, memoryview):
            array = np.asarray(heads)
            bounds = zip((array[:-1] + 4).tolist(), array[1:].tolist(), strict=True)
            return [payload[first:after] for first, after in bounds]
        return [payload[head + 4 : after] for head, after in pairwise(heads)]

    @property
    def nbytes(self) -> int:
        """About what it takes in memory."""
        per_head = 8 if isinstance(self._heads, memoryview) else 40
        return len(self._payload) + per_head * len(self._heads) + 200


def split(payload: bytes, records: int) -> Sequence[int]:
    """Where each record's length stands, and the payload's end: `records + 1` positions.

    Each length says where the next one stands, so a chunk is a chain that must be walked. Where there are
    many records the whole chain is first guessed at once with numpy, and taken if it proves to be the chain.
    Raises DataFormatError unless the chain ends exactly where the payload does.
    """
    if records < _FEW:
        return walk(payload, records)
    for guess in (_equal_lengths, _after_zeros):
        heads = guess(payload, records)
        if heads is not None and _is_chain(payload, heads):
            return heads.data
    return np.array(walk(payload, records), dtype=np.int64).data


def walk(payload: bytes, records: int) -> list[int]:
    """`split`, from length to length."""
    size = len(payload)
    if 4 * records > size:
        raise DataFormatError(f"its header promises {records:,} records and its data has {size:,} bytes")
    at, heads = 0, [0]
    note = heads.append
    for number in range(records):
        if at > size - 4:
            raise DataFormatError(f"its data ends before record {number} of {records:,}")
        at += 4 + _LENGTH(payload, at)[0]
        note(at)
    if at != size:
        where = "beyond" if at > size else "before"
        raise DataFormatError(f"its {records:,} records end at byte {at:,}, {where} its data's end, {size:,}")
    return heads


def _equal_lengths(payload: bytes, records: int) -> IndexArray | None:
    """The heads if all records are as long as the first."""
    if len(payload) < 4:
        return None
    step = 4 + int(_LENGTH(payload)[0])
    if step * records != len(payload):
        return None
    return np.arange(0, len(payload) + 1, step, dtype=np.int64)


def _after_zeros(payload: bytes, records: int) -> IndexArray | None:
    """The heads if zero bytes stand nowhere but in the lengths, as in text: a length ends where zeros end."""
    data = np.frombuffer(payload, dtype=np.uint8)
    zero = data == 0
    last = np.flatnonzero(zero[:-1] & ~zero[1:])
    if len(last) != records:
        return None
    heads = np.empty(records + 1, dtype=np.int64)
    np.subtract(last, 3, out=heads[:-1])
    heads[-1] = len(payload)
    return heads


def _is_chain(payload: bytes, heads: IndexArray) -> bool:
    """Whether each length leads to the next head, from 0 to the payload's end: then there is no other."""
    data, at = np.frombuffer(payload, dtype=np.uint8), heads[:-1]
    if heads[0] != 0 or heads[-1] != len(payload) or at.min() < 0 or at.max() > len(payload) - 4:
        return False
    lengths = sum(data[at + byte].astype(np.int64) << (8 * byte) for byte in range(4))
    return bool(np.array_equal(at + 4 + lengths, heads[1:]))
