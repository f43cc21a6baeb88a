"""Records as values that JSON has, and back, by their definitions: journals, tokens, audit logs, links.

A record is a dataclass. As a row it is a tuple of its fields in order, with those of a record in it in its
place; as an object it is a dict of the same values by name. A tuple of records is a tuple of rows, a member
of an enum its name where it is a number, else its value; bytes are base64. A number, a text or a switch has
to be what the field says; the rest is not looked at.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache, partial
from operator import attrgetter
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")

Row = tuple[Any, ...]
_Change = Callable[[Any], Any]
_EXACT = (int, str, bool)  # a switch is no number here


@cache
def row_maker(kind: Any) -> Callable[[Any], Row]:
    """Return the function that makes rows of such records. It costs little more than to take the fields."""
    leaves = list(_leaves(kind))
    take: Callable[[Any], Row] = attrgetter(*(path for path, _ in leaves))
    changes = [(place, made[0]) for place, (_, hint) in enumerate(leaves) if (made := _changes(hint))]

    def make(record: Any) -> Row:
        row = list(take(record))
        for place, change in changes:
            row[place] = change(row[place])
        return tuple(row)

    return make if changes else take


def row_of(record: Any) -> Row:
    kind: Any = type(record)
    return row_maker(kind)(record)


def object_of(record: Any) -> dict[str, Any]:
    """Return a record, in which others stand in tuples alone, as an object."""
    kind: Any = type(record)
    return dict(zip(_hints(kind), row_maker(kind)(record), strict=True))


def from_row(kind: type[T], row: Iterable[Any]) -> T:
    """Return the record of a row. Raises ValueError, TypeError or KeyError for what is none."""
    values = iter(row)
    try:
        record: T = _taken(kind, values)
    except StopIteration:
        raise ValueError(f"a row of {kind.__name__} that is too short") from None
    if any(True for _ in values):
        raise ValueError(f"a row of {kind.__name__} that is too long")
    return record


def from_object(kind: type[T], values: Mapping[str, Any]) -> T:
    """Return the record of an object, which may have more. Raises as `from_row`."""
    shape: Any = kind
    return from_row(kind, [values[name] for name in _hints(shape)])


def _taken(kind: Any, values: Iterator[Any]) -> Any:
    return kind(**{name: take(values) for name, take in _takers(kind)})


@cache
def _takers(kind: Any) -> tuple[tuple[str, Callable[[Iterator[Any]], Any]], ...]:
    """Name of each field, and what takes it from the values of a row."""
    return tuple((name, _taker(hint)) for name, hint in _hints(kind).items())


def _taker(hint: Any) -> Callable[[Iterator[Any]], Any]:
    if is_dataclass(hint):
        return partial(_taken, hint)
    if changes := _changes(hint):
        back = changes[1]
        return lambda values: back(next(values))
    if hint in _EXACT:
        return lambda values: _exact(hint, next(values))
    return next


def _exact(kind: Any, value: Any) -> Any:
    """Return a value. Raises TypeError for one of another type, as a text where a number belongs."""
    if type(value) is not kind:
        raise TypeError(f"{value!r} in the place of {kind.__name__}")
    return value


@cache
def _hints(kind: Any) -> dict[str, Any]:
    """Return the type of each field."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _leaves(kind: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Each value of a row: where it is found in the record, and its type."""
    for name, hint in _hints(kind).items():
        if is_dataclass(hint):
            yield from _leaves(hint, f"{path}{name}.")
        else:
            yield path + name, hint


@cache
def _changes(hint: Any) -> tuple[_Change, _Change] | None:
    """Return how a value of this type goes into a row and comes back; None where it stays as it is."""
    item: Any = next(iter(get_args(hint)), None)
    if is_dataclass(item):  # of a tuple
        record: Any = item
        make, back = row_maker(record), partial(from_row, record)
        return (lambda records: tuple(map(make, records))), lambda rows: tuple(map(back, rows))
    if get_origin(hint) is tuple and item in (int, str):
        return tuple, lambda values: tuple([_exact(item, value) for value in values])  # JSON has lists
    if hint is bytes:
        return (lambda raw: b64encode(raw).decode()), partial(b64decode, validate=True)
    if isinstance(hint, type) and issubclass(hint, Enum):
        is_number = issubclass(hint, int)
        return attrgetter("name" if is_number else "value"), hint.__getitem__ if is_number else hint
    return None
