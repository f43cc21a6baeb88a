"""Arrow tables as numpy columns, and as rows with the same values.

What every columnar reader shares. It must not know where a table comes from, and no tensor. Values come from
Arrow's buffers: pyarrow's own ways (`Array.to_numpy`, `pyarrow.array`, `pyarrow.scalar`, numpy arrays as
arguments) import pandas wherever it is installed: half a second and 30 MB in each loader worker.

| Arrow | numpy | NULL |
| --- | --- | --- |
| integers, boolean | the same width | `BadRecord`, unless `fill_nulls` says what stands for it |
| floating point | the same width | NaN |
| date, timestamp, duration | `datetime64[D]`, `datetime64[unit]` in UTC, `timedelta64[unit]` | NaT |
| string, binary, decimal, time | object array of `str`, `bytes`, `Decimal`, `time` | None |
| fixed-size list of numbers | one axis more | as the numbers; a NULL list is `BadRecord` |
| list | object array with an array a row (of numbers, dates), else a Python list | None; inside, as values |
| map, struct | object array of `dict` | None |
| dictionary | as its values | as its values |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edl_torch.errors import BadRecord, DataFormatError
from edl_torch.shard import IndexArray

if TYPE_CHECKING:
    import pyarrow as pa

Column = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]

_DAYS = np.dtype("M8[D]")  # which Arrow stores in 32 bits
Columns = dict[str, Column]
Pick = Callable[[int], Any]


def numpy_columns(table: pa.Table | pa.RecordBatch, fill_nulls: Mapping[str, Any] | None = None) -> Columns:
    """The columns of a table by name; the arrays are writable and belong to the caller.

    Args:
        table: Any number of rows.
        fill_nulls: What stands for NULL, by column; other columns follow the table above. In a column of
            lists a list stands for NULL lists, any other value for NULL inside the lists.

    Raises BadRecord, with the column's name, for a NULL that has no value in its column, and DataFormatError
    for two columns of one name.
    """
    names = table.schema.names
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise DataFormatError(
            f"several columns have the name {', '.join(twice)}: rename or leave out columns"
        )
    fills = fill_nulls or {}
    return {
        name: _column(_whole(_filled(table.column(place), name, fills)), name, fills)
        for place, name in enumerate(names)
    }


def rows(
    table: pa.Table | pa.RecordBatch, fill_nulls: Mapping[str, Any] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the rows as dicts of Python values (numpy's for dates and times), equal to `numpy_columns`.

    A NULL that has no value raises BadRecord when its row's turn comes, not before.
    """
    try:
        columns = numpy_columns(table, fill_nulls)
    except BadRecord:
        if table.num_rows == 1:
            raise
        for row in range(table.num_rows):
            yield from rows(table.slice(row, 1), fill_nulls)
        return
    names = list(columns)
    for values in zip(*map(_values, columns.values()), strict=True):
        yield dict(zip(names, values, strict=True))


def _values(column: Column) -> list[Any]:
    # `tolist` makes bare integers of nanoseconds.
    return list(column) if column.dtype.kind in "mM" or column.ndim > 1 else column.tolist()


def _filled(column: Any, name: str, fills: Mapping[str, Any]) -> Any:
    if name not in fills or not column.null_count:
        return column
    import pyarrow as pa
    import pyarrow.compute as pc

    if filled_type(column.type, fills[name]) != column.type:
        return column  # what is NULL inside of it is filled where it lies
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    try:
        return pc.fill_null(column, scalar(fills[name], column.type))
    except (pa.ArrowException, TypeError, ValueError) as exc:
        raise DataFormatError(
            f"fill_nulls[{name!r}] = {fills[name]!r} is no value of the column's type {column.type}: {exc}"
        ) from exc


def _is_list(kind: pa.DataType) -> bool:
    import pyarrow as pa

    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def filled_type(kind: pa.DataType, fill: Any) -> pa.DataType:
    """The type of the values for which a value of `fill_nulls` stands, in a column of type `kind`."""
    while _is_list(kind) and not _stands_for_lists(fill):
        kind = kind.value_type
    return kind


def _stands_for_lists(fill: Any) -> bool:
    """Whether a value of `fill_nulls` is for NULL lists, not for NULL inside of lists."""
    return isinstance(fill, list | tuple | np.ndarray)


def _whole(column: Any) -> Any:
    """A column in one piece; what does not fit into one array's 32-bit offsets gets wider ones."""
    import pyarrow as pa

    if not isinstance(column, pa.ChunkedArray):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    wide = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}.get(column.type)
    return (column if wide is None else column.cast(wide)).combine_chunks()


def _column(array: Any, name: str, fills: Mapping[str, Any], *, in_lists: bool = False) -> Column:
    import pyarrow as pa

    kind, types = array.type, pa.types
    if types.is_dictionary(kind):
        return _column(array.dictionary_decode(), name, fills, in_lists=in_lists)
    if isinstance(kind, pa.BaseExtensionType):
        return _column(array.storage, name, fills, in_lists=in_lists)
    if (types.is_integer(kind) or types.is_boolean(kind)) and array.null_count:
        where, what = (" in its lists", ", a value and no list") if in_lists else ("", "")
        raise BadRecord(
            f"column {name!r} ({kind}{where}) has {array.null_count} NULL(s), for which it has no value: "
            f"name one with fill_nulls={{{name!r}: …}}{what}, or leave the column out"
        )
    if is_plain(kind):
        return plain_values(array)
    if types.is_fixed_size_list(kind):
        return _matrix(array, name, fills)
    if _is_list(kind):
        return _lists(array, name, fills)
    if is_text(kind):
        return text_values(array)
    if types.is_map(kind):
        return _objects([None if row is None else dict(row) for row in array.to_pylist()])
    return _objects(array.to_pylist())


