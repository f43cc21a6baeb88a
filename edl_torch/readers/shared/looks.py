"""What a reader looks at for its fingerprint: names, sizes of some files, blocks, values of some records.

Each look is a small part of what it costs to index the same data. Which files, blocks and records are looked
at depends on how many there are, and on nothing else, so that every host looks at the same ones.

Of a map-style dataset no record is asked for: it may be drawn at random, cost much or open a file that a fork
must not inherit. The object's own attributes are looked at: tensors, arrays, tables and lists of plain values
that have as many entries as the dataset has records, and datasets inside it, as `Subset` and `ConcatDataset`
have. One may be filled as it is used: what a dataset lacks at one time, and has at another, is no difference.
Samples of all are claimed only where no other attribute may hold records or say where they lie, and no entry
looks like a path: what is in its file was not looked at. It must not import torch.
"""

from __future__ import annotations

import functools
import hashlib
import io
import os
import random
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from contextlib import suppress
from datetime import date, timedelta
from enum import Enum, IntEnum
from numbers import Number
from pathlib import PurePath
from typing import Any

import numpy as np

from edl_torch.errors import EdlError, ReaderError
from edl_torch.fingerprint import LISTED, RUNS, VALUES, Fingerprint, Part
from edl_torch.readers.shared.files import FileStamp
from edl_torch.readers.shared.mapped import StringTable

LISTED_BYTES = 1 << 15
_FEWEST_SIZES, _MOST_SIZES, _ONE_IN = 64, 1024, 512
_BLOCKS, _BLOCK_BYTES = 64, 4096
_PIECE_BYTES = 1 << 20
_RECORDS = 64
_DEEPEST = 8
_MOST_INSIDE = 256  # datasets of a ConcatDataset
_SEEN = 64
_DEEPEST_PATH = 4  # containers in an entry in which paths are looked for
_MOST_COPIED = 4096  # parts
_LONGEST_NAME = 1024  # characters of what may be a path or a mode, and is hardly all of the records
_PATH = re.compile(r"\w+://\S*|\S*[/\\]\S*|[^\n]*[/\\][^\n]*\.\w{1,8}|\S+\.[A-Za-z]\w{0,7}")

_Place = tuple[Any, ...]  # keys and numbers that lead to a value in an entry
_A_PATH: _Place = (os.PathLike,)  # behind those of a path, whatever it looks like


