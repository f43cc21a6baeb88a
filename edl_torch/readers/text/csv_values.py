"""CSV records from their bytes: one as fields and then values, many as columns by Arrow, with equal results.

It must not know where the bytes come from; what is wrong with a record is a ValueError, without the place.
"""

from __future__ import annotations

import codecs
import csv
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edl_torch.errors import InvalidArgument
from edl_torch.readers.arrow import Column, plain_values, text_values, valid
from edl_torch.readers.base import required
from edl_torch.readers.text.csv_layout import FALSE, TRUE, ColumnType, Convert
from edl_torch.readers.text.row_index import RowRules

_FORBIDDEN = frozenset("\r\n\0")
Columns = dict[str, Column]


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvDialect:
    """How records are cut into fields, and bytes become text.

    Raises InvalidArgument for what cannot be scanned.
    """

    delimiter: str = ","
    quote_char: str | None = '"'
    encoding: str = "utf-8"

    def __post_init__(self) -> None:
        for name, value in (("delimiter", self.delimiter), ("quote_char", self.quote_char)):
            if value is not None and (len(value) != 1 or not value.isascii() or value in _FORBIDDEN):
                raise InvalidArgument(f"{name}={value!r} is not one ASCII character (other than a line end)")
        if self.delimiter == self.quote_char:
            raise InvalidArgument(f"delimiter and quote_char are both {self.delimiter!r}")
        check_encoding(self.encoding, (self.delimiter, self.quote_char or ""))

    @property
    def rules(self) -> RowRules:
        """How a file of this dialect is cut into records."""
        quote = None if self.quote_char is None else ord(self.quote_char)
        return RowRules(quote=quote, delimiter=None if quote is None else ord(self.delimiter))

    def fields(self, row: bytes, errors: str = "strict") -> list[str]:
        """The fields of one record. Raises UnicodeDecodeError for bytes that are not of the encoding."""
        text = row.rstrip(b"\r\n").decode(self.encoding, errors)
        quote = self.quote_char
        if quote is None or quote not in text:
            return text.split(self.delimiter)
        if len(text) > csv.field_size_limit():  # a limit of the whole process, which is not ours to change
            return self._split_quoted(text, quote)
        return next(csv.reader([text], delimiter=self.delimiter, quotechar=quote))

    def _split_quoted(self, text: str, quote: str) -> list[str]:
        q, d = re.escape(quote), re.escape(self.delimiter)
        pattern = re.compile(rf"(?:{q}((?:[^{q}]|{q}{q})*){q})?([^{d}]*)(?:{d}|\Z)", re.DOTALL)
        found, position = [], 0
        while position <= len(text):
            piece = pattern.match(text, position)
            assert piece is not None, "every text matches: the quoted part is optional"
            found.append((piece[1] or "").replace(quote * 2, quote) + piece[2])
            if not piece[0].endswith(self.delimiter):
                break
            position = piece.end()
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvLayout:
    """What a record has: all fields of the file by name, and the ones that are wanted, with their types."""

    names: tuple[str, ...]
    columns: tuple[tuple[str, ColumnType], ...]
    nulls: frozenset[str] = frozenset()
    fill_nulls: dict[str, Any] = field(default_factory=dict)
    as_tuples: bool = False


class RowParser:
    """Bytes of one record to `{column: value}`, or a tuple of values."""

    def __init__(self, dialect: CsvDialect, layout: CsvLayout) -> None:
        self._dialect, self._layout = dialect, layout
        self._plan = [
            (name, layout.names.index(name), _with_nulls(kind, layout, name)) for name, kind in layout.columns
        ]

    def __reduce__(self) -> tuple[type[RowParser], tuple[CsvDialect, CsvLayout]]:
        return type(self), (self._dialect, self._layout)

    def parse(self, row: bytes) -> Any:
        """Raises ValueError that says what is wrong with the record."""
        try:
            fields = self._dialect.fields(row)
        except UnicodeDecodeError as exc:
            fields = self._undecodable(row, exc)
        except csv.Error as exc:
            raise ValueError(f"is not CSV: {exc}") from exc
        if len(fields) != len(self._layout.names):
            raise ValueError(f"has {len(fields)} fields, expected {len(self._layout.names)}")
        values = {name: self._value(name, fields[place], convert) for name, place, convert in self._plan}
        return tuple(values.values()) if self._layout.as_tuples else values

    def _undecodable(self, row: bytes, error: UnicodeDecodeError) -> list[str]:
        """The fields, if the bytes that are not text lie in columns that nobody asked for."""
        fields = self._dialect.fields(row, "surrogateescape")
        for name, place, _ in self._plan:
            if place < len(fields) and any("\udc80" <= character <= "\udcff" for character in fields[place]):
                raise ValueError(
                    f"is not {self._dialect.encoding} in column {name!r}: {error.reason} at byte "
                    f"{error.start} of the record; name the file's own encoding with encoding="
                ) from error
        return fields

    def _value(self, name: str, text: str, convert: Convert) -> Any:
        try:
            return convert(text)
        except ValueError:
            kind = dict(self._layout.columns)[name].name
        if text in self._layout.nulls:
            raise ValueError(
                f"has nothing in column {name!r} ({kind}): say what stands for it with "
                f"fill_nulls={{{name!r}: …}}"
            )
        shown = text if len(text) <= 80 else text[:80] + "…"
        raise ValueError(
            f"has {shown!r} in column {name!r}, which is no {kind}: mend it, or read the column as another "
            f"type with dtypes={{{name!r}: …}}"
        )


def _with_nulls(kind: ColumnType, layout: CsvLayout, name: str) -> Convert:
    convert, nulls = kind.converter(), layout.nulls
    if kind.name == "str" or not nulls:
        return convert
    if name in layout.fill_nulls or kind.has_nulls:
        null = layout.fill_nulls.get(name, float("nan"))
        return lambda text: null if text in nulls else convert(text)

    def refuse(text: str) -> Any:
        if text in nulls:  # "0" may be one
            raise ValueError(text)
        return convert(text)

    return refuse


def check_encoding(encoding: str, specials: Sequence[str]) -> None:
    """Raise InvalidArgument where line ends or `specials` may be part of another character."""
    try:
        name = codecs.lookup(encoding).name
        ascii_kept = all(c.encode(encoding) == c.encode() for c in ("\n", "\r", *specials))
    except (LookupError, UnicodeError, AttributeError) as exc:
        raise InvalidArgument(f"encoding={encoding!r} is not known to Python") from exc
    shifting = name.startswith(("utf-7", "utf-16", "utf-32", "iso2022", "hz"))
    # The second byte of a character in the encodings of East Asia may be any from 0x30 on.
    hidden = not _each_byte_alone(encoding) and any(c >= "0" for c in specials)
    if shifting or not ascii_kept or (hidden and name != "utf-8"):
        raise InvalidArgument(
            f"encoding={encoding!r} cannot be read from the middle with "
            f"{' '.join(map(repr, specials)) or 'it'}: convert the file to UTF-8"
        )


def _each_byte_alone(encoding: str) -> bool:
    decode: Callable[..., str] = bytes(range(256)).decode
    return len(decode(encoding, "replace")) == 256


def arrow_columns(data: bytes, count: int, dialect: CsvDialect, layout: CsvLayout) -> Columns | None:
    """The columns of `count` records with any blank lines between them; None if something is wrong with one.

    Raises ReaderUnavailable without pyarrow.
    """
    pa = required("pyarrow", "batches of CSV columns need pyarrow: pip install 'edl-torch[csv]'")
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
