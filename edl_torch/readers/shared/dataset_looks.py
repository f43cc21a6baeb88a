"""What a map-style dataset holds, for its fingerprint.

Of a map-style dataset no record is asked for: it may be drawn at random, cost much or open a file that a fork
must not inherit. Its attributes are looked at: tensors, arrays, tables and lists of plain values that have as
many entries as the dataset has records, short tables of names, and datasets inside it, as `Subset` has. One
may be filled as it is used: what a dataset lacks at one time, and has at another, is no difference, but what
was there as a job began must stay.

Samples of all are claimed only of classes whose records are known to be made of what they hold. What the code
of any other class reads beside, nobody can see. It must not import torch.
"""

from __future__ import annotations

import functools
import os
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Sized
from contextlib import suppress
from pathlib import PurePath
from typing import Any

import numpy as np

from edl_torch.errors import EdlError, ReaderError
from edl_torch.fingerprint import VALUES, Fingerprint, Part
from edl_torch.readers.shared.looks import (
    ARRAYS_OWN,
    LISTED_BYTES,
    OF_A_PROCESS,
    Unlike,
    below,
    by_name,
    chosen,
    digest_of,
    is_name,
    is_number,
    listing,
    name_of_function,
    parents_of,
    records,
)

_MOST_INSIDE = 256  # datasets of a ConcatDataset
_MOST_MET = 600  # objects in all, as so many that each wrap one, as `Subset` does
_SEEN = 64
_DEEPEST_PATH = 4  # containers in an entry in which paths are looked for
_MOST_COPIED = 4096  # parts
# Classes whose `__getitem__` makes records of what they hold, and of transforms. Others may read anything.
_KNOWN = {
    *(
        f"torch.utils.data.dataset.{name}"
        for name in ("TensorDataset", "Subset", "ConcatDataset", "StackDataset")
    ),
    *(f"torchvision.datasets.{name}" for name in ("folder.DatasetFolder", "mnist.MNIST", "cifar.CIFAR10")),
    *("torch._C.TensorBase", "datasets.arrow_dataset.Dataset"),
}
_KNOWN_PACKAGES = {"builtins", "numpy", "pandas"}
_PATH = re.compile(r"\w+://\S*|\S*[/\\]\S*|[^\n]*[/\\][^\n]*\.\w{1,8}|\S+\.[A-Za-z]\w{0,7}")
# What other objects say, as without a connection.
_CLOSED = (OSError, AttributeError, ArithmeticError, *ARRAYS_OWN)

_Place = tuple[Any, ...]  # keys and numbers that lead to a value in an entry
_A_PATH: _Place = (os.PathLike,)  # behind those of a path, whatever it looks like


def fingerprint_of(dataset: Any) -> Fingerprint | None:
    """Return the fingerprint of a dataset by what it holds; None where that tells nothing."""
    holds = _Holds()
    holds.look_at(dataset, "")
    parts, strength = holds.parts, holds.strength
    if not any(look for _, look in parts):
        return None
    parts += holds.tables
    if sum(len(name) + len(look) for name, look in parts) > LISTED_BYTES:
        parts = _grouped(parts)  # thousands of arrays
    if sum(len(name) + len(look) for name, look in parts) > LISTED_BYTES:
        return listing(strength, [name for name, _ in parts], dict(enumerate(look for _, look in parts)))
    samples: Any = getattr(dataset, "__dict__", {}).get("samples")
    if _are_files(samples, len(dataset)):
        files = [sample[0] for sample in samples]
        short = _short(files, _root_of(dataset))
        files = [short.get(file, file) for file in files]
        return listing(strength, files, {}, attributes=parts)
    return Fingerprint.of(strength, (), attributes=parts)


def _grouped(parts: Sequence[Part]) -> list[Part]:
    """One part for all whose names differ in numbers alone; "" where one of them is still to be filled."""
    groups: defaultdict[str, list[Part]] = defaultdict(list)
    for name, look in parts:
        groups[re.sub(r"\[\d+\]", "[…]", name)].append((name, look))
    return [
        (name, digest_of(group) if all(look for _, look in group) else "") for name, group in groups.items()
    ]


def _are_files(samples: Any, count: int) -> bool:
    """Whether it is torchvision's list: of each record its file and its class."""
    if not isinstance(samples, list) or not 0 < count == len(samples):
        return False
    return all(isinstance(s, tuple) and s and isinstance(s[0], str) for s in samples)


def _root_of(dataset: Any) -> str:
    """The folder that an object says its files are in."""
    root = getattr(dataset, "__dict__", {}).get("root")
    return os.fspath(root) if isinstance(root, str | os.PathLike) else ""


