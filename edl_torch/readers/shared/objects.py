"""What a map-style dataset is made of, for its fingerprint: no record of it is asked for.

A record may be drawn at random, cost much or open a file that a fork must not inherit. So the object's own
attributes are looked at: tensors, arrays, tables and lists of plain values that have as many entries as the
dataset has records, and datasets inside it, as `Subset` and `ConcatDataset` have. It must not import torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from typing import Any

from edl_torch.fingerprint import Fingerprint
from edl_torch.readers.shared.looks import ARRAYS_OWN, Part, Unlike, below, chosen, listing, records

_DEEPEST = 3
_MOST_INSIDE = 256  # datasets of a ConcatDataset
_SEEN = 64
_Plain = str | int | float | bytes


def fingerprint_of(dataset: Any) -> Fingerprint | None:
    """Return the fingerprint of a dataset by what it is made of; None where that tells nothing."""
    parts = list(_parts(dataset, "", _DEEPEST))
    samples: Any = getattr(dataset, "samples", None)
    if _are_files(samples, len(dataset)):
        return listing("names", _relative([sample[0] for sample in samples], dataset), {}, parts)
    return Fingerprint.of("sampled", len(parts), parts) if parts else None


def _parts(found: Any, name: str, depth: int) -> Iterator[Part]:
    """What an object has, each with its name within the dataset and a digest."""
    if not depth:
        return
    with suppress(Unlike, OSError, *ARRAYS_OWN):  # what cannot be looked at tells nothing
        yield name or "values", _digest(found)
        return
    for attribute, value in sorted(getattr(found, "__dict__", {}).items()):
        called = f"{name}.{attribute}" if name else attribute
        if _has_entries(value, len(found)) or (_is_map_style(value) and not _is_container(value)):
            yield from _parts(value, called, depth - 1)
        elif isinstance(value, list | tuple) and len(value) <= _MOST_INSIDE:
            for place, one in enumerate(value):
                if _is_map_style(one) and not isinstance(one, list | tuple | range):
                    yield from _parts(one, f"{called}[{place}]", depth - 1)


def _digest(found: Any) -> str:
    """A digest of some entries of what holds plain values or arrays. Raises `Unlike` for anything else."""
    if hasattr(found, "column_names") and hasattr(found, "with_format"):  # Hugging Face `datasets`
        rows = found.with_format("arrow")  # as they are kept: nothing is decoded
        return records(len(found), lambda place: [found.column_names, _row_of(rows[place : place + 1])])
    if hasattr(found, "iloc"):  # pandas
        return records(len(found), lambda place: _listed(found.iloc[place]))
    if isinstance(found, list | tuple | range):
        places = chosen(len(found), _SEEN)
        values: list[Any] = [found[place] for place in places]
        if not all(map(_is_plain, values)) or any(value is None for value in values):
            raise Unlike  # a list that is filled as it is used has None before
        values = _below_a_folder(values)
        return records(len(found), dict(zip(places, values, strict=True)).__getitem__)
    if _is_array(found) and found.shape:
        return records(len(found), found.__getitem__)
    raise Unlike


def _below_a_folder(values: list[Any]) -> list[Any]:
    """Values that are paths, or begin with one, with what these are below the folder that has them all."""
    firsts = [value[0] if isinstance(value, tuple) and value else value for value in values]
    if not all(isinstance(first, str) and os.path.isabs(first) for first in firsts):
        return values
    return [
        [name, *value[1:]] if isinstance(value, tuple) else name
        for name, value in zip(below(firsts), values, strict=True)
    ]


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
    return hasattr(value, "shape") and hasattr(value, "dtype") and hasattr(value, "__getitem__")


def _is_container(value: Any) -> bool:
    return isinstance(value, str | bytes | list | tuple | range | Mapping) or _is_array(value)


def _is_map_style(value: Any) -> bool:
    is_text = isinstance(value, str | bytes | Mapping | type)
    return not is_text and isinstance(value, Sized) and hasattr(value, "__getitem__")


def _has_entries(value: Any, count: int) -> bool:
    is_one = isinstance(value, list | tuple | range) or hasattr(value, "iloc") or _is_array(value)
    return is_one and (not _is_array(value) or bool(value.shape)) and len(value) == count


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, tuple | list):
        return len(value) <= _SEEN and all(map(_is_plain, value))
    return value is None or isinstance(value, _Plain) or _is_array(value) or hasattr(value, "item")


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
