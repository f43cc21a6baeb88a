"""What a map-style dataset is made of, for its fingerprint: no record of it is asked for.

A record may be drawn at random, cost much or open a file that a fork must not inherit. So the object's own
attributes are looked at: tensors, arrays, tables and lists of plain values that have as many entries as the
dataset has records, and datasets inside it, as `Subset` and `ConcatDataset` have. One may be filled as it is
used: what a dataset lacks at one time, and has at another, tells nothing. It must not import torch.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Sized
from contextlib import suppress
from typing import Any

import numpy as np

from edl_torch.fingerprint import Fingerprint, Part
from edl_torch.readers.shared.files import FileStamp
from edl_torch.readers.shared.looks import (
    ARRAYS_OWN,
    LISTED_BYTES,
    Unlike,
    below,
    chosen,
    listing,
    records,
)

_MOST_INSIDE = 256  # datasets of a ConcatDataset
_SEEN = 64
_DEEPEST = 4  # containers in an entry in which paths are looked for

_Place = tuple[Any, ...]  # keys and numbers that lead to a value in an entry


def fingerprint_of(dataset: Any) -> Fingerprint | None:
    """Return the fingerprint of a dataset by what it is made of; None where that tells nothing."""
    made_of = _MadeOf()
    made_of.look_at(dataset, "")
    parts = made_of.parts
    strength = "partly" if made_of.lacks else "sampled"
    if sum(len(name) + len(look) for name, look in parts) > LISTED_BYTES:  # thousands of arrays
        return listing(strength, [name for name, _ in parts], dict(enumerate(look for _, look in parts)))
    samples: Any = getattr(dataset, "__dict__", {}).get("samples")
    if _are_files(samples, len(dataset)):
        return listing("names", _relative([sample[0] for sample in samples], dataset), {}, attributes=parts)
    return Fingerprint.of(strength, (), attributes=parts) if parts else None


def mapped_files(dataset: Any) -> list[FileStamp]:
    """Return the files that arrays of a dataset are mapped from (`np.load(mmap_mode="r")`), as they are."""
    held = [dataset]
    for value in getattr(dataset, "__dict__", {}).values():
        is_few = isinstance(value, list | tuple) and len(value) <= _MOST_INSIDE
        held += value if is_few else [value]
    mapped = (one for one in held if isinstance(one, np.memmap) and one.mode in ("r", "c"))
    return [FileStamp.of(one.filename) for one in mapped if one.filename and os.path.isfile(one.filename)]


class _MadeOf:
    """What a dataset has, each with its name within it and a digest, and whether it may have more."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.lacks = False  # something that may hold records, and does not tell
        self._met: list[Any] = []  # kept, so that no other object gets the id of one

    def look_at(self, found: Any, name: str) -> None:
        """Look at an array, a table or a list, or at the attributes of any other dataset, however deep."""
        if any(found is one for one in self._met):
            return
        with suppress(Unlike, OSError, *ARRAYS_OWN):  # what cannot be looked at tells nothing
            self.parts.append((name or "values", _digest(found)))
            return
        known, count = len(self.parts), None
        if not _is_container(found):
            self._met.append(found)
            with suppress(OSError, *ARRAYS_OWN):  # as an open stream, which has no length
                count = len(found)
        if count is not None:
            for attribute, value in sorted(getattr(found, "__dict__", {}).items()):
                self._look_inside(value, f"{name}.{attribute}" if name else attribute, count)
        self.lacks |= known == len(self.parts)

    def _look_inside(self, value: Any, name: str, count: int) -> None:
        """Look at an attribute of what has so many records."""
        if _has_entries(value, count) or (_is_map_style(value) and not _is_container(value)):
            self.look_at(value, name)
        elif inside := _inside(value):
            for place in chosen(len(inside), _MOST_INSIDE):
                self.look_at(inside[place], f"{name}[{place}]")
            self.lacks |= len(inside) > _MOST_INSIDE
        else:
            self.lacks |= _may_hold_records(value, count)