class _Holds:
    """What a dataset holds, each with its name within it and a digest."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.tables: list[Part] = []  # short ones, which tell no records apart
        self._is_all = True
        self._are_names = False  # some entries look like paths
        # Each with its name and the places of its parts, None while it is looked at.
        self._met: list[tuple[Any, str, tuple[int, int] | None]] = []

    @property
    def strength(self) -> str:
        """How well its records are known."""
        return "partly" if not self._is_all else "names" if self._are_names else "sampled"

    def look_at(self, found: Any, name: str, root: str = "") -> None:
        """Look at an array, a table or a list, of files in the folder `root`, or at the attributes of any
        other dataset, however deep."""
        if self._look_again(found, name):
            return
        is_known = _is_known(type(found))
        self._is_all &= is_known and len(self._met) <= _MOST_MET
        if len(self._met) > _MOST_MET:  # as of an object that has others without end
            return
        with suppress(Unlike, *_CLOSED):  # what cannot be looked at tells nothing
            look, are_names = _digest(found, root)
            self.parts.append((name or VALUES, look))
            self._are_names |= are_names
            self._is_all &= not _is_mapped_to_write(found)  # its file is not watched: the job may write to it
            return
        known, count = len(self.parts), None
        if not _is_container(found):
            met = len(self._met)
            self._met.append((found, name, None))
            with suppress(*_CLOSED):  # as an open stream, which has no length
                count = len(found)
        if count is not None:
            for attribute, value in sorted(getattr(found, "__dict__", {}).items()):
                inner = f"{name}.{attribute}" if name else attribute
                self._look_inside(value, inner, count, _root_of(found), may_be_filled=not is_known)
            self._met[met] = found, name, (known, len(self.parts))
        self._is_all &= any(look for _, look in self.parts[known:])

    def _look_again(self, found: Any, name: str) -> bool:
        """Whether it was met before; then it has the same parts under this name too."""
        for one, first, places in self._met:
            if one is found:
                copied = self.parts[slice(*places)] if places else []
                if len(self.parts) + len(copied) > _MOST_COPIED:
                    self._is_all = False
                else:
                    self.parts += [(name + part.removeprefix(first), look) for part, look in copied]
                return True
        return False

    def _look_inside(
        self, value: Any, name: str, count: int, root: str, *, may_be_filled: bool = False
    ) -> None:
        """Look at an attribute of what has so many records. Raises ReaderError for an error of its own."""
        try:
            if may_be_filled and _is_to_be_filled(value, count):
                self.parts.append((name, ""))
            elif _has_entries(value, count) or _is_dataset(value) or _is_wrapped(value, name):
                self.look_at(value, name, root)
            elif _is_stack(value, count):
                if isinstance(value, tuple):  # it is not filled as it is used
                    self.parts.append((name, f"{len(value)} in it"))
                for key, one in value.items() if isinstance(value, Mapping) else enumerate(value):
                    self._look_inside(one, f"{name}[{key}]", count, root)
            elif inside := _inside(value, name):
                if isinstance(value, tuple):  # it is not filled as it is used
                    self.parts.append((name, f"{len(value)} in it"))
                for place in chosen(len(inside), _MOST_INSIDE):
                    self.look_at(inside[place], f"{name}[{place}]", root)
                self._is_all &= len(inside) <= _MOST_INSIDE and len(inside) == len(value)
            elif _is_table(value, count):
                self.tables.append((name, digest_of(value)))
            elif name.rpartition(".")[2] == "dataset":  # as a dict in a `Subset`
                self._is_all = False
        except _CLOSED:
            self._is_all = False
        except EdlError:
            raise
        except Exception as exc:
            raise ReaderError(
                f"the dataset's attribute {name!r} ({type(value).__name__}) cannot be looked at: {exc!r}; "
                'with fingerprint="v1", the version of your data, none is looked at'
            ) from exc


# Attributes --------------------------------------------------------------------------------------------


def _is_known(kind: type) -> bool:
    """Whether records of such an object are made of what it holds: a subclass of the user's is not known."""
    maker = next((base for base in kind.__mro__ if "__getitem__" in vars(base)), kind)
    package = maker.__module__.partition(".")[0]
    is_known = package in _KNOWN_PACKAGES or f"{maker.__module__}.{maker.__qualname__}" in _KNOWN
    return is_known and kind.__module__.partition(".")[0] == package


def _has_entries(value: Any, count: int) -> bool:
    is_one = isinstance(value, list | tuple | range) or _has(value, "iloc") or _is_array(value)
    return is_one and (not _is_array(value) or bool(value.shape)) and len(value) == count


