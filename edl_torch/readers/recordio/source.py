"""RecordIO files: where each chunk is and which records it has, in a few arrays, and the chunks read by it.

The index goes from header to header, and reads as much data as it takes to prove which dialect a file has. It
must not know who asks for chunks.
"""

from __future__ import annotations

import hashlib
import logging
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from struct import Struct

import numpy as np

from edl_torch.errors import DataFormatError, SourceChanged
from edl_torch.readers.recordio.format import (
    DIALECTS,
    HEADER_BYTES,
    MAGIC,
    MAGIC_BYTES,
    Buffer,
    Dialect,
    Header,
    dialect_named,
)
from edl_torch.readers.shared.files import FileStamp, Read, readable
from edl_torch.readers.shared.mapped import Array, StringTable, shared
from edl_torch.readers.shared.sources import (
    Sources,
    each_looked_at,
    index_of,
    look_at,
    read_once,
    stamp_arrays,
    stamps_in,
    whole_digest,
)
from edl_torch.readers.storage import Storage

_KIND = "recordio2"
_THREADS = 16  # for stores
_INLINE = 1 << 16  # bytes: loader workers share a larger index as a mapped file


Arrays = Mapping[str, Array]
log = logging.getLogger("edl_torch.readers")

_WITNESSES = 8  # chunks whose checksums are tried
_BLOCK = 1 << 16
_NOTHING = 1 << 10  # bytes: more than any compressor makes of nothing
_FAR = 1 << 14  # chunks larger than this: read their headers one by one


def build_index(
    files: Sequence[str],
    storage: Storage,
    dialect: str | None = None,
) -> Arrays:
    """Index all files, in parallel: reading headers waits for disks.

    Returns the arrays `rows`, where in the two next the part of each file begins; `offsets` and `firsts` of
    `Chain`, file after file; and `dialects`, `sizes`, `mtimes`, `ctimes` and `headers` of each file. Raises
    DataFormatError for the first file, in order, that is not as it should be.
    """
    look = partial(_index_one, storage=storage, dialect=dialect)
    parts = list(each_looked_at(files, look, away=_THREADS))
    arrays = {
        "rows": np.cumsum([0, *(len(part["offsets"]) for _, part in parts)], dtype=np.int64),
        "offsets": np.concatenate([part["offsets"] for _, part in parts]),
        "firsts": np.concatenate([part["firsts"] for _, part in parts]),
        "dialects": np.array([part["dialect"] for _, part in parts], dtype=np.uint8),
        "headers": np.array([part["headers"] for _, part in parts], dtype=np.uint64),
        **stamp_arrays([stamp for stamp, _ in parts]),
    }
    return shared(arrays, "recordio", above=_INLINE)


def _index_one(path: str, storage: Storage, dialect: str | None) -> tuple[FileStamp, Arrays]:
    with readable(f"'{path}'"):
        stamp = look_at(path, storage, "a RecordIO file")
    build = partial(_arrays_of, path, stamp, storage, dialect)
    return stamp, index_of(stamp, _KIND, build, storage, dialect or "")


