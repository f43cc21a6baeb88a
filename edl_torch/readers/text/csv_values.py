"""CSV records from their bytes: names, types and values of columns; one as a row, many as columns by Arrow.

It must not know files; what is wrong with a record is a ValueError, without the place. Types are given, or
inferred from a sample. They accept what Arrow's CSV conversion accepts, so that rows and columns agree:

| type | fields |
| --- | --- |
| int8 … int64, uint8 … uint64 | digits, `-` in front, or `0x` and the digits of the bits; blanks around |
| float32, float64 | as Python and C write them, `inf`, `nan`; blanks around. float32 is the float64 rounded |
| bool | `true`, `True`, `TRUE`, `1` and `false`, `False`, `FALSE`, `0` |
| str | anything |
"""

from __future__ import annotations

import codecs
import csv
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from edl_torch.errors import DataFormatError, InvalidArgument
from edl_torch.readers.arrow import Column, plain_values, text_values, valid
from edl_torch.readers.shared.packages import required
from edl_torch.readers.text.row_index import RowRules

Header = bool | Literal["auto"]
TRUE = ("true", "True", "TRUE", "1")
FALSE = ("false", "False", "FALSE", "0")
_BOOLS = dict.fromkeys(TRUE, True) | dict.fromkeys(FALSE, False)
_BLANKS = " \t"
_SIGNED = re.compile(r"-?[0-9]+")
_UNSIGNED = re.compile(r"[0-9]+")
_HEX = re.compile(r"0[xX]([0-9A-Fa-f]+)")
_FLOAT = re.compile(
    r"[+-]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|inf(?:inity)?|(nan)(?:\([A-Za-z0-9_]*\))?)",
    re.IGNORECASE | re.ASCII,
)

Convert = Callable[[str], Any]  # raises ValueError


def has_heading(rows: Sequence[Sequence[str]], nulls: frozenset[str], file: str) -> bool:
    """Whether the first of some records is a heading. Raises DataFormatError where that cannot be told.

    It is none if one of its fields is a number or two are the same. It is one if below it, in some column,
    most values are numbers.
    """
    first, rest = rows[0], rows[1:]
    if any(is_number(field) for field in first) or len(set(first)) < len(first):
        return False
    for column in range(len(first)):
        values = [row[column] for row in rest if len(row) == len(first) and row[column] not in nulls]
        if values and 2 * sum(map(is_number, values)) > len(values):
            return True
    raise DataFormatError(
        f"'{file}': whether its first line ({','.join(first)[:80]}) is a heading cannot be told, because "
        "no column holds numbers: pass header=True or header=False"
    )


def column_names(
    first: Sequence[str], heading: bool, names: Sequence[str] | None, file: str
) -> tuple[str, ...]:
    """The names of all columns: given, from the heading, or f0, f1, …

    Raises InvalidArgument, DataFormatError.
    """
    if isinstance(names, str):
        raise InvalidArgument(f"names={names!r} is one string: pass a sequence of column names")
    if names is not None and len(names) != len(first):
        raise InvalidArgument(
            f"names= has {len(names)} columns, but '{file}' has {len(first)}: {list(first)[:20]}"
        )
    if names is not None:
        found = tuple(names)
    else:
        found = tuple(first) if heading else tuple(f"f{number}" for number in range(len(first)))
    if len(set(found)) < len(found):
        twice = next(name for name in found if found.count(name) > 1)
        raise DataFormatError(f"'{file}' has two columns called {twice!r}: name all of them with names=")
    return found


def chosen_columns(
    names: tuple[str, ...], columns: Sequence[str] | None, dtypes: Mapping[str, Any] | None, file: str
) -> tuple[tuple[str, ...], dict[str, ColumnType]]:
    """The wanted columns, in the order wanted, and the types that were given. Raises InvalidArgument."""
    if isinstance(columns, str):
        raise InvalidArgument(f"columns={columns!r} is one string: pass a sequence of column names")
    wanted = names if columns is None else tuple(columns)
    for option, used in (("columns", wanted), ("dtypes", tuple(dtypes or ()))):
        for name in used:
            if name not in names:
                raise InvalidArgument(f"{option}= names {name!r}, but '{file}' has the columns {list(names)}")
    if not wanted or len(set(wanted)) < len(wanted):
        raise InvalidArgument(f"columns={list(wanted)}: name at least one column, and each once")
    return wanted, {name: column_type(given, name) for name, given in (dtypes or {}).items()}


def inferred(
    rows: Iterable[Sequence[str]], names: tuple[str, ...], missing: Sequence[str], nulls: frozenset[str]
) -> dict[str, ColumnType]:
    """Types from a sample; records of another width say nothing."""
    sample = [row for row in rows if len(row) == len(names)]
    places = {name: place for place, name in enumerate(names)}
    return {name: infer_type([row[places[name]] for row in sample], nulls) for name in missing}