def _is_stack(value: Any, count: int) -> bool:
    """Whether it is what `StackDataset` has: each has an entry for each record, in a tuple or by name."""
    if not isinstance(value, tuple | Mapping) or not 0 < len(value) <= _MOST_INSIDE:
        return False
    if isinstance(value, Mapping) and not all(isinstance(key, str) for key in value):
        return False
    each = value.values() if isinstance(value, Mapping) else value
    return all(_has_entries(one, count) or (_is_dataset(one) and len(one) == count) for one in each)


def _is_wrapped(value: Any, name: str) -> bool:
    """Whether it is a list or an array in the place of a dataset, which has a length of its own: in
    `Subset`."""
    is_one = isinstance(value, list | tuple | range) or (_is_array(value) and bool(value.shape))
    return is_one and name.rpartition(".")[2] == "dataset" and len(value) > 0


def _inside(value: Any, name: str) -> list[Any]:
    """The datasets and arrays in a list, as `ConcatDataset` and `TensorDataset` have; the former also lists
    in the place of datasets."""
    if not isinstance(value, list | tuple):
        return []
    others = () if name.rpartition(".")[2] == "datasets" else (list, tuple, range)
    return [one for one in value if _is_map_style(one) and not isinstance(one, others)]


def _is_to_be_filled(value: Any, count: int) -> bool:
    """Whether it may be filled as it is used, as a list with None in it, and an array of `zeros`."""
    if not _has_entries(value, count):
        return False
    if isinstance(value, list):
        return any(list.__getitem__(value, place) is None for place in chosen(count, _SEEN))
    if not _is_array(value):
        return False
    with suppress(Unlike, *_CLOSED):
        return count > 1 and len({digest_of(value[place]) for place in chosen(count, _SEEN)}) == 1
    return False


def _is_table(value: Any, count: int) -> bool:
    """Whether it is a short table that is not filled as it is used, unlike a cache: a tuple of plain values,
    names of classes, their numbers, or bounds of parts, as `ConcatDataset` has."""
    if not isinstance(value, list | tuple | Mapping) or not 0 < len(value) < count:
        return False
    if isinstance(value, Mapping):
        return list(value.values()) == [*range(len(value))] and all(isinstance(key, str) for key in value)
    are_bounds = all(type(each) is int for each in value) and value[-1] == count and sorted(value) == [*value]
    is_fixed = isinstance(value, tuple)
    return are_bounds or all(is_name(each) or (is_fixed and is_number(each)) for each in value)


# Entries -----------------------------------------------------------------------------------------------


def _digest(found: Any, root: str) -> tuple[str, bool]:
    """A digest of some entries, and whether they look like paths.

    Raises `Unlike` for what does not hold plain values or arrays.
    """
    if _has(found, "column_names", "with_format"):  # Hugging Face `datasets`
        rows = found.with_format("arrow")  # as they are kept: nothing is decoded
        form = _form(getattr(found, "format", None) or {}) + _decoded(getattr(found, "features", None) or {})
        made_of = digest_of([found.column_names, form])  # these texts are no paths, whatever they look like

        def row_of(place: int) -> list[Any]:
            values = rows[place : place + 1].to_pylist()[0].values()
            return [made_of, [_without_folder(value) for value in values]]

        return _of_some(found, row_of, root)
    if _has(found, "iloc"):  # pandas
        names = list(getattr(found, "columns", ()))
        each = np.atleast_1d(found.dtypes)
        kinds = [str(kind) for kind in each if getattr(kind, "kind", "O") in "biufc"]
        places = [place for place, kind in enumerate(each) if hasattr(kind, "categories")]
        categories = [(found.iloc[:, place] if found.ndim > 1 else found).cat for place in places]

        def row(place: int) -> list[Any]:
            values, label = found.iloc[place], found.index[place]
            labels = [str(one) for one in (label if isinstance(label, tuple) else [label])]
            codes = [[len(one.categories), one.codes.iloc[place]] for one in categories]
            return [names, kinds, labels, values.tolist() if hasattr(values, "tolist") else values, *codes]

        return _of_some(found, row, root)
    if base := next((kind for kind in (list, tuple, range) if isinstance(found, kind)), None):
        return _of_some(found, functools.partial(base.__getitem__, found), root)
    if _is_array(found) and found.shape:
        is_text = getattr(found.dtype, "kind", "") in ("U", "O")
        read = found.__getitem__
        return _of_some(found, read, root) if is_text else (records(len(found), read), False)
    raise Unlike


