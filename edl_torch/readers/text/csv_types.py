"""The types of CSV columns: how a field becomes a value, and which type a sample of fields has.

They accept what Arrow's CSV conversion accepts, so that rows and columns agree. It must not know of rows.

| type | fields |
| --- | --- |
| int8 … int64, uint8 … uint64 | digits, `-` in front, or `0x` and the digits of the bits; blanks around |
| float32, float64 | as Python and C write them, `inf`, `nan`; blanks around. float32 is the float64 rounded |
| bool | `true`, `True`, `TRUE`, `1` and `false`, `False`, `FALSE`, `0` |
| str | anything |
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from edl_torch.errors import InvalidArgument

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
