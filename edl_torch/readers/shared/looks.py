"""What a reader looks at for its fingerprint: names, sizes of some files, blocks, values of some records.

Each look is a small part of what it costs to index the same data. Which files, blocks and records are looked
at depends on how many there are, and on nothing else, so that every host looks at the same ones.
"""

from __future__ import annotations

import functools
import hashlib
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from edl_torch.fingerprint import LISTED, RUNS, Fingerprint, Part
from edl_torch.readers.shared.files import Read
from edl_torch.readers.shared.mapped import StringTable

if TYPE_CHECKING:
    from edl_torch.readers.storage import Object, Storage

LISTED_BYTES = 1 << 15
_FEWEST_SIZES, _MOST_SIZES, _ONE_IN = 64, 1024, 512
_BLOCKS, _BLOCK_BYTES = 64, 4096
_PIECE_BYTES = 1 << 20
_RECORDS = 64
_DEEPEST = 8


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


# Arguments whose numbers tell which process this is, of how many, and how it works: not which data there are
OF_A_PROCESS = frozenset(
    {
        *("rank", "local_rank", "global_rank", "node_rank", "worker_id"),
        *("device", "device_id", "gpu", "gpu_id", "port", "pid", "verbose", "epoch"),
        *("world_size", "num_replicas", "num_nodes", "num_workers", "num_threads", "workers", "threads"),
    }
)


@functools.lru_cache(maxsize=64)
def chosen(count: int, most: int) -> Sequence[int]:
    """Return up to `most` of `count` places, in order, the same ones everywhere."""
    return range(count) if count <= most else sorted(random.Random(count).sample(range(count), most))


def arguments(name: str, *values: Any) -> list[Part]:
    """Return the entry `name`, for arguments of a reader that decide what becomes of the same bytes."""
    return [(name, hashlib.blake2b(repr(values).encode("utf-8", "replace"), digest_size=16).hexdigest())]


def name_of_function(function: Callable[..., Any]) -> str:
    """Return a function's or class' module and name: what it does is the program, and told by nothing. Of a
    `partial` also the numbers that it holds, but those `OF_A_PROCESS`."""
    given = ""
    while isinstance(function, functools.partial):
        of_data = sorted(pair for pair in function.keywords.items() if pair[0] not in OF_A_PROCESS)
        plain = [*enumerate(function.args), *of_data]
        given += "".join(f" {name}={digest_of(value)}" for name, value in plain if is_number(value))
        function = function.func
    named: Any = function if hasattr(function, "__qualname__") else type(function)
    module = str(getattr(named, "__module__", "")).replace("__mp_main__", "__main__")  # as workers import it
    return f"{module}:{named.__qualname__}{given}"


