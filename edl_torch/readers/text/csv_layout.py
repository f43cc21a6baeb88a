"""What a CSV file's columns are called and hold: given, or by its heading and a sample of records.

It must not know files; it gets fields, and says what it found or that it cannot tell. The types accept what
Arrow's CSV conversion accepts, so that rows and columns agree:

| type | fields |
| --- | --- |
| int8 … int64, uint8 … uint64 | digits, `-` in front, or `0x` and the digits of the bits; blanks around |
| float32, float64 | as Python and C write them, `inf`, `nan`; blanks around. float32 is the float64 rounded |
| bool | `true`, `True`, `TRUE`, `1` and `false`, `False`, `FALSE`, `0` |
| str | anything |
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from edl_torch.errors import DataFormatError, InvalidArgument

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

    def converter(self) -> Convert:
        """The function from field to Python value."""
        kind = self.dtype.kind
        if kind == "f":
            return _to_float32 if self.name == "float32" else _to_float
        if kind == "b":
            return _to_bool
        return _integers(self.dtype) if kind in "iu" else str


_ALIASES: dict[Any, str] = {
    int: "int64",
    float: "float64",
    "int": "int64",
    "float": "float64",
    "double": "float64",
    "string": "str",
    "boolean": "bool",
}
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


def _to_float32(field: str) -> float:
    with np.errstate(over="ignore"):
        return float(np.float32(_to_float(field)))


def _to_bool(field: str) -> bool:
    try:
        return _BOOLS[field]
    except KeyError:
        raise ValueError(field) from None


def _integers(dtype: np.dtype[Any]) -> Convert:
    limits = np.iinfo(dtype)
    low, high, digits = int(limits.min), int(limits.max), dtype.itemsize * 2
    pattern = _SIGNED if low else _UNSIGNED

    def convert(field: str) -> int:
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
        return value

    return convert
