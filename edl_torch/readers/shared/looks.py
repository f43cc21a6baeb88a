"""What a reader looks at for its fingerprint: names, sizes of some files, blocks, values of some records.

Each look is a small part of what it costs to index the same data. Which files, blocks and records are looked
at depends on how many there are, and on nothing else, so that every host looks at the same ones.
"""

from __future__ import annotations

import functools
import hashlib
import os
import random
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, timedelta
from typing import Any

import numpy as np

from edl_torch.fingerprint import LISTED, RUNS, Fingerprint, Part
from edl_torch.readers.shared.mapped import StringTable

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


@functools.lru_cache(maxsize=64)
def chosen(count: int, most: int) -> Sequence[int]:
    """Return up to `most` of `count` places, in order, the same ones everywhere."""
    return range(count) if count <= most else sorted(random.Random(count).sample(range(count), most))


def listing_of(
    path: str, names: Iterable[str], files: Callable[[int], list[str]], *, whole: bool
) -> Fingerprint:
    """Return the fingerprint of what the file `path` lists: its bytes, and sizes of some entries' files."""
    table = names if isinstance(names, StringTable) else StringTable(names)
    looks, also = sizes(len(table), files, whole=whole), [(os.path.basename(path), whole_file(path))]
    return listing("whole" if whole else "names", table, looks, also)


def sizes(count: int, files: Callable[[int], list[str]], *, whole: bool) -> dict[int, str]:
    """Return sizes of files of some of `count` entries, by place: of 64 or fewer all, of very many 1,024.

    Of XML, which has annotations and is short, checksums too. For the `whole`, digests of all of them.
    """
    most = min(_MOST_SIZES, max(_FEWEST_SIZES, count // _ONE_IN))
    places = range(count) if whole else chosen(count, most)
    return {place: " ".join(_looked_at(path, whole) for path in files(place)) for place in places}


def _looked_at(path: str, whole: bool) -> str:
    try:
        if not whole:
            return whole_file(path) if path.endswith(".xml") else str(os.stat(path).st_size)
        with open(path, "rb") as file:
            return hashlib.file_digest(file, _blake2b).hexdigest()
    except OSError:
        return "missing"


def _blake2b() -> Any:
    return hashlib.blake2b(digest_size=16)


def whole_file(path: str) -> str:
    """Return a file's size and checksum: what parses it may not wait for a stronger one. Raises OSError."""
    size = checksum = 0
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(_PIECE_BYTES):
            size, checksum = size + len(piece), zlib.crc32(piece, checksum)
    return f"{size} {checksum:08x}"


def blocks(size: int, read: Callable[[int, int], bytes], also: bytes = b"", *, whole: bool = False) -> str:
    """Return a digest of a file's size, some of its blocks, and `also`; of a small file's bytes all.

    `read` gets the bytes from … to before ….
    """
    digest = hashlib.blake2b(b"%d;" % size, digest_size=16)
    digest.update(also)
    length = _PIECE_BYTES if whole else _BLOCK_BYTES
    count = -(-size // length)
    for block in range(count) if whole else chosen(count, _BLOCKS):
        digest.update(read(block * length, min((block + 1) * length, size)))
    return digest.hexdigest()


def below(paths: Sequence[str]) -> list[str]:
    """Return paths relative to the folder that all of them are in."""
    folder = os.path.commonpath([os.path.dirname(path) for path in paths]) if paths else ""
    return [os.path.relpath(path, folder) if folder else path for path in paths]


# Values -------------------------------------------------------------------------------------------------


ARRAYS_OWN = (TypeError, ValueError, RuntimeError, LookupError)  # what array-likes say that they cannot do


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