def _digest(found: Any) -> str:
    """A digest of some entries of what holds plain values or arrays. Raises `Unlike` for anything else."""
    if _has(found, "column_names", "with_format"):  # Hugging Face `datasets`
        rows = found.with_format("arrow")  # as they are kept: nothing is decoded
        return _of_some(found, lambda place: [found.column_names, _row_of(rows[place : place + 1])])
    if _has(found, "iloc"):  # pandas
        names = list(getattr(found, "columns", ()))
        return _of_some(found, lambda place: [names, _listed(found.iloc[place])])
    if isinstance(found, list | tuple | range):
        if any(found[place] is None for place in chosen(len(found), _SEEN)):
            raise Unlike  # a list that is filled as it is used has None before
        return _of_some(found, found.__getitem__)
    if _is_array(found) and found.shape:
        is_text = getattr(found.dtype, "kind", "") in ("U", "O")
        read = found.__getitem__
        return _of_some(found, read) if is_text else records(len(found), read)
    raise Unlike


def _has(value: Any, *names: str) -> bool:
    """Whether its class has these: a wrapper that passes on what it lacks is not what it wraps."""
    return all(hasattr(type(value), name) for name in names)


def _of_some(found: Any, value_of: Callable[[int], Any]) -> str:
    """A digest of some values. A path in them counts from the folder common to those in its place."""
    places = chosen(len(found), _SEEN)
    values = [value_of(place) for place in places]
    paths: defaultdict[_Place, list[str]] = defaultdict(list)

    def note(place: _Place, path: str) -> str:
        paths[place].append(path)
        return path

    for value in values:
        _with_paths(value, (), note)
    short = {place: dict(zip(found, below(found), strict=True)) for place, found in paths.items()}
    values = [_with_paths(value, (), lambda place, path: short[place][path]) for value in values]
    return records(len(found), dict(zip(places, values, strict=True)).__getitem__)


def _with_paths(value: Any, place: _Place, told: Callable[[_Place, str], str]) -> Any:
    """The value with what is `told` of each absolute path in it."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str):
        return told(place, value) if os.path.isabs(value) else value
    if len(place) == _DEEPEST:
        return value
    if isinstance(value, Mapping):
        return {key: _with_paths(item, (*place, key), told) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_paths(item, (*place, number), told) for number, item in enumerate(value)]
    return value


def _row_of(table: Any) -> list[Any]:
    """One row of Arrow's; the paths that images came from lie elsewhere on other hosts."""
    return [_without_folder(value) for value in table.to_pylist()[0].values()]


def _without_folder(value: Any) -> Any:
    if isinstance(value, Mapping) and value.keys() == {"bytes", "path"}:
        return [value["bytes"], os.path.basename(value["path"] or "")]
    return value


def _listed(row: Any) -> Any:
    return row.tolist() if hasattr(row, "tolist") else row


def _is_array(value: Any) -> bool:
    return _has(value, "shape", "dtype", "__array__", "__getitem__")


def _is_container(value: Any) -> bool:
    return isinstance(value, str | bytes | list | tuple | range | Mapping) or _is_array(value)


def _is_map_style(value: Any) -> bool:
    is_text = isinstance(value, str | bytes | Mapping | type)
    return not is_text and isinstance(value, Sized) and _has(value, "__getitem__")


def _has_entries(value: Any, count: int) -> bool:
    is_one = isinstance(value, list | tuple | range) or _has(value, "iloc") or _is_array(value)
    return is_one and (not _is_array(value) or bool(value.shape)) and len(value) == count


def _inside(value: Any) -> list[Any]:
    """The datasets and arrays in a list, as `ConcatDataset` and `TensorDataset` have."""
    if not isinstance(value, list | tuple):
        return []
    return [one for one in value if _is_map_style(one) and not isinstance(one, list | tuple | range)]


def _may_hold_records(value: Any, count: int) -> bool:
    """Whether records may lie in what has not one entry for each: arrays by name, tokens."""
    if isinstance(value, Mapping):
        return len(value) >= count or any(
            _is_array(each) or _has_entries(each, count) for each in value.values()
        )
    if isinstance(value, list | tuple):
        return any(isinstance(each, list | tuple | Mapping) for each in value[:_SEEN])
    return _is_array(value) and bool(value.shape) and max(value.shape) >= count


def _are_files(samples: Any, count: int) -> bool:
    """Whether it is torchvision's list: of each record its file and its class."""
    if not isinstance(samples, list) or not 0 < count == len(samples):
        return False
    return all(isinstance(s, tuple) and s and isinstance(s[0], str) for s in samples)


def _relative(files: Sequence[str], dataset: Any) -> list[str]:
    root = getattr(dataset, "root", None)
    if isinstance(root, str | os.PathLike):
        start = os.path.join(os.fspath(root), "")
        if all(file.startswith(start) for file in files):
            return [file[len(start) :] for file in files]
    return below(files)