def _of_some(found: Any, value_of: Callable[[int], Any], root: str) -> tuple[str, bool]:
    """A digest of some values, and whether texts in one place look like paths, as most of them do."""
    places = chosen(len(found), _SEEN)
    values = [value_of(place) for place in places]
    texts: defaultdict[_Place, list[str]] = defaultdict(list)

    def note(place: _Place, text: str) -> str:
        if text:
            texts[place].append(text)
        return text

    for value in values:
        _with_texts(value, (), note)
    short = {place: _short(found, root, is_path=place[-1:] == _A_PATH) for place, found in texts.items()}
    are_paths = any(
        short[place] or 2 * sum(map(_is_path, found)) >= len(found) for place, found in texts.items()
    )
    values = [
        _with_texts(value, (), lambda place, text: short.get(place, {}).get(text, text)) for value in values
    ]
    return records(len(found), dict(zip(places, values, strict=True)).__getitem__), are_paths


def _short(texts: Sequence[str], root: str, *, is_path: bool = False) -> dict[str, str]:
    """Of texts in one place those that say in which folder of a host they are: what they say below `root`,
    else below the folder of all. A relative text may say more than that: it is told as it is."""
    start = os.path.join(root, "")
    if start and all(text.startswith(start) for text in texts):
        return {text: text.removeprefix(start) for text in texts}
    paths = [text for text in texts if is_path or os.path.isabs(text)]
    return dict(zip(paths, below(paths), strict=True))


def _with_texts(value: Any, place: _Place, told: Callable[[_Place, str], str]) -> Any:
    """The value with what is `told` of each text in it."""
    if isinstance(value, os.PathLike):
        return told(place + _A_PATH, os.fspath(value))
    if isinstance(value, str):
        return told(place, value)
    if len(place) == _DEEPEST_PATH:
        return value
    if isinstance(value := by_name(value), Mapping):
        return {key: _with_texts(item, (*place, key), told) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_texts(item, (*place, number), told) for number, item in enumerate(value)]
    return value


def _form(form: Mapping[str, Any]) -> list[Any]:
    """What a dataset of Hugging Face's makes of its columns."""
    given = sorted((form.get("format_kwargs") or {}).items())
    said = [(key, name_of_function(one) if callable(one) else str(one)) for key, one in given]
    return [form.get("type"), list(form.get("columns") or ()), *(p for p in said if p[0] not in OF_A_PROCESS)]


def _decoded(feature: Any) -> list[Any]:
    """How features of Hugging Face's decode what is kept, as images and sounds: of each what is not as
    usual."""
    if isinstance(feature, Mapping):
        return [[name, *how] for name, one in feature.items() if (how := _decoded(one))]
    if isinstance(feature, list | tuple):
        return [how for one in feature for how in _decoded(one)]
    if _has(feature, "decode_example"):
        own = sorted(getattr(feature, "__dict__", {}).items())
        is_said = {name: one for name, one in own if is_number(one) or isinstance(one, str)}
        return [[name, one] for name, one in is_said.items() if name[0] != "_" and one is not True]
    return _decoded(getattr(feature, "feature", None) or ())


def _without_folder(value: Any) -> Any:
    """The paths that images came from lie elsewhere on other hosts; without bytes they are what is known."""
    if isinstance(value, Mapping) and value.keys() == {"bytes", "path"}:
        path = value["path"] or ""
        if value["bytes"] is None:
            return PurePath(path)
        return [value["bytes"], os.path.basename(path).encode("utf-8", "surrogatepass")]
    return value


# Kinds of values ---------------------------------------------------------------------------------------


def _is_path(value: Any) -> bool:
    """Whether a text may say where files lie."""
    text = os.fspath(value)
    return text is not value or os.path.isabs(text) or bool(_PATH.fullmatch(text))


def _has(value: Any, *names: str) -> bool:
    """Whether its class has these: a wrapper that passes on what it lacks is not what it wraps."""
    return all(hasattr(type(value), name) for name in names)


def _is_array(value: Any) -> bool:
    return _has(value, "shape", "dtype", "__array__", "__getitem__")


def _is_mapped_to_write(value: Any) -> bool:
    """Whether an array is mapped, or a part of one that is, so that writes to it are writes to its file."""
    arrays = parents_of(value) if isinstance(value, np.ndarray) else ()
    return any(isinstance(one, np.memmap) and one.mode not in ("r", "c") for one in arrays)


def _is_container(value: Any) -> bool:
    return isinstance(value, str | bytes | list | tuple | range | Mapping) or _is_array(value)


def _is_map_style(value: Any) -> bool:
    is_text = isinstance(value, str | bytes | Mapping | type)
    return not is_text and isinstance(value, Sized) and _has(value, "__getitem__")


def _is_dataset(value: Any) -> bool:
    return _is_map_style(value) and not _is_container(value)
