"""What a map-style dataset is made of, for its fingerprint.

Of a map-style dataset no record is asked for: it may be drawn at random, cost much or open a file that a fork
must not inherit. The object's own attributes are looked at: tensors, arrays, tables and lists of plain values
that have as many entries as the dataset has records, datasets inside it, as `Subset` has, and what its code
names of its class and modules (`dataset_code`). One may be filled as it is used: what a dataset lacks at one
time, and has at another, is no difference, but what was there as a job began must stay. Values
(`looks.settled`) and constants are those of the first look: what a loop makes of them later is the program's.
Samples of all are claimed only where nothing else may hold records or say where they lie, and no entry looks
like a path. It must not import torch.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Sized
from contextlib import suppress
from enum import IntEnum
from pathlib import PurePath
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from edl_torch.errors import EdlError, ReaderError
from edl_torch.fingerprint import VALUES, Fingerprint, Part
from edl_torch.readers.shared.dataset_code import code_of, held_by, makers_of, named_in_code
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
    is_value,
    listing,
    name_of_function,
    records,
    settled,
)

_MOST_INSIDE = 256  # datasets of a ConcatDataset
_MOST_MET = 600  # objects in all, as so many that each wrap one, as `Subset` does
_SEEN = 64
_FEW = 32  # plain values in one array or list that a transform may have
_LONGEST_MODE = 16  # characters of a text that tells it how to work, as `reflect`
_DEEPEST_PATH = 4  # containers in an entry in which paths are looked for
_MOST_COPIED = 4096  # parts
_MOST_CONSTANTS = 4096  # in a list or dict of a module
# Objects of these hold no records: loggers, locks, patterns, kinds of numbers and devices.
_NO_DATA = {"logging", "threading", "_thread", "re", "random", "torch", "numpy", "operator"}
_LONGEST_NAME = 1024  # characters of what may be a path or a mode, and is hardly all of the records
_PATH = re.compile(r"\w+://\S*|\S*[/\\]\S*|[^\n]*[/\\][^\n]*\.\w{1,8}|\S+\.[A-Za-z]\w{0,7}")
# What other objects say, as without a connection.
_CLOSED = (OSError, AttributeError, ArithmeticError, *ARRAYS_OWN)

_Place = tuple[Any, ...]  # keys and numbers that lead to a value in an entry
_A_PATH: _Place = (os.PathLike,)  # behind those of a path, whatever it looks like


def fingerprint_of(dataset: Any, constants: dict[str, str], of_code: dict[str, str]) -> Fingerprint | None:
    """Return the fingerprint of a dataset by what it is made of; None where that tells nothing.

    `constants`, and those `of_code` that are its classes' and modules', are those of the first look at it,
    empty before. They stay, whatever has become of them.
    """
    made_of = _MadeOf(constants, of_code)
    made_of.look_at(dataset, "")
    parts, strength = made_of.parts, made_of.strength
    gone = (constants | of_code).items() - {*made_of.tables}
    parts += [*made_of.tables, *sorted(gone)] if any(look for _, look in parts) else []
    if sum(len(name) + len(look) for name, look in parts) > LISTED_BYTES:
        parts = _grouped(parts)  # thousands of arrays
    if sum(len(name) + len(look) for name, look in parts) > LISTED_BYTES:
        return listing(strength, [name for name, _ in parts], dict(enumerate(look for _, look in parts)))
    samples: Any = getattr(dataset, "__dict__", {}).get("samples")
    if _are_files(samples, len(dataset)):
        files = [sample[0] for sample in samples]
        short = _short(files, _root_of(dataset))
        files = [short.get(file, file) for file in files]
        return listing("partly" if strength == "partly" else "names", files, {}, attributes=parts)
    return Fingerprint.of(strength, (), attributes=parts) if any(look for _, look in parts) else None


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


class _Untold(IntEnum):
    """What an attribute that was not looked at may hide."""

    NOTHING = 0
    WHERE = 1  # where records lie, as the path of a database
    RECORDS = 2  # or what is made of them, as a table of classes


class _MadeOf:
    """What a dataset has, each with its name within it and a digest, and what it may have beside."""

    def __init__(self, constants: dict[str, str], of_code: dict[str, str]) -> None:
        self._constants, self._of_code = constants, of_code
        self.parts: list[Part] = []
        self.tables: list[Part] = []  # short ones, which tell no records apart
        self._untold = _Untold.NOTHING
        self._are_names = False  # some entries look like paths
        self._called = set[str]()  # names in code of what was looked at before
        # Each with its name and the places of its parts, None while it is looked at.
        self._met: list[tuple[Any, str, tuple[int, int] | None]] = []

    @property
    def strength(self) -> str:
        """How well its records are known."""
        if self._untold is _Untold.RECORDS or (self._untold and not self._are_names):
            return "partly"
        return "names" if self._are_names else "sampled"

    def look_at(self, found: Any, name: str, root: str = "") -> None:
        """Look at an array, a table or a list, of files in the folder `root`, or at the attributes of any
        other dataset, however deep."""
        if self._look_again(found, name):
            return
        if len(self._met) > _MOST_MET:  # as of an object that has others without end
            self._untold = _Untold.RECORDS
            return
        with suppress(Unlike, *_CLOSED):  # what cannot be looked at tells nothing
            look, are_names = _digest(found, root)
            self.parts.append((name or VALUES, look))
            self._are_names |= are_names
            if _is_mapped_to_write(found):  # its file is not watched, as the job may write to it
                self._untold = _Untold.RECORDS
            return
        known, count = len(self.parts), None
        if not _is_container(found):
            met = len(self._met)
            self._met.append((found, name, None))
            with suppress(*_CLOSED):  # as an open stream, which has no length
                count = len(found)
        if count is not None:
            if any(getattr(kind, "__slots__", ()) for kind in type(found).__mro__):
                self._untold = _Untold.RECORDS
            attributes, constants, to_be_filled, untold = _attributes(found, count, self._called)
            self._untold = max(self._untold, untold)
            for attribute, value in sorted(attributes.items()):
                inner = f"{name}.{attribute}" if name else attribute
                if attribute in constants:
                    is_own = attribute.partition(".")[0] in getattr(found, "__dict__", {})
                    first = self._constants if is_own else self._of_code
                    self.tables.append((inner, first.setdefault(inner, digest_of(value))))
                elif attribute in to_be_filled:
                    self.parts.append((inner, ""))
                else:
                    self._look_inside(value, inner, count, _root_of(found))
            self._met[met] = found, name, (known, len(self.parts))
        if not any(look for _, look in self.parts[known:]):
            self._untold = _Untold.RECORDS

    def _look_again(self, found: Any, name: str) -> bool:
        """Whether it was met before; then it has the same parts under this name too."""
        for one, first, places in self._met:
            if one is found:
                copied = self.parts[slice(*places)] if places else []
                if len(self.parts) + len(copied) > _MOST_COPIED:
                    self._untold = _Untold.RECORDS
                else:
                    self.parts += [(name + part.removeprefix(first), look) for part, look in copied]
                return True
        return False

    def _held(self, value: Any, count: int) -> _Untold:
        """What something that is called may hold, beside what is looked at in it."""
        if not callable(value):
            return _Untold.NOTHING
        looked_at = [one for _, one in held_by(value) if _has_entries(one, count) or _is_dataset(one)]
        return _hidden(value, count, looked_at + [one for one, *_ in self._met])

    def _look_inside(self, value: Any, name: str, count: int, root: str) -> None:
        """Look at an attribute of what has so many records. Raises ReaderError for an error of its own."""
        try:
            if _has_entries(value, count) or _is_dataset(value) or _is_wrapped(value, name):
                if isinstance(value, list) and _is_to_be_filled(value):
                    self.parts.append((name, ""))
                    self._untold = max(self._untold, _Untold.WHERE)
                else:
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
                if len(inside) > _MOST_INSIDE or len(inside) < len(value):
                    self._untold = _Untold.RECORDS
            elif _is_table(value, count):
                self.tables.append((name, digest_of(value)))
            else:
                untold = _Untold.WHERE if root and value is root else _untold(value, count)
                self._untold = max(self._untold, untold, self._held(value, count))
        except _CLOSED:
            self._untold = _Untold.RECORDS
        except EdlError:
            raise
        except Exception as exc:
            raise ReaderError(
                f"the dataset's attribute {name!r} ({type(value).__name__}) cannot be looked at: {exc!r}; "
                'with fingerprint="v1", the version of your data, none is looked at'
            ) from exc


# Attributes --------------------------------------------------------------------------------------------


def _attributes(
    found: Any, count: int, called: set[str]
) -> tuple[dict[str, Any], set[str], set[str], _Untold]:
    """What an object of so many records has, by name, in its classes, its functions and what its code names
    too; what of it is one for all records, and stays; its arrays that are filled as it is used; and what is
    not told.

    What stays are values that a function holds, that have the name of an argument, or that its code names;
    lists, sets and dicts of plain values that this names. Nothing that is written to, as by other methods,
    stays. A number that is computed as the object is made may be of this host, or of this run: it is not
    told."""
    own = getattr(found, "__dict__", {})
    held = {
        f"{name}.{inner}": value
        for name, function in own.items()
        for inner, value in held_by(function)
        if _has_entries(value, count) or _is_dataset(value) or (_is_one(value) and inner not in OF_A_PROCESS)
    }
    of_classes = {
        name: value
        for kind in reversed(type(found).__mro__)
        for name, value in vars(kind).items()
        if not name.startswith("__") and (_has_entries(value, count) or is_value(value))
    }
    makers = makers_of(found, called)
    code = code_of(type(found), makers)
    named, written = named_in_code(found, makers, _may_be_data)
    every = named | of_classes | held | own
    values = {name: settled(value) for name, value in every.items() if is_value(value)}
    kinds = {name: value for name, value in (held | own).items() if isinstance(value, type)}
    values |= {name: name_of_function(value) for name, value in kinds.items()}
    computed = {
        name
        for name in (values.keys() - kinds.keys()) & own.keys() & code.named - code.made_with
        if (isinstance(own[name], int | float) or code.is_of_a_run)
        and repr(own[name]) not in code.literals | {repr(count)}
    }
    constants = values.keys() & (code.made_with | (code.named & own.keys()) | (held.keys() - own.keys()))
    computed |= constants & code.written  # what a method sets as the object is made, or after, is not told
    constants |= {name for name in named.keys() - written - own.keys() if _is_constant(named[name], count)}
    constants -= computed
    every |= {name: _without_process(values.get(name, every[name])) for name in constants}
    to_be_filled = {name for name in own.keys() & code.stored_in if _is_still_the_same(own[name], count)}
    is_filled = any(own.get(name) is None for name in code.filled & own.keys() | code.computed_once)
    is_filled |= bool(to_be_filled)
    untold = _Untold.RECORDS if computed or is_filled else _Untold.WHERE if code.opens else _Untold.NOTHING
    return every, constants, to_be_filled, untold


def _may_be_data(value: Any) -> bool:
    if isinstance(value, type | ModuleType) or value is None:
        return False
    if hasattr(type(value), "__get__") and not isinstance(value, MethodType):
        return False
    is_known = (
        isinstance(value, list | tuple | range | Mapping) or _is_map_style(value) or _has(value, "iloc")
    )
    return is_known or callable(value) or type(value).__module__.partition(".")[0] not in _NO_DATA


def _is_constant(value: Any, count: int) -> bool:
    if not isinstance(value, list | tuple | set | Mapping):
        return is_value(value)
    each = [*value.keys(), *value.values()] if isinstance(value, Mapping) else value
    is_short = 0 < len(value) <= _MOST_CONSTANTS and len(value) != count
    return is_short and all(is_name(one) or is_value(one) for one in each)


def _without_process(value: Any) -> Any:
    """A constant without the numbers of the process; of a dict in no order, as it may be made of a set."""
    if isinstance(value, Mapping):
        of_data = {key: one for key, one in value.items() if str(key).lower() not in OF_A_PROCESS}
        return dict(sorted(of_data.items(), key=lambda pair: digest_of(pair[0])))
    return value


def _is_one(value: Any) -> bool:
    return is_value(value) or isinstance(value, type)


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


def _is_to_be_filled(value: Sequence[Any]) -> bool:
    """Whether it is filled as it is used, and has None before."""
    return any(value[place] is None for place in chosen(len(value), _SEEN))


def _is_still_the_same(value: Any, count: int) -> bool:
    """Whether it is an array with one value for all, as `zeros` makes it."""
    if not (_is_array(value) and _has_entries(value, count) and count > 1):
        return False
    with suppress(Unlike, *_CLOSED):
        return len({digest_of(value[place]) for place in chosen(count, _SEEN)}) == 1
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
    return are_bounds or all(is_name(each) or (is_fixed and is_value(each)) for each in value)


def _hidden(called: Any, count: int, known: Sequence[Any]) -> _Untold:
    """What may be in what something that is called holds, as a function, a transform or a connection, beside
    what is `known`. A few numbers are parameters, as the mean of each channel, and no records; texts in a
    list may be a vocabulary."""
    found, ahead, met = _Untold.NOTHING, [called], [*known]
    while ahead and len(met) < len(known) + _MOST_INSIDE:
        one = ahead.pop()
        if one is None or _is_one(one) or isinstance(one, ModuleType) or any(one is each for each in met):
            continue
        met.append(one)
        kind = type(one)
        if isinstance(one, str | os.PathLike):
            if not _is_path(one) and len(os.fspath(one)) > _LONGEST_MODE:
                return _Untold.RECORDS
            found = _Untold.WHERE if _is_path(one) else found
        elif _is_array(one):
            if math.prod(one.shape) > _FEW or one.shape[0] == count:
                return _Untold.RECORDS
        elif isinstance(one, Mapping | list | tuple | set | frozenset):
            inside = [*one.values()] if isinstance(one, Mapping) else [*one]
            are_many = len(one) > _FEW or len(one) == count
            is_table = any(isinstance(each, str) for each in inside) or (
                isinstance(one, Mapping) and any(map(is_value, inside))
            )
            if is_table or (are_many and not all(map(callable, inside))):
                return _Untold.RECORDS
            ahead += inside
        elif isinstance(one, functools.partial):
            ahead += [one.func, *one.args, *one.keywords.values()]
        elif isinstance(one, FunctionType):
            ahead += [value for _, value in held_by(one)]
        elif (wrapped := inspect.getattr_static(one, "__wrapped__", None)) is not None:
            ahead.append(wrapped)
        elif inspect.isroutine(one):
            ahead += [getattr(one, "__self__", None), getattr(one, "__func__", None)]
        elif hasattr(one, "__dict__") and not any(getattr(base, "__slots__", ()) for base in kind.__mro__):
            ahead += vars(one).values()
        elif kind.__module__.partition(".")[0] not in _NO_DATA:
            return _Untold.RECORDS
    return _Untold.RECORDS if ahead else found


def _untold(value: Any, count: int) -> _Untold:
    """What may be in an attribute that has not one entry for each of so many records."""
    if isinstance(value, str | os.PathLike) and (text := os.fspath(value)):
        is_path = count != len(text) < _LONGEST_NAME and _is_path(value)
        return _Untold.WHERE if is_path else _Untold.RECORDS
    if value is None or callable(value) or (is_value(value) and not isinstance(value, bytes | frozenset)):
        return _Untold.NOTHING
    is_empty = isinstance(value, Sized) and not len(value) and not _is_map_style(value)
    return _Untold.NOTHING if is_empty else _Untold.RECORDS


# Entries -----------------------------------------------------------------------------------------------


def _digest(found: Any, root: str) -> tuple[str, bool]:
    """A digest of some entries, and whether they look like paths.

    Raises `Unlike` for what does not hold plain values or arrays.
    """
    if _has(found, "column_names", "with_format"):  # Hugging Face `datasets`
        rows = found.with_format("arrow")  # as they are kept: nothing is decoded
        form = _form(getattr(found, "format", None) or {}) + _decoded(getattr(found, "features", None) or {})

        def row_of(place: int) -> list[Any]:
            values = rows[place : place + 1].to_pylist()[0].values()
            return [found.column_names, form, [_without_folder(value) for value in values]]

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
    if isinstance(found, list | tuple | range):
        if _is_to_be_filled(found):
            raise Unlike
        return _of_some(found, found.__getitem__, root)
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
        is_said = {name: one for name, one in own if is_value(one) or isinstance(one, str)}
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
    while isinstance(value, np.ndarray):
        if isinstance(value, np.memmap) and value.mode not in ("r", "c"):
            return True
        value = value.base
    return False


def _is_container(value: Any) -> bool:
    return isinstance(value, str | bytes | list | tuple | range | Mapping) or _is_array(value)


def _is_map_style(value: Any) -> bool:
    is_text = isinstance(value, str | bytes | Mapping | type)
    return not is_text and isinstance(value, Sized) and _has(value, "__getitem__")


def _is_dataset(value: Any) -> bool:
    return _is_map_style(value) and not _is_container(value)
