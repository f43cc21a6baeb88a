"""Many CSV records as one batch of numpy columns, parsed by Arrow in one call.

The columns half of `csv_rows`. It must not know where the bytes come from.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from edl_torch.errors import BadRecord, ReaderUnavailable
from edl_torch.readers.csv_rows import CsvDialect, CsvLayout
from edl_torch.readers.csv_types import FALSE, TRUE, ColumnType

Columns = dict[str, np.ndarray[Any, np.dtype[Any]]]


def arrow_columns(data: bytes, count: int, dialect: CsvDialect, layout: CsvLayout) -> Columns | None:
    """The columns of `count` records with any blank lines between them; None if something is wrong with one.

    Raises ReaderUnavailable without pyarrow.
    """
    try:
        import pyarrow as pa
        from pyarrow import csv
    except ImportError as exc:
        raise ReaderUnavailable("batches of CSV columns need pyarrow: pip install 'edl-torch[csv]'") from exc
    from edl_torch.readers.arrow_columns import numpy_columns

    # Blank lines are no records: one in front hides a byte order mark that is data, one behind ends a file's
    # last line.
    data = b"\n" + data + b"\n"
    wanted = [name for name, _ in layout.columns]
    try:
        if dialect.encoding.lower() not in ("utf-8", "utf8"):
            data = data.decode(dialect.encoding).encode()
        table = csv.read_csv(
            pa.BufferReader(data),
            read_options=csv.ReadOptions(
                column_names=list(layout.names), use_threads=False, block_size=max(len(data), 1)
            ),
            parse_options=csv.ParseOptions(
                delimiter=dialect.delimiter, quote_char=dialect.quote_char or False, newlines_in_values=True
            ),
            convert_options=csv.ConvertOptions(
                column_types={name: _arrow_type(pa, kind) for name, kind in layout.columns},
                include_columns=wanted,
                null_values=sorted(layout.nulls),
                true_values=TRUE,
                false_values=FALSE,
                strings_can_be_null=False,
            ),
        )
        if table.num_rows != count:
            return None
        columns: Columns = numpy_columns(table, layout.fill_nulls)
    except (pa.ArrowException, UnicodeError, OverflowError, BadRecord):
        return None
    with np.errstate(over="ignore"):
        return {name: columns[name].astype(kind.dtype, copy=False) for name, kind in layout.columns}


def columns_of(rows: list[dict[str, Any]], layout: CsvLayout) -> Columns:
    """The same of parsed records: for what Arrow cannot decode and Python can."""
    return {
        name: np.fromiter((row[name] for row in rows), dtype=kind.dtype, count=len(rows))
        for name, kind in layout.columns
    }


def _arrow_type(pa: Any, kind: ColumnType) -> Any:
    """Of float32 too float64: it is rounded once more in both halves."""
    if kind.name == "str":
        return pa.string()
    if kind.name == "bool":
        return pa.bool_()
    return pa.float64() if kind.name == "float32" else getattr(pa, kind.name)()
