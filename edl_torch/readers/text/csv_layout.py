"""What a CSV file's columns are called and hold, by evidence: its heading, and a sample of records.

It must not know files; it gets fields, and says what it found or that it cannot tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from edl_torch.errors import DataFormatError, InvalidArgument
from edl_torch.readers.text.csv_types import ColumnType, column_type, infer_type, is_number

Header = bool | Literal["auto"]


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