def _arrays_of(path: str, stamp: FileStamp, storage: Storage, dialect: str | None) -> Arrays:
    sources = Sources(storage, keep=1)
    sources.expect([(stamp, 0, stamp.size)])
    chain = scan(path, sources.reading(stamp), stamp.size, dialect)
    return {
        "offsets": np.array(chain.offsets, dtype=np.int64),
        "firsts": np.array(chain.firsts, dtype=np.int64),
        "dialect": np.array(chain.dialect.number, dtype=np.uint8),
        "headers": np.array(chain.headers, dtype=np.uint64),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The headers of a file, read as one dialect.

    `offsets` has the position of each chunk and then of the file's end, `firsts` the number of its first
    record and then of all. `headers` is a digest of all headers, which have the checksums of their data.
    `broken` says why and at which chunk the chain breaks, where it does.
    """

    dialect: Dialect
    headers: int
    offsets: array[int]
    firsts: array[int]
    broken: str | None

    @property
    def chunks(self) -> int:
        """The chunks before the break, or all."""
        return len(self.offsets) - 1


def place(path: str, chunk: int, offset: int) -> str:
    """How every error names a chunk."""
    return f"'{path}' chunk {chunk:,} at offset {offset:,}"


def scan(path: str, read: Read, size: int, dialect: str | None = None) -> Chain:
    """The chain of a file of `size` bytes, in the given dialect or in the one that the file proves to have.

    A dialect is proven by a checksum that fits the data of one of the first chunks. Where none of them fits
    in either, these chunks are damaged, and their dialect is the only one whose headers lead to the end of
    the file; what is read of them is an error, as of every damaged chunk. Raises DataFormatError, with file,
    chunk and offset, for a chain that breaks before the end of the file and for one that proves nothing. A
    file of no bytes is a file of no records.
    """
    if dialect is not None or size == 0:
        return _whole(path, follow(read, size, dialect_named(dialect or DIALECTS[0].name)))
    chains = [follow(read, size, candidate) for candidate in DIALECTS]
    proven = [chain for chain in chains if _is_proven(read, chain)]
    if len(proven) == 1:
        return _whole(path, proven[0])
    whole = [chain for chain in chains if chain.broken is None]
    if not proven and not whole:
        return _whole(path, max(chains, key=lambda chain: chain.chunks))
    if proven or len(whole) > 1:
        raise DataFormatError(f"'{path}' could be RecordIO of both dialects: say which with dialect=")
    log.warning(
        "path=%s dialect=%s its first %d chunk(s) are damaged: their checksums fit in no dialect",
        *(path, whole[0].dialect.name, min(_WITNESSES, whole[0].chunks)),
    )
    return whole[0]


def follow(read: Read, size: int, dialect: Dialect) -> Chain:
    """Read all headers, as this dialect, until the end of the file or the first that cannot be one."""
    offsets, firsts, broken = array("q", [0]), array("q", [0]), None
    block, start, at, total = b"", 0, 0, 0
    headers = bytearray()
    while at < size:
        position = at - start
        if not 0 <= position <= len(block) - HEADER_BYTES:
            far = len(offsets) > 1 and at - offsets[-2] > _FAR
            block, start, position = read(at, at + (HEADER_BYTES if far else _BLOCK)), at, 0
        if block[position : position + 4] not in (MAGIC_BYTES, MAGIC_BYTES[: size - at]):
            broken = f"it starts with {block[position : position + 4]!r}, and a chunk with {MAGIC_BYTES!r}"
        elif len(block) - position < HEADER_BYTES:
            broken = f"{size - at} bytes are left, and a chunk's header has {HEADER_BYTES}"
        else:
            header = Header(*dialect.words(block, position))
            broken = dialect.problem(header, size - at - HEADER_BYTES)
            if broken is None and header.records == 0 and header.size:
                broken = _hidden_records(read, dialect, header, at)
        if broken is not None:
            break
        headers += block[position : position + HEADER_BYTES]
        at += HEADER_BYTES + header.size
        total += header.records
        offsets.append(at)
        firsts.append(total)
    digest = int.from_bytes(hashlib.blake2b(headers, digest_size=8).digest())
    return Chain(dialect=dialect, headers=digest, offsets=offsets, firsts=firsts, broken=broken)


def _hidden_records(read: Read, dialect: Dialect, header: Header, at: int) -> str | None:
    """Whether data hides behind a count of 0, which no checksum covers: nobody would read, or miss, it."""
    if header.size <= _NOTHING:
        data = read(at + HEADER_BYTES, at + HEADER_BYTES + header.size)
        try:
            if not len(dialect.payload(data, 0, header.size, header.checksum, header.compressor)):
                return None
        except DataFormatError as exc:
            return str(exc)
    return f"its header promises no record, and it has {header.size:,} bytes of data"


def _is_proven(read: Read, chain: Chain) -> bool:
    for number in range(min(_WITNESSES, chain.chunks)):
        start, end = chain.offsets[number : number + 2]
        data = read(start, end)
        header = Header(*chain.dialect.words(data))
        if chain.dialect.checksum(data[HEADER_BYTES:]) == header.checksum:
            return True
    return False


def _whole(path: str, chain: Chain) -> Chain:
    if chain.broken is None:
        return chain
    raise DataFormatError(
        f"{place(path, chain.chunks, chain.offsets[-1])}: {chain.broken}; the file is damaged, cut "
        "short or no RecordIO (name only such files, for example with a glob)"
    )


Records = tuple[bytes, ...]
Heads = tuple[int, ...]  # the garbage collector looks at no tuple of numbers, and there may be many chunks

_LENGTH = Struct("<I").unpack_from
_SLICED = 50  # records: below, single slices cost less than what `cut` has to prepare
PIECE_BYTES = 1 << 16  # of records that are made at once
_FIELDS = np.array([f"4x{length}s" for length in range(4096)], dtype=object)
_RUN_BYTES = 1 << 16  # chunks in sequence are read so many bytes at once
PAYLOAD_BYTES = 1 << 17  # and split when so much is decompressed: what stays in a processor's cache

_DIALECTS: dict[int, Dialect] = {dialect.number: dialect for dialect in DIALECTS}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordIOSource:
    """`offsets` and `firsts` as in `Chain`; `row` numbers the first chunk among all files'."""

    name: str
    count: int  # of records
    row: int
    offsets: memoryview
    firsts: memoryview
    dialect: Dialect
    stamp: FileStamp
    headers: int

    def is_same(self, read: Read) -> bool:
        """Whether what is read has the headers that were indexed, with the checksums of all data."""
        return follow(read, self.stamp.size, self.dialect).headers == self.headers

    @property
    def looks(self) -> str:
        """Its size, and the digest of its headers."""
        return f"{self.stamp.size} {self.headers:x}"

    def looked_at(self, storage: Storage, *, whole: bool) -> str:
        """What `looks` would be now, or a digest of the `whole` file."""
        if whole:
            return whole_digest(self.name, storage)
        read = read_once(self.stamp, storage)
        return f"{self.stamp.size} {follow(read, self.stamp.size, self.dialect).headers:x}"

    def chunk_of(self, index: int) -> int:
        return bisect_right(self.firsts, index) - 1

    def span(self, start: int, end: int) -> tuple[int, int]:
        """The bytes from … to before … of the chunks that have the records `start … end - 1`."""
        return self.offsets[self.chunk_of(start)], self.offsets[self.chunk_of(end - 1) + 1]

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
            self.stamp.check()  # where a writer put the time back, the headers may be as they were
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
            if position >= PAYLOAD_BYTES or row == end:
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


def sources_of_index(names: StringTable, arrays: Arrays) -> Iterator[RecordIOSource]:
    """The files, in order."""
    rows = arrays["rows"].tolist()
    offsets, firsts = arrays["offsets"].data, arrays["firsts"].data
    dialects, headers = (arrays[name].tolist() for name in ("dialects", "headers"))
    for number, (name, stamp) in enumerate(zip(names, stamps_in(names, arrays), strict=True)):
        start, end = rows[number : number + 2]
        yield RecordIOSource(
            name=name,
            count=firsts[end - 1],
            row=start,
            offsets=offsets[start:end],
            firsts=firsts[start:end],
            dialect=_DIALECTS[dialects[number]],
            stamp=stamp,
            headers=headers[number],
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
    step = max(1, records * PIECE_BYTES // max(len(payload), 1))
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
