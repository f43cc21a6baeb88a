"""Values of Arrow arrays as numpy arrays and back, out of their buffers.

pyarrow's own ways (`Array.to_numpy`, `pyarrow.array`, `pyarrow.scalar`, numpy arrays as arguments) import
pandas wherever it is installed: half a second and 30 MB in each loader worker. It must not know tables or
what a NULL shall mean.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import pyarrow as pa

Column = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]

_DAYS = np.dtype("M8[D]")  # which Arrow stores in 32 bits


def is_plain(kind: pa.DataType) -> bool:
    """Whether `plain_values` has the type: numbers, booleans, dates, timestamps, durations."""
    return _plain_dtype(kind) is not None


def is_text(kind: pa.DataType) -> bool:
    """Whether `text_values` has the type: strings and bytes."""
    import pyarrow as pa

    return kind in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())


def plain_values(array: pa.Array) -> Column:
    """A writable copy of an array of fixed width; NULL is NaN or NaT, and anything in other types."""
    dtype = _plain_dtype(array.type)
    assert dtype is not None, f"{array.type} is no plain type"
    if not len(array):
        return np.empty(0, dtype=dtype)
    if dtype.kind == "b":
        return _bits(array.buffers()[1], array)
    values = _view(array, np.dtype(np.int32) if dtype == _DAYS else dtype).astype(dtype)
    if array.null_count and dtype.kind in "fmM":
        values[~valid(array)] = np.nan if dtype.kind == "f" else np.array("NaT", dtype=dtype)
    return values


def is_in_place(kind: pa.DataType) -> bool:
    """Whether `plain_view` has the type: numbers."""
    dtype = _plain_dtype(kind)
    return dtype is not None and dtype.kind in "iuf"


def plain_view(array: pa.Array) -> Column:
    """An array of numbers where it lies, read-only; anything where there is NULL."""
    dtype = _plain_dtype(array.type)
    assert dtype is not None, f"{array.type} is no plain type"
    return _view(array, dtype)


def _view(array: pa.Array, stored: np.dtype[Any]) -> Column:
    if not len(array):
        return np.empty(0, dtype=stored)
    place = array.offset * stored.itemsize
    return np.frombuffer(array.buffers()[1], dtype=stored, count=len(array), offset=place)


def text_bounds(array: pa.Array) -> Column:
    """Where each text of an array that has some begins in its third buffer, and where the last one ends."""
    import pyarrow as pa

    large = array.type in (pa.large_string(), pa.large_binary())
    width = np.dtype(np.int64 if large else np.int32)
    place = array.offset * width.itemsize
    return np.frombuffer(array.buffers()[1], dtype=width, count=len(array) + 1, offset=place)


def text_values(array: pa.Array) -> Column:
    """An object array of `str` or `bytes`, and None. Raises UnicodeDecodeError for strings that are none."""
    count = len(array)
    if not count:
        return np.empty(0, dtype=object)
    bounds, data = text_bounds(array), array.buffers()[2]
    first, last = int(bounds[0]), int(bounds[-1])
    raw = b"" if data is None else memoryview(data)[first:last].tobytes()
    column = np.fromiter(_pieces(raw, bounds - first, array.type), dtype=object, count=count)
    if array.null_count:
        column[~valid(array)] = None
    return column


def _pieces(raw: bytes, bounds: npt.NDArray[Any], kind: pa.DataType) -> list[Any]:
    import pyarrow as pa

    is_string = kind in (pa.string(), pa.large_string())
    whole: Any = raw.decode("ascii") if is_string and raw.isascii() else raw
    pieces = [whole[start:end] for start, end in pairwise(bounds.tolist())]
    return [piece.decode() for piece in pieces] if is_string and whole is raw else pieces


def valid(array: pa.Array) -> Mask:
    """Where there is a value and no NULL."""
    validity = array.buffers()[0]
    return np.ones(len(array), dtype=np.bool_) if validity is None else _bits(validity, array)


def _bits(buffer: pa.Buffer, array: pa.Array) -> Mask:
    if not len(array):
        return np.empty(0, dtype=np.bool_)
    packed = np.frombuffer(buffer, dtype=np.uint8)
    bits = np.unpackbits(packed, count=array.offset + len(array), bitorder="little")[array.offset :]
    return bits.astype(np.bool_)


def row_numbers(numbers: npt.NDArray[np.int64]) -> pa.Array:
    """What `Table.take` takes."""
    import pyarrow as pa

    buffer = pa.py_buffer(np.ascontiguousarray(numbers, dtype=np.int64))
    return pa.Array.from_buffers(pa.int64(), len(numbers), [None, buffer])


def scalar(value: Any, kind: pa.DataType) -> pa.Scalar:
    """`pyarrow.scalar`, with its errors; without its price for strings, numbers and booleans."""
    import pyarrow as pa

    dtype = _plain_dtype(kind)
    if type(value) is str and kind == pa.string():
        text = value.encode()
        buffers = [None, pa.py_buffer(np.array([0, len(text)], dtype=np.int32)), pa.py_buffer(text)]
        return pa.Array.from_buffers(kind, 1, buffers)[0]
    if type(value) is bool and dtype == np.bool_:
        return pa.Array.from_buffers(kind, 1, [None, pa.py_buffer(bytes([value]))])[0]
    whole = type(value) is int and dtype is not None and dtype.kind in "iu"
    if whole and np.iinfo(dtype).min <= value <= np.iinfo(dtype).max:
        return pa.Array.from_buffers(kind, 1, [None, pa.py_buffer(np.array([value], dtype=dtype))])[0]
    if type(value) is float and dtype == np.float64:
        return pa.Array.from_buffers(kind, 1, [None, pa.py_buffer(np.array([value]))])[0]
    return pa.scalar(value, type=kind)


def _plain_dtype(kind: pa.DataType) -> np.dtype[Any] | None:
    import pyarrow as pa

    types = pa.types
    if types.is_boolean(kind):
        return np.dtype(np.bool_)
    if types.is_integer(kind):
        return np.dtype(f"{'i' if types.is_signed_integer(kind) else 'u'}{kind.bit_width // 8}")
    if types.is_floating(kind):
        return np.dtype(f"f{kind.bit_width // 8}")
    if types.is_date32(kind):
        return _DAYS
    if types.is_date64(kind):
        return np.dtype("M8[ms]")
    if types.is_timestamp(kind):
        return np.dtype(f"M8[{kind.unit}]")
    return np.dtype(f"m8[{kind.unit}]") if types.is_duration(kind) else None
