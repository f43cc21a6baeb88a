"""Small RecordIO files, and every way to read one: what the tests of RecordIO share."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

from edl_torch.readers import RecordIODataReader, RecordIOWriter
from edl_torch.readers.recordio.format import HEADER_BYTES
from edl_torch.shard import Shard, Task

FORMS = [(dialect, compressor) for dialect in ("python", "go") for compressor in ("none", "snappy", "gzip")]

# Empty ones, one of zeros, one larger than a chunk, one with what looks like a length.
RECORDS = [
    b"china", b"", b"usa", b"", b"", b"x" * 70, b"\0\0\0\0", b"\4\0\0\0", b"germany", b"\x04\x03\x02\x01",
    *(f"line {number},{'y' * (number % 7)}".encode() for number in range(30)),
    b"",
]  # fmt: skip


def write(
    path: Path, records: Iterable[bytes] = RECORDS, *, form: tuple[str, str] = FORMS[1], chunk: int = 40
) -> str:
    """A file; returns its path."""
    dialect, compressor = form
    with RecordIOWriter(path, dialect=dialect, compressor=compressor, max_chunk_bytes=chunk) as writer:
        for record in records:
            writer.write(record)
    return str(path)


def scan(reader: RecordIODataReader, name: str, start: int = 0, end: int | None = None) -> list[bytes]:
    """Records of a source, in sequence."""
    last = reader.create_shards()[name] if end is None else end
    return list(reader.read_records(Task(shard=Shard(name=name, start=start, end=last))))


def everything(reader: RecordIODataReader) -> list[bytes]:
    """All records of all sources, in order."""
    return [record for name in reader.files for record in scan(reader, name)]


def one_by_one(reader: RecordIODataReader) -> list[bytes]:
    """All records through random access, asked for from the end."""
    shards = reader.create_shards().items()
    backwards = [[reader.read_record(name, i) for i in reversed(range(n))] for name, n in shards]
    return [record for records in backwards for record in reversed(records)]


def go_chunk_of_no_records() -> bytes:
    """As Go's library would write it, did it write any."""
    return struct.pack("<5I", 0x01020304, 0, 0, 0, 0)


def chunk_bounds(path: str, size_word: int) -> list[int]:
    """Where the chunks of a file begin and the last one ends, by hand."""
    data, at = Path(path).read_bytes(), 0
    bounds = [0]
    while at < len(data):
        at += HEADER_BYTES + struct.unpack_from("<5I", data, at)[size_word]
        bounds.append(at)
    return bounds


def naive_split(payload: bytes, records: int) -> Sequence[bytes] | None:
    """The records of a chunk, one after the other; None where they are not exactly the payload."""
    found, at = [], 0
    for _ in range(records):
        if at + 4 > len(payload):
            return None
        length = int.from_bytes(payload[at : at + 4], "little")
        if at + 4 + length > len(payload):
            return None
        found.append(payload[at + 4 : at + 4 + length])
        at += 4 + length
    return found if at == len(payload) else None
