"""One RecordIO file of a reader: its part of the index, and its chunks, read, verified and cut into records.

It must not know who asks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from struct import Struct

import numpy as np

from edl_torch.errors import DataFormatError, SourceChanged
from edl_torch.readers.recordio.format import DIALECTS, HEADER_BYTES, MAGIC, Buffer, Dialect, Header
from edl_torch.readers.recordio.index import Arrays, follow, place
from edl_torch.readers.shared.files import FileStamp, Read

Records = tuple[bytes, ...]
Heads = tuple[int, ...]  # the garbage collector looks at no tuple of numbers, and there may be many chunks

_LENGTH = Struct("<I").unpack_from
_SLICED = 50  # records: below, single slices cost less than what `cut` has to prepare
_PIECE_BYTES = 1 << 16  # of records that are made at once
_FIELDS = np.array([f"4x{length}s" for length in range(4096)], dtype=object)
_RUN_BYTES = 1 << 16  # chunks in sequence are read so many bytes at once
_PAYLOAD_BYTES = 1 << 17  # and split when so much is decompressed: what stays in a processor's cache

_DIALECTS: dict[int, Dialect] = {dialect.number: dialect for dialect in DIALECTS}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordIOSource:
    """`offsets` and `firsts` as in `index.Chain`; `row` numbers the first chunk among all files'."""

    name: str
    records: int
    row: int
    offsets: memoryview
    firsts: memoryview
    dialect: Dialect
    stamp: FileStamp
    headers: int

    def is_same(self, read: Read) -> bool:
        """Whether what is read has the headers that were indexed, with the checksums of all data."""
        return follow(read, self.stamp.size, self.dialect).headers == self.headers

    def prepare(self, read: Read) -> None:
        """Import what its first chunk needs."""
        head = read(0, HEADER_BYTES)
        if len(head) == HEADER_BYTES:
            self.dialect.prepare(Header(*self.dialect.words(head)).compressor)

    def chunk_of(self, index: int) -> int:
        """The chunk that record `index` is in."""
        return bisect_right(self.firsts, index) - 1

    def run_end(self, row: int, end: int) -> int:
        """The chunk after the last of those that are read at once from `row` on, all before record `end`."""
        before = bisect_right(self.firsts, end) - 1
        near = bisect_right(self.offsets, self.offsets[row] + _RUN_BYTES) - 1
        return min(before, max(near, row + 1))

    def read_chunk(self, read: Read, row: int) -> Chunk:
        """Chunk `row`. Raises DataFormatError, with file, chunk and offset."""
        start, end = self.offsets[row], self.offsets[row + 1]
        records = self.firsts[row + 1] - self.firsts[row]
        data = read(start, end)
        try:
            return Chunk(self._payload(data, 0, end - start, records), records)
        except DataFormatError as exc:
            raise DataFormatError(f"{place(self.name, row, start)}: {exc}") from exc

    def read_run(self, read: Read, row: int, end: int) -> Iterator[tuple[int, Records]]:
        """Yield the records of the chunks `row … end - 1`, some at a time, and the chunk that follows them.

        Raises DataFormatError, that does not say which chunk, when all records of those before are given.
        """
        offsets, firsts = self.offsets[row : end + 1].tolist(), self.firsts[row : end + 1].tolist()
        start, first = offsets[0], firsts[0]
        data = read(start, offsets[-1])
        payloads: list[Buffer] = []
        ends: list[tuple[int, int]] = []
        position = 0
        for (at, after), (number, following) in zip(pairwise(offsets), pairwise(firsts), strict=True):
            payload = self._payload(data, at - start, after - start, following - number)
            position += len(payload)
            payloads.append(payload)
            ends.append((following - first, position))
            row += 1
            if position >= _PAYLOAD_BYTES or row == end:
                joined = payloads[0] if len(payloads) == 1 else b"".join(payloads)
                for records in in_pieces(joined, split(joined, following - first, ends)):
                    yield row, records
                payloads, ends, position, first = [], [], 0, following

    def _payload(self, data: bytes, position: int, end: int, records: int) -> Buffer:
        if len(data) < end:
            raise SourceChanged(f"'{self.name}' was cut since it was indexed: start the job again")
        magic, said, checksum, compressor, body = self.dialect.words(data, position)
        position += HEADER_BYTES
        if magic != MAGIC or said != records or body != end - position:
            raise SourceChanged(f"'{self.name}' has changed since it was indexed: start the job again")
        return self.dialect.payload(data, position, end, checksum, compressor)


def sources_of_index(names: Iterable[str], arrays: Arrays) -> Iterator[RecordIOSource]:
    """The files, in order."""
    rows = arrays["rows"].tolist()
    offsets, firsts = arrays["offsets"].data, arrays["firsts"].data
    columns = (arrays[name].tolist() for name in ("dialects", "sizes", "mtimes", "ctimes", "headers"))
    for number, (name, *found) in enumerate(zip(names, *columns, strict=True)):
        dialect, size, mtime_ns, ctime_ns, headers = found
        start, end = rows[number : number + 2]
        yield RecordIOSource(
            name=name,
            records=firsts[end - 1],
            row=start,
            offsets=offsets[start:end],
            firsts=firsts[start:end],
            dialect=_DIALECTS[dialect],
            stamp=FileStamp(path=name, size=size, mtime_ns=mtime_ns, ctime_ns=ctime_ns),
            headers=headers,
        )


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