def checked_fills(fills: Mapping[str, Any] | None, types: Mapping[str, ColumnType]) -> dict[str, Any]:
    """`fill_nulls` as values of their columns' types. Raises InvalidArgument."""
    checked = {}
    for name, value in (fills or {}).items():
        kind = types.get(name)
        if kind is None:
            raise InvalidArgument(f"fill_nulls names {name!r}, which is none of the columns {list(types)}")
        try:
            if kind.name == "str":
                raise ValueError("an empty field is the empty text there")
            checked[name] = kind.converter()(str(value))
        except ValueError as exc:
            raise InvalidArgument(
                f"fill_nulls[{name!r}] = {value!r} is no value of the type {kind.name}"
            ) from exc
    return checked


@dataclass(frozen=True, slots=True)
class ColumnType:
    """One type; `null` is its value for an empty field, if it has one."""

    name: str

    @property
    def dtype(self) -> np.dtype[Any]:
        """The numpy type of a column; strings are Python objects."""
        return np.dtype(object if self.name == "str" else self.name)

    @property
    def has_nulls(self) -> bool:
        """Whether an empty field has a value without `fill_nulls`: NaN, or the empty text."""
        return self.dtype.kind in "fO"

    @property
    def scalar(self) -> Callable[[Any], Any] | None:
        """numpy's type of values that are not Python's own: a batch of rows has the type of a column."""
        return None if self.name in _PYTHONS else self.dtype.type

    def converter(self) -> Convert:
        """The function from field to value."""
        kind = self.dtype.kind
        if kind == "f":
            return _to_float32 if self.name == "float32" else _to_float
        if kind == "b":
            return _to_bool
        return _integers(self.dtype, self.scalar) if kind in "iu" else str


_ALIASES: dict[Any, str] = {
    int: "int64",
    float: "float64",
    "int": "int64",
    "float": "float64",
    "double": "float64",
    "string": "str",
    "boolean": "bool",
}
_PYTHONS = ("int64", "float64", "bool", "str")
_NAMES = {
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *("float32", "float64", "bool", "str"),
}


def column_type(given: Any, column: str) -> ColumnType:
    """The type that a user names: "int64", `int`, `np.float32`, … Raises InvalidArgument."""
    name = _ALIASES.get(given) if isinstance(given, str | type) else None
    if name is None and isinstance(given, str) and given in _NAMES:
        name = given
    if name is None and given is not None and not isinstance(given, str):
        try:
            name = np.dtype(given).name
        except TypeError:
            name = repr(given)
    name = "str" if name in ("str0", "object") else name
    if name not in _NAMES:
        raise InvalidArgument(
            f"dtypes[{column!r}] = {given!r} is no type of a CSV column: use int8 … int64, uint8 … uint64, "
            "float32, float64, bool or str"
        )
    return ColumnType(name)


def infer_type(fields: Iterable[str], nulls: frozenset[str]) -> ColumnType:
    """The narrowest of int64, float64, bool and str that takes all fields; a column without a value is str.

    Integers with empty fields among them are float64, which has NaN for those.
    """
    given = list(fields)
    present = [field for field in given if field not in nulls]
    if not present:
        return ColumnType("str")
    for name in ("int64", "float64", "bool"):
        found = ColumnType(name)
        if (found.has_nulls or len(present) == len(given)) and _takes_all(found.converter(), present):
            return found
    return ColumnType("str")


def is_number(field: str) -> bool:
    """Whether a field is a number in digits; `nan` and `inf` are words."""
    return _takes_all(_to_float, [field]) and any(character.isdigit() for character in field)


def _takes_all(convert: Convert, fields: list[str]) -> bool:
    try:
        for field in fields:
            convert(field)
    except ValueError:
        return False
    return True


def _to_float(field: str) -> float:
    text = field.strip(_BLANKS)
    found = _FLOAT.fullmatch(text)
    if found is None:
        raise ValueError(field)
    return float("nan") if found[1] else float(text)


def _to_float32(field: str) -> np.float32:
    with np.errstate(over="ignore"):
        return np.float32(_to_float(field))


def _to_bool(field: str) -> bool:
    try:
        return _BOOLS[field]
    except KeyError:
        raise ValueError(field) from None


def _integers(dtype: np.dtype[Any], scalar: Callable[[Any], Any] | None) -> Convert:
    limits = np.iinfo(dtype)
    low, high, digits = int(limits.min), int(limits.max), dtype.itemsize * 2
    pattern = _SIGNED if low else _UNSIGNED

    def convert(field: str) -> Any:
        text = field.strip(_BLANKS)
        if pattern.fullmatch(text):
            value = int(text)
        elif (found := _HEX.fullmatch(text)) and len(found[1]) <= digits:
            value = int(found[1], 16)
            value -= (value > high) << (4 * digits)  # the bits of a negative number
        else:
            raise ValueError(field)
        if not low <= value <= high:
            raise ValueError(field)
        return value if scalar is None else scalar(value)

    return convert


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
    each_byte_alone = len(str(bytes(range(256)), encoding, "replace")) == 256
    hidden = not each_byte_alone and any(c >= "0" for c in specials)
    if shifting or not ascii_kept or (hidden and name != "utf-8"):
        raise InvalidArgument(
            f"encoding={encoding!r} cannot be read from the middle with "
            f"{' '.join(map(repr, specials)) or 'it'}: convert the file to UTF-8"
        )


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