def _objects(values: list[Any]) -> Column:
    return np.fromiter(values, dtype=object, count=len(values))


def _elements(array: Any, name: str, fills: Mapping[str, Any]) -> Column:
    """The values of all lists as one column."""
    if _stands_for_lists(fills.get(name)):
        fills = {}
    return _column(_filled(array.flatten(), name, fills), name, fills, in_lists=True)


def _matrix(array: Any, name: str, fills: Mapping[str, Any]) -> Column:
    size = array.type.list_size
    if array.null_count:
        raise BadRecord(
            f"column {name!r} ({array.type}) has {array.null_count} NULL list(s) of a fixed size: name one "
            f"with fill_nulls={{{name!r}: […]}}, a list of {size} values, or leave the column out"
        )
    values = _elements(array, name, fills)
    return values.reshape(len(array), size, *values.shape[1:])


def _lists(array: Any, name: str, fills: Mapping[str, Any]) -> Column:
    """Rows share one array of values: each is a view of its own part."""
    values = _elements(array, name, fills)  # without the values behind NULL lists
    present = valid(array)
    lengths = np.where(present, plain_values(array.value_lengths()), 0)
    ends = np.cumsum(lengths)
    column = np.empty(len(array), dtype=object)
    for row, (end, length) in enumerate(zip(ends.tolist(), lengths.tolist(), strict=True)):
        part = values[end - length : end]
        column[row] = (part.tolist() if part.dtype == object else part) if present[row] else None
    return column


class RowPicker:
    """Rows of `table`, with what stands for NULL by column, and `same`, columns that have one value.

    Numbers, times and strings are read where they lie; of each other column one of one row is made.
    """

    def __init__(
        self,
        table: pa.Table,
        fill_nulls: Mapping[str, Any],
        same: Mapping[str, Any],
        order: Sequence[str],
    ) -> None:
        self._fills = fill_nulls
        self._same = dict(same)
        self._order = list(order)
        self._quick: dict[str, Pick] = {}
        for name in table.column_names:
            pick = _picker(_filled(table.column(name), name, fill_nulls))
            if pick is not None:
                self._quick[name] = pick
        self._others = [name for name in table.column_names if name not in self._quick]
        self._rest = table.select(self._others)
        self._in_order = [*self._quick, *self._others, *self._same] == self._order

    def row(self, number: int) -> dict[str, Any]:
        """Row `number`, from 0. Raises BadRecord for a NULL that has no value."""
        row = {name: pick(number) for name, pick in self._quick.items()}
        if self._others:
            row |= next(rows(self._rest.slice(number, 1), self._fills))
        row |= self._same
        return row if self._in_order else {name: row[name] for name in self._order}


def _picker(column: pa.ChunkedArray) -> Pick | None:
    """The values of a column by number; None where they have to be made of more than their bytes."""
    import pyarrow as pa

    if column.num_chunks != 1:
        return None
    array = column.chunk(0)
    dtype = _plain_dtype(array.type)
    pick: Pick
    null: Any = None
    if dtype is None:
        if array.type not in (pa.string(), pa.large_string()):
            return None
        pick = _texts(array)
    elif dtype.kind in "mM":
        null = np.array("NaT", dtype=dtype)[()]
        pick = (plain_values(array) if dtype == _DAYS else _view(array, dtype)).__getitem__
    elif array.null_count and dtype.kind != "f":
        return None  # NULL has no value there
    else:
        null = float("nan")
        pick = (plain_values(array) if dtype.kind == "b" else _view(array, dtype)).item
    if not array.null_count:
        return pick
    there = valid(array)
    return lambda number: pick(number) if there[number] else null


def _texts(array: pa.Array) -> Pick:
    bounds: Any = text_bounds(array)
    data = memoryview(array.buffers()[2] or b"")
    return lambda number: str(data[bounds[number] : bounds[number + 1]], "utf-8")


class RowBlock:
    """Rows that lie one after the other: a table, and what picks single ones once they are asked for."""

    __slots__ = ("nbytes", "picker", "table")

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        self.picker: RowPicker | None = None
        self.nbytes: int = table.nbytes  # in memory


# Returns the block that has a row of a source, with its first row and the row after its last.
BlockOf = Callable[[int], tuple[RowBlock, int, int]]


def slices(start: int, end: int, block_of: BlockOf) -> Iterator[pa.Table]:
    """Yield the rows `start … end - 1` as parts of blocks; nothing is copied."""
    while start < end:
        block, first, after = block_of(start)
        stop = min(end, after)
        yield block.table.slice(start - first, stop - start)
        start = stop


def taken(indices: IndexArray, block_of: BlockOf, make: Callable[[list[pa.Table]], Columns]) -> Columns:
    """The rows `indices`, in this order, as columns that `make` makes of parts; each block is read once."""
    if bool((np.diff(indices) == 1).all()):
        return make(list(slices(int(indices[0]), int(indices[-1]) + 1, block_of)))
    block, first, after = block_of(int(indices.min()))
    if indices.max() < after:
        return make([block.table.take(row_numbers(indices - first))])
    order = np.argsort(indices, kind="stable")
    ascending, parts, at = indices[order], [], 0
    while at < len(ascending):
        block, first, after = block_of(int(ascending[at]))
        stop = int(np.searchsorted(ascending, after))
        parts.append(block.table.take(row_numbers(ascending[at:stop] - first)))
        at = stop
    back = np.argsort(order)
    return {column: values[back] for column, values in make(parts).items()}


# Values of arrays, out of their buffers and back -------------------------------------------------------


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
