"""The body of a download: rows as Arrow messages in checksummed chunks, or as records.

Chunks: a big-endian 32-bit chunk size; each full chunk with its CRC-32C; the last, short chunk with the
CRC-32C of all. There is no schema message. Records are written by pyodps's own writer.
"""

from __future__ import annotations

import datetime as dt
import io
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from odps import types
from odps.models import Record, TableSchema
from odps.tunnel.checksum import Checksum
from odps.tunnel.io.writer import BaseRecordWriter

CHUNK_BYTES = 1 << 16


def arrow_body(rows: pa.Table, batch_rows: int, chunk_bytes: int = CHUNK_BYTES) -> bytes:
    """The Arrow body of `rows`, with `batch_rows` rows a message."""
    messages = b"".join(batch.serialize() for batch in rows.to_batches(max_chunksize=batch_rows))
    return b"".join(_chunks(messages, chunk_bytes))


def cut_at_a_border(rows: pa.Table, batch_rows: int) -> bytes:
    """A body that ends, without a word, where a full chunk and a message end: all of `rows` are in it."""
    messages = b"".join(batch.serialize() for batch in rows.to_batches(max_chunksize=batch_rows))
    return b"".join(list(_chunks(messages, len(messages)))[:-1]) if messages else arrow_body(rows, batch_rows)


def _chunks(data: bytes, size: int) -> Iterator[bytes]:
    yield size.to_bytes(4, "big")
    end = len(data) - len(data) % size
    for start in range(0, end, size):
        chunk = data[start : start + size]
        yield chunk + crc(chunk)
    yield data[end:] + crc(data)


def crc(data: bytes) -> bytes:
    """The CRC-32C of `data`, big-endian."""
    checksum = Checksum()
    checksum.update(data)
    return int(checksum.getvalue()).to_bytes(4, "big")


def record_body(rows: pa.Table, columns: dict[str, str]) -> bytes:
    """The body of `rows` as records; `columns` are their types, in the rows' order."""
    schema = TableSchema.from_lists(list(columns), list(columns.values()))
    converters = [_converter(column.type) for column in schema.columns]
    sink = _Sink()
    writer = BaseRecordWriter(schema, sink)
    for row in zip(*(column.to_pylist() for column in rows.columns), strict=True):
        values = [
            None if value is None else convert(value) for value, convert in zip(row, converters, strict=True)
        ]
        writer.write(Record(schema=schema, values=values))
    writer.close()
    return sink.getvalue()


class _Sink(io.BytesIO):
    """What pyodps's writer writes into; it flushes at its end."""


def _converter(kind: Any) -> Any:
    """From a value of Arrow's to what pyodps's writer takes: its times are local."""
    if isinstance(kind, types.Datetime):
        return lambda value: value.replace(tzinfo=dt.UTC).astimezone().replace(tzinfo=None)
    if isinstance(kind, types.Map):
        return dict
    return lambda value: value