def some_of(count: int) -> Sequence[int]:
    """Return the places of the entries whose sizes are looked at."""
    return chosen(count, min(_MOST_SIZES, max(_FEWEST_SIZES, count // _ONE_IN)))


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


def looked(storage: Storage, one: Object, look: Callable[[Read], str]) -> str:
    """Return `look(read)` of an object; what it reads is asked for at once."""
    asked: list[tuple[int, int]] = []

    def ask(start: int, end: int) -> bytes:
        asked.append((start, end))
        return b""

    look(ask)
    parts = storage.read_many((one, start, end - start) for start, end in asked)
    return look(lambda start, end: next(parts))


def below(paths: Sequence[str]) -> list[str]:
    """Return paths relative to the folder that all of them are in; some may be absolute."""
    if len({os.path.isabs(path) for path in paths}) == 2:
        paths = [os.path.abspath(path) for path in paths]
    folder = os.path.commonpath([os.path.dirname(path) for path in paths]) if paths else ""
    return [os.path.relpath(path, folder) if folder else os.path.normpath(path) for path in paths]


def parents_of(array: Any) -> Iterator[Any]:
    """Yield an array and what it is a part of, the innermost last, as a mapped one."""
    while array is not None:
        yield array
        array = getattr(array, "base", None)  # numpy's windows have something else than an array between


# Values -------------------------------------------------------------------------------------------------


ARRAYS_OWN = (TypeError, ValueError, RuntimeError, LookupError)  # what array-likes say that they cannot do


_LONG_BITS = 2048  # Python may refuse to write longer integers in decimal
_LONGEST_VALUE = 4096  # bytes, or members of a set
_PLAIN = (bool, int, float, complex, str, bytes, Decimal, Fraction, date, time, timedelta)
_USUAL = ("bool", "int64", "float64", "complex128")  # a Python number becomes the same batch


class Unlike(Exception):
    """Error: a value whose bytes say nothing, such as an object of a class of the user's."""


def digest_of(value: Any) -> str:
    """Return a digest of a plain value, an array, or a container of those. Raises `Unlike`."""
    return records(1, lambda _: value)


def is_number(value: Any) -> bool:
    """Whether it is one number, of Python's or numpy's."""
    return isinstance(value, int | float | np.number)


def is_name(value: Any) -> bool:
    """Whether it is a text that says the same on each host."""
    return isinstance(value, str) and not os.path.isabs(value)


def by_name(value: Any) -> Any:
    """Return a named tuple as a dict, and all else as it is."""
    names = getattr(type(value), "_fields", None) if isinstance(value, tuple) else None
    return dict(zip(names, value, strict=True)) if names else value


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
    if isinstance(value, np.generic) and value.dtype.names is None:
        if value.dtype.kind in "biufcmM" and value.dtype.name not in _USUAL:
            digest.update(f"{value.dtype} ".encode())
        value = value.item()
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    kind = type(value)
    plain = kind if kind in _PLAIN else next((one for one in _PLAIN if issubclass(kind, one)), None)
    if issubclass(kind, Enum):
        _add(digest, [value._name_, value._value_], depth - 1)
    elif value is None or plain is not None:
        name = "NoneType" if plain is None else plain.__name__
        digest.update(f"{name} {_said(value, plain)};".encode("utf-8", "surrogatepass"))
    elif isinstance(value, Mapping):
        digest.update(b"{%d" % len(value))
        for key, item in value.items():
            _add(digest, key, depth - 1)
            _add(digest, item, depth - 1)
    elif isinstance(value, set | frozenset):
        _add(digest, {"set": sorted(map(digest_of, value))}, depth - 1)
    elif isinstance(value, list | tuple):
        if (named := by_name(value)) is not value:
            _add(digest, [*named], depth - 1)
        digest.update(b"[%d" % len(value))
        for item in value:
            _add(digest, item, depth - 1)
    else:
        _add_array(digest, value, depth)


def _said(value: Any, kind: Any) -> str:
    """A plain value as text, whatever its own class says of it; but pandas' times know more than Python's."""
    if kind is int and value.bit_length() > _LONG_BITS:
        return hex(value)
    return repr(value) if kind in (None, date, time, timedelta) else str(kind.__repr__(value))


def _add_array(digest: Any, value: Any, depth: int) -> None:
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise Unlike
    digest.update(f"{value.dtype} {tuple(value.shape)};".encode())
    if isinstance(value, np.ma.MaskedArray):
        _add(digest, np.ma.getmaskarray(value), depth - 1)
    try:
        array = _as_array(value)
    except ARRAYS_OWN as exc:  # it has no values, as torch's on the device "meta", or is sparse
        raise Unlike from exc
    if array.dtype.hasobject:
        _add(digest, array.tolist(), depth - 1)
    else:
        if array.dtype.names:
            from numpy.lib.recfunctions import repack_fields  # 50 ms

            array = repack_fields(array, recurse=True)  # between fields are any bytes
        digest.update(np.ascontiguousarray(array).tobytes())


def _as_array(value: Any) -> Any:
    try:
        return np.asarray(value)
    except ARRAYS_OWN:  # on another device, or of a type that numpy has not, as torch's bfloat16
        return np.asarray(value.tolist())
