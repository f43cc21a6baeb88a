"""The two formats that are called RecordIO: headers, checksums, compressors, chunks as bytes.

A file is a row of chunks, each a header of five little-endian 32-bit words and the compressed records; before
compression a record is its length, 32 bits little-endian, and its bytes. Both formats start with the same
magic number and differ in all the rest. It must not know files, indexes or which format a file has.

Sources: `pyrecordio` 0.0.4 (`recordio/header.py`, `chunk.py`), github.com/wangkuiyi/recordio (`header.go`,
`chunk.go`).
"""

from __future__ import annotations

import functools
import gzip
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from struct import Struct
from typing import Any, NamedTuple

import numpy as np

from edl_torch.errors import DataFormatError, InvalidArgument, ReaderUnavailable
from edl_torch.readers.shared.packages import required

MAGIC = 0x01020304
MAGIC_BYTES = MAGIC.to_bytes(4, "little")
HEADER_BYTES = 20
MAX_CHUNK_BYTES = 0xFFFF_FFFF  # what a header can say

_COPIED = 1 << 15  # bytes: below, a copy costs less than a view and the array that its checksum needs
Buffer = bytes | memoryview  # of single bytes
_WORDS = Struct("<5I")


class Header(NamedTuple):
    """What a chunk says of itself; `size` is that of the compressed records."""

    magic: int
    records: int
    checksum: int
    compressor: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Compressor:
    """One way to compress. `ratio` bounds how much larger than its data a payload can be."""

    name: str
    number: int
    ratio: int
    compress: Callable[[bytes], bytes]
    decompress: Callable[[Buffer], Buffer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One of the two formats. `order` says which word of the file is which field of `Header`, and
    `in_order` puts them so."""

    name: str
    number: int
    order: tuple[int, int, int, int, int]
    in_order: Callable[[tuple[int, ...]], tuple[int, ...]]
    checksum: Callable[[Buffer], int]
    compressors: Mapping[int, Compressor]

    def words(self, data: bytes, position: int = 0) -> tuple[int, ...]:
        """The fields of the header at `position`, unchecked, in the order of `Header`."""
        return self.in_order(_WORDS.unpack_from(data, position))

    def problem(self, header: Header, left: int) -> str | None:
        """Why no chunk has this header and `left` bytes after it, or None; its magic number is right."""
        compressor = self.compressors.get(header.compressor)
        if compressor is None:
            return (
                f"its compressor has the number {header.compressor}, which the dialect '{self.name}' has not"
            )
        if header.size > left:
            return f"its header promises {header.size:,} bytes of data and {left:,} are left in the file"
        if 4 * header.records > compressor.ratio * header.size:
            return f"its header promises {header.records:,} records in {header.size:,} bytes of data"
        return None

    def payload(self, data: bytes, start: int, end: int, checksum: int, compressor: int) -> Buffer:
        """The records, with their lengths, of the chunk whose body is `data[start:end]`.

        Raises DataFormatError for damaged data.
        """
        body = data[start:end] if end - start < _COPIED else memoryview(data)[start:end]
        found = self.checksum(body)
        if found != checksum:
            raise DataFormatError(
                f"its data has the checksum {found:#010x}, its header says {checksum:#010x}"
            )
        try:
            return self.compressors[compressor].decompress(body)
        except ReaderUnavailable:
            raise
        except Exception as exc:
            name = self.compressors[compressor].name if compressor in self.compressors else compressor
            raise DataFormatError(f"its {name} data cannot be decompressed: {exc}") from exc

    def chunk(self, records: int, payload: bytes, compressor: Compressor) -> bytes:
        """A chunk as the file has it. Raises InvalidArgument where a header cannot hold its size."""
        body = compressor.compress(payload)
        if max(len(body), records) > MAX_CHUNK_BYTES:
            raise InvalidArgument(
                f"a chunk of {len(body):,} bytes does not fit RecordIO, whose sizes have 32 bits: "
                "use a smaller max_chunk_bytes"
            )
        fields = (MAGIC, records, self.checksum(body), compressor.number, len(body))
        words = sorted(zip(self.order, fields, strict=True))
        return _WORDS.pack(*(value for _, value in words)) + body

    def compressor(self, name: str) -> Compressor:
        """The compressor of this name. Raises InvalidArgument for another."""
        for compressor in self.compressors.values():
            if compressor.name == name:
                return compressor
        known = ", ".join(repr(compressor.name) for compressor in self.compressors.values())
        raise InvalidArgument(f"compressor={name!r}: expected one of {known}")


def dialect_named(name: str) -> Dialect:
    """The dialect "python" or "go". Raises InvalidArgument for another name."""
    for dialect in DIALECTS:
        if dialect.name == name:
            return dialect
    raise InvalidArgument(f"dialect={name!r}: expected 'python' (pyrecordio) or 'go' (wangkuiyi/recordio)")


def _package(name: str, part: str) -> Any:
    need = f"reader 'recordio' needs {name.replace('_', '-')}: pip install 'edl-torch[recordio]'"
    return getattr(required(name, need), part)


@functools.cache
def _crc32c_value() -> Callable[[Any], int]:
    return _package("google_crc32c", "value")  # type: ignore[no-any-return]


@functools.cache
def _snappy() -> Any:
    return _package("cramjam", "snappy")


def _crc32c(data: Buffer) -> int:
    # It takes bytes and read-only arrays, and no memoryview.
    plain = data if isinstance(data, bytes) else np.frombuffer(data, dtype=np.uint8)
    return _crc32c_value()(plain)


def _as_is(data: Any) -> Any:
    return data


# No time of day in it: the same records are the same file.
_gzip = functools.partial(gzip.compress, compresslevel=6, mtime=0)


def _snappy_block(data: bytes) -> bytes:
    return bytes(_snappy().compress_raw(data))


def _unsnappy_block(data: Buffer) -> Buffer:
    snappy = _snappy()
    length, size = snappy.decompress_raw_len(data), len(data)
    if length > _SNAPPY_RATIO * size:  # else a damaged header could ask for 4 GiB of memory
        raise ValueError(f"{length:,} bytes cannot come from {size:,}")
    return snappy.decompress_raw(data)  # type: ignore[no-any-return]  # it has what a Buffer has


def _snappy_stream(data: bytes) -> bytes:
    return bytes(_snappy().compress(data))


def _unsnappy_stream(data: Buffer) -> Buffer:
    return _snappy().decompress(data)  # type: ignore[no-any-return]  # as above


_SNAPPY_RATIO = 32  # a copy of 64 bytes takes 3
_DEFLATE_RATIO = 1032


def _compressors(
    numbers: tuple[int, int, int], snappy: Callable[[bytes], bytes], unsnappy: Callable[[Buffer], Buffer]
) -> Mapping[int, Compressor]:
    none, fast, small = numbers
    return {
        none: Compressor(name="none", number=none, ratio=1, compress=_as_is, decompress=_as_is),
        fast: Compressor(
            name="snappy", number=fast, ratio=_SNAPPY_RATIO, compress=snappy, decompress=unsnappy
        ),
        small: Compressor(
            name="gzip", number=small, ratio=_DEFLATE_RATIO, compress=_gzip, decompress=gzip.decompress
        ),
    }


PYTHON = Dialect(
    name="python",
    number=1,
    order=(0, 1, 2, 3, 4),
    in_order=tuple,  # as they are: it is the same tuple
    checksum=_crc32c,
    compressors=_compressors((1, 2, 3), _snappy_block, _unsnappy_block),
)
GO = Dialect(
    name="go",
    number=2,
    order=(0, 4, 1, 2, 3),
    in_order=itemgetter(0, 4, 1, 2, 3),
    checksum=zlib.crc32,
    compressors=_compressors((0, 1, 2), _snappy_stream, _unsnappy_stream),
)
DIALECTS = (PYTHON, GO)
