"""Many CSV records as one batch of numpy columns, parsed by Arrow in one call.

The columns half of `csv_rows`. It must not know where the bytes come from.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from edl_torch.errors import ReaderUnavailable
from edl_torch.readers.arrow.values import Column, plain_values, text_values, valid
from edl_torch.readers.text.csv_rows import CsvDialect, CsvLayout
from edl_torch.readers.text.csv_types import FALSE, TRUE, ColumnType

Columns = dict[str, Column]


def arrow_columns(data: bytes, count: int, dialect: CsvDialect, layout: CsvLayout) -> Columns | None:
    """The columns of `count` records with any blank lines between them; None if something is wrong with one.

    Raises ReaderUnavailable without pyarrow.
    """
    try:
        import pyarrow as pa
    except ImportError as exc:
        raise ReaderUnavailable("batches of CSV columns need pyarrow: pip install 'edl-torch[csv]'") from exc
    try:
        if dialect.encoding.lower() not in ("utf-8", "utf8"):
            data = data.decode(dialect.encoding).encode()
        table = _parsed(data, dialect, layout)
    except (pa.ArrowException, UnicodeError, OverflowError):
        return None
    if table.num_rows != count:
        return None
    columns: Columns = {}
    for place, (name, kind) in enumerate(layout.columns):
        column = _column(table.column(place).combine_chunks(), kind, layout.fill_nulls.get(name))
        if column is None:
            return None
        columns[name] = column
    return columns


def _parsed(data: bytes, dialect: CsvDialect, layout: CsvLayout) -> Any:
    import pyarrow as pa
    from pyarrow import csv

    # Blank lines are no records: one in front hides a byte order mark that is data, one behind ends a file's
    # last line.
    data = b"\n" + data + b"\n"
    return csv.read_csv(
        pa.BufferReader(data),
        read_options=csv.ReadOptions(
            column_names=list(layout.names), use_threads=False, block_size=len(data)
        ),
        parse_options=csv.ParseOptions(
            delimiter=dialect.delimiter, quote_char=dialect.quote_char or False, newlines_in_values=True
        ),
        convert_options=csv.ConvertOptions(
            column_types={name: _arrow_type(pa, kind) for name, kind in layout.columns},
            include_columns=[name for name, _ in layout.columns],
            null_values=sorted(layout.nulls),
            true_values=TRUE,
            false_values=FALSE,
            strings_can_be_null=False,
        ),
    )


def columns_of(rows: list[dict[str, Any]], layout: CsvLayout) -> Columns:
    """The same of parsed records: for what Arrow cannot decode and Python can."""
    return {
        name: np.fromiter((row[name] for row in rows), dtype=kind.dtype, count=len(rows))
        for name, kind in layout.columns
    }


def _column(array: Any, kind: ColumnType, fill: Any) -> Column | None:
    """A writable array of the type; None if there is a null without a value."""
    if kind.name == "str":
        return text_values(array)
    with np.errstate(over="ignore"):
        values = plain_values(array).astype(kind.dtype, copy=False)
    if array.null_count:
        if fill is None and not kind.has_nulls:
            return None
        if fill is not None:
            values[~valid(array)] = fill
    return values


def _arrow_type(pa: Any, kind: ColumnType) -> Any:
    """Of float32 too float64: it is rounded once more in both halves."""
    if kind.name == "str":
        return pa.string()
    if kind.name == "bool":
        return pa.bool_()
    return pa.float64() if kind.name == "float32" else getattr(pa, kind.name)()