def listing(
    strength: str,
    names: Iterable[str],
    evidence: Mapping[int, str],
    also: Sequence[Part] = (),
    attributes: Sequence[Part] = (),
) -> Fingerprint:
    """Return the fingerprint of entries in order, with what was looked at in some, by their place.

    `also` are entries before them, such as the file that lists them.
    """
    table = names if isinstance(names, StringTable) else StringTable(names)
    count = len(table)
    if count <= LISTED and table.nbytes <= LISTED_BYTES:
        parts = [(name, evidence.get(place, "")) for place, name in enumerate(table)]
        return Fingerprint.of(strength, [*also, *parts], attributes=attributes)
    run = 1 << max(0, (count - 1) // RUNS).bit_length()
    looked_at = sorted(evidence.items())
    parts = []
    for first in range(0, count, run):
        digest, looks = hashlib.blake2b(digest_size=8), hashlib.blake2b(digest_size=8)
        for piece in table.raw(first, min(first + run, count)):
            digest.update(piece)
        while looked_at and looked_at[0][0] < first + run:
            looks.update(repr(looked_at.pop(0)).encode())
        parts.append((table[first], f"{digest.hexdigest()} {looks.hexdigest()}"))
    entries = len(also) + count
    return Fingerprint.of(strength, [*also, *parts], run=run, entries=entries, attributes=attributes)


@functools.lru_cache(maxsize=64)
def chosen(count: int, most: int) -> Sequence[int]:
    """Return up to `most` of `count` places, in order, the same ones everywhere."""
    return range(count) if count <= most else sorted(random.Random(count).sample(range(count), most))


def arguments(name: str, *values: Any) -> list[Part]:
    """Return the entry `name`, for arguments of a reader that decide what becomes of the same bytes."""
    return [(name, hashlib.blake2b(repr(values).encode("utf-8", "replace"), digest_size=16).hexdigest())]


def listing_of(
    listed: Part,
    names: Iterable[str],
    looks: Mapping[int, str],
    *,
    whole: bool,
    more: Sequence[Part] = (),
) -> Fingerprint:
    """Return the fingerprint of what a file lists: its bytes as `listed`, looks at some entries' files."""
    return listing("whole" if whole else "names", names, looks, [listed, *more])


def sizes(count: int, files: Callable[[int], list[str]], *, whole: bool) -> dict[int, str]:
    """Return sizes of files of some of `count` entries, by place: of 64 or fewer all, of very many 1,024.

    Of XML, which has annotations and is short, checksums too. For the `whole`, digests of all of them.
    """
    places = range(count) if whole else some_of(count)
    return {place: " ".join(_looked_at(path, whole) for path in files(place)) for place in places}


def some_of(count: int) -> Sequence[int]:
    """Return the places of the entries whose sizes are looked at."""
    return chosen(count, min(_MOST_SIZES, max(_FEWEST_SIZES, count // _ONE_IN)))


def _looked_at(path: str, whole: bool) -> str:
    try:
        if not whole:
            return whole_file(path) if path.endswith(".xml") else str(os.stat(path).st_size)
        with open(path, "rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except OSError:
        return "missing"


class SummedFile(io.RawIOBase):
    """A file's bytes with size and checksum of those that were read: what is told apart is what was parsed.

    A stronger digest would take as long as to parse them.
    """

    def __init__(self, path: str, data: bytes | None = None) -> None:
        """`data` are the bytes of a file that lies elsewhere. Raises OSError."""
        self._path = path
        self._file: io.RawIOBase | io.BytesIO
        self._file = open(path, "rb", buffering=0) if data is None else io.BytesIO(data)  # noqa: SIM115  closed with this one
        self._size = self._checksum = 0

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read the next bytes."""
        count = self._file.readinto(buffer)
        self._size, self._checksum = (
            self._size + count,
            zlib.crc32(memoryview(buffer)[:count], self._checksum),
        )
        return count

    def close(self) -> None:
        """Let go of the file."""
        if hasattr(self, "_file"):  # else it could not be opened, and Python closes it all the same
            self._file.close()
        super().close()

    def text(self, **how: Any) -> io.TextIOWrapper:
        """Return it as text."""
        return io.TextIOWrapper(io.BufferedReader(self), **how)

    @property
    def part(self) -> Part:
        """Its entry in a fingerprint, once all of it was read."""
        return os.path.basename(self._path), f"{self._size} {self._checksum:08x}"


def whole_file(path: str) -> str:
    """Return a file's size and checksum. Raises OSError."""
    with SummedFile(path) as file:
        while file.read(_PIECE_BYTES):
            pass
        return file.part[1]


def blocks(
    size: int,
    read: Callable[[int, int], bytes],
    also: bytes = b"",
    *,
    whole: bool = False,
    most: int = _BLOCKS,
) -> str:
    """Return a digest of a file's size, some of its blocks, and `also`; of a small file's bytes all.

    `read` gets the bytes from … to before ….
    """
    digest = hashlib.blake2b(b"%d;" % size, digest_size=16)
    digest.update(also)
    length = _PIECE_BYTES if whole else _BLOCK_BYTES
    count = -(-size // length)
    for block in range(count) if whole else chosen(count, most):
        digest.update(read(block * length, min((block + 1) * length, size)))
    return digest.hexdigest()


def below(paths: Sequence[str]) -> list[str]:
    """Return paths relative to the folder that all of them are in; some may be absolute."""
    if len({os.path.isabs(path) for path in paths}) == 2:
        paths = [os.path.abspath(path) for path in paths]
    folder = os.path.commonpath([os.path.dirname(path) for path in paths]) if paths else ""
    return [os.path.relpath(path, folder) if folder else os.path.normpath(path) for path in paths]


# Values -------------------------------------------------------------------------------------------------


ARRAYS_OWN = (TypeError, ValueError, RuntimeError, LookupError)  # what array-likes say that they cannot do
_CLOSED = (
    OSError,
    AttributeError,
    ArithmeticError,
    *ARRAYS_OWN,
)  # what other objects say, as without a connection


class Unlike(Exception):
    """Error: a value whose bytes say nothing, such as an object of a class of the user's."""


def digest_of(value: Any) -> str:
    """Return a digest of a plain value, an array, or a container of those. Raises `Unlike`."""
    return records(1, lambda _: value)


def records(count: int, value_of: Callable[[int], Any]) -> str:
    """Return a digest of some of `count` values. Raises `Unlike`."""
    digest = hashlib.blake2b(b"%d;" % count, digest_size=16)
    for place in chosen(count, _RECORDS):
        _add(digest, value_of(place), _DEEPEST)
    return digest.hexdigest()


def _add(digest: Any, value: Any, depth: int) -> None:
    """Add a plain value, an array, or a container of those: its kind, and its bytes."""
    if not depth:
        raise Unlike
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if value is None or isinstance(value, bool | int | float | str | bytes | date | timedelta):
        digest.update(f"{type(value).__name__} {value!r};".encode("utf-8", "surrogatepass"))
    elif isinstance(value, Mapping):
        digest.update(b"{%d" % len(value))
        for key, item in value.items():
            _add(digest, key, depth - 1)
            _add(digest, item, depth - 1)
    elif isinstance(value, list | tuple):
        digest.update(b"[%d" % len(value))
        for item in value:
            _add(digest, item, depth - 1)
    else:
        _add_array(digest, value, depth)


def _add_array(digest: Any, value: Any, depth: int) -> None:
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise Unlike
    digest.update(f"{value.dtype} {tuple(value.shape)};".encode())
    try:
        array = _as_array(value)
    except ARRAYS_OWN as exc:  # it has no values, as torch's on the device "meta", or is sparse
        raise Unlike from exc
    if array.dtype.hasobject:
        _add(digest, array.tolist(), depth - 1)
    else:
        digest.update(np.ascontiguousarray(array).tobytes())


def _as_array(value: Any) -> Any:
    try:
        return np.asarray(value)
    except ARRAYS_OWN:  # on another device, or of a type that numpy has not, as torch's bfloat16
        return np.asarray(value.tolist())


# Map-style datasets -----------------------------------------------------------------------------------


def fingerprint_of(dataset: Any) -> Fingerprint | None:
    """Return the fingerprint of a dataset by what it is made of; None where that tells nothing."""
    made_of = _MadeOf()
    made_of.look_at(dataset, "")
    parts, strength = made_of.parts, made_of.strength
    parts += made_of.tables if any(look for _, look in parts) else []
    if sum(len(name) + len(look) for name, look in parts) > LISTED_BYTES:
        parts = _grouped(parts)  # thousands of arrays
    if sum(len(name) + len(look) for name, look in parts) > LISTED_BYTES:
        return listing(strength, [name for name, _ in parts], dict(enumerate(look for _, look in parts)))
    samples: Any = getattr(dataset, "__dict__", {}).get("samples")
    if _are_files(samples, len(dataset)):
        files = _relative([sample[0] for sample in samples], dataset)
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


def mapped_files(dataset: Any) -> list[FileStamp]:
    """Return the files that arrays of a dataset are mapped from (`np.load(mmap_mode="r")`), as they are, in
    datasets inside of it too. An array that is a part of a mapped one, as `np.asarray` gives, is mapped."""
    files: dict[str, None] = {}
    ahead, met = [dataset], set[int]()
    while ahead and len(met) < _MOST_COPIED:
        value = ahead.pop()
        if id(value) in met:
            continue
        met.add(id(value))
        if isinstance(value, list | tuple):
            ahead += [one for one in value[:_MOST_INSIDE] if not isinstance(one, str | Number)]
        elif isinstance(value, np.ndarray):
            if isinstance(value, np.memmap) and value.mode in ("r", "c") and value.filename:
                files[os.fspath(value.filename)] = None
            ahead.append(value.base)
        elif isinstance(value, Sized) and not isinstance(value, type):
            ahead += getattr(value, "__dict__", {}).values()
    return [FileStamp.of(file) for file in files if os.path.isfile(file)]


class _Untold(IntEnum):
    """What an attribute that was not looked at may hide."""

    NOTHING = 0
    WHERE = 1  # where records lie, as the path of a database
    RECORDS = 2  # or what is made of them, as a table of classes


class _MadeOf:
    """What a dataset has, each with its name within it and a digest, and what it may have beside."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.tables: list[Part] = []  # short ones, which tell no records apart
        self._untold = _Untold.NOTHING
        self._are_names = False  # some entries look like paths
        # Each with its name and the places of its parts, None while it is looked at.
        self._met: list[tuple[Any, str, tuple[int, int] | None]] = []

    @property
    def strength(self) -> str:
        """How well its records are known."""
        if self._untold is _Untold.RECORDS:
            return "partly"
        if self._are_names:
            return "names"
        return "partly" if self._untold else "sampled"

    def look_at(self, found: Any, name: str) -> None:
        """Look at an array, a table or a list, or at the attributes of any other dataset, however deep."""
        if self._look_again(found, name):
            return
        with suppress(Unlike, *_CLOSED):  # what cannot be looked at tells nothing
            look, are_names = _digest(found)
            self.parts.append((name or VALUES, look))
            self._are_names |= are_names
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
            for attribute, value in sorted(getattr(found, "__dict__", {}).items()):
                self._look_inside(value, f"{name}.{attribute}" if name else attribute, count)
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

    def _look_inside(self, value: Any, name: str, count: int) -> None:
        """Look at an attribute of what has so many records. Raises ReaderError for an error of its own."""
        try:
            if _has_entries(value, count) or (_is_map_style(value) and not _is_container(value)):
                if isinstance(value, list) and _is_to_be_filled(value):
                    self.parts.append((name, ""))
                    self._untold = max(self._untold, _Untold.WHERE)
                else:
                    self.look_at(value, name)
            elif inside := _inside(value):
                if isinstance(value, tuple):  # it is not filled as it is used
                    self.parts.append((name, f"{len(value)} in it"))
                for place in chosen(len(inside), _MOST_INSIDE):
                    self.look_at(inside[place], f"{name}[{place}]")
                if len(inside) > _MOST_INSIDE or len(inside) < len(value):
                    self._untold = _Untold.RECORDS
            elif _is_table(value, count):
                self.tables.append((name, digest_of(value)))
            else:
                self._untold = max(self._untold, _untold(value, count))
        except _CLOSED:
            self._untold = _Untold.RECORDS
        except EdlError:
            raise
        except Exception as exc:
            raise ReaderError(
                f"the dataset's attribute {name!r} ({type(value).__name__}) cannot be looked at: {exc!r}; "
                'with fingerprint="v1", the version of your data, none is looked at'
            ) from exc


def _is_to_be_filled(value: list[Any]) -> bool:
    return any(value[place] is None for place in chosen(len(value), _SEEN))


def _is_table(value: Any, count: int) -> bool:
    """Whether it is a short table that is not filled as it is used, unlike a cache: a tuple of plain values,
    names of classes, their numbers, or bounds of parts, as `ConcatDataset` has."""
    if not isinstance(value, list | tuple | Mapping) or not 0 < len(value) < count:
        return False
    if isinstance(value, Mapping):
        return list(value.values()) == [*range(len(value))] and all(isinstance(key, str) for key in value)
    if isinstance(value, tuple) and all(isinstance(each, str | Number) for each in value):
        return True
    if all(isinstance(each, str) for each in value):
        return True
    return all(type(each) is int for each in value) and value[-1] == count and sorted(value) == list(value)


def _untold(value: Any, count: int) -> _Untold:
    """What may be in an attribute that has not one entry for each of so many records."""
    if value is None or callable(value) or isinstance(value, Number | np.generic | Enum | date | timedelta):
        return _Untold.NOTHING
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str):
        is_short = len(value) < _LONGEST_NAME
        return (_Untold.WHERE if is_short else _Untold.RECORDS) if value else _Untold.NOTHING
    if _is_array(value):
        if not value.shape:
            return _Untold.NOTHING
        return _Untold.RECORDS
    is_empty = isinstance(value, Sized) and not len(value) and not _is_map_style(value)
    return _Untold.NOTHING if is_empty else _Untold.RECORDS


def _digest(found: Any) -> tuple[str, bool]:
    """A digest of some entries, and whether they look like paths.

    Raises `Unlike` for what does not hold plain values or arrays.
    """
    if _has(found, "column_names", "with_format"):  # Hugging Face `datasets`
        rows = found.with_format("arrow")  # as they are kept: nothing is decoded

        def row_of(place: int) -> list[Any]:
            values = rows[place : place + 1].to_pylist()[0].values()
            return [found.column_names, [_without_folder(value) for value in values]]

        return _of_some(found, row_of)
    if _has(found, "iloc"):  # pandas
        names = list(getattr(found, "columns", ()))

        def row(place: int) -> list[Any]:
            values = found.iloc[place]
            return [names, values.tolist() if hasattr(values, "tolist") else values]

        return _of_some(found, row)
    if isinstance(found, list | tuple | range):
        if any(found[place] is None for place in chosen(len(found), _SEEN)):
            raise Unlike  # a list that is filled as it is used has None before
        return _of_some(found, found.__getitem__)
    if _is_array(found) and found.shape:
        is_text = getattr(found.dtype, "kind", "") in ("U", "O")
        read = found.__getitem__
        return _of_some(found, read) if is_text else (records(len(found), read), False)
    raise Unlike


def _has(value: Any, *names: str) -> bool:
    """Whether its class has these: a wrapper that passes on what it lacks is not what it wraps."""
    return all(hasattr(type(value), name) for name in names)


def _of_some(found: Any, value_of: Callable[[int], Any]) -> tuple[str, bool]:
    """A digest of some values, and whether paths are in them.

    A path counts from the folder common to those in its place, however it is written.
    """
    places = chosen(len(found), _SEEN)
    values = [value_of(place) for place in places]
    texts: defaultdict[_Place, list[str]] = defaultdict(list)

    def note(place: _Place, text: str) -> str:
        texts[place].append(text)
        return text

    for value in values:
        _with_texts(value, (), note)
    short = {place: _short(found, is_path=place[-1:] == _A_PATH) for place, found in texts.items()}
    values = [_with_texts(value, (), lambda place, text: short[place].get(text, text)) for value in values]
    return records(len(found), dict(zip(places, values, strict=True)).__getitem__), any(short.values())


def _short(texts: Sequence[str], *, is_path: bool) -> dict[str, str]:
    """Of texts in one place the paths, each as below the folder of all; {} where none looks like one."""
    paths = [text for text in texts if os.path.isabs(text)]
    if is_path or (not paths and any(map(_PATH.fullmatch, texts))):
        paths = [text for text in texts if text]
    return dict(zip(paths, below(paths), strict=True))


def _with_texts(value: Any, place: _Place, told: Callable[[_Place, str], str]) -> Any:
    """The value with what is `told` of each text in it."""
    if isinstance(value, os.PathLike):
        return told(place + _A_PATH, os.fspath(value))
    if isinstance(value, str):
        return told(place, value)
    if len(place) == _DEEPEST_PATH:
        return value
    if isinstance(value, Mapping):
        return {key: _with_texts(item, (*place, key), told) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_texts(item, (*place, number), told) for number, item in enumerate(value)]
    return value


def _without_folder(value: Any) -> Any:
    """The paths that images came from lie elsewhere on other hosts; without bytes they are what is known."""
    if isinstance(value, Mapping) and value.keys() == {"bytes", "path"}:
        path = value["path"] or ""
        if value["bytes"] is None:
            return PurePath(path)
        return [value["bytes"], os.path.basename(path).encode("utf-8", "surrogatepass")]
    return value


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
