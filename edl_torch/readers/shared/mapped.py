"""Numpy arrays and strings in memory-mapped files, and indexes of data files that are built once and kept so.

All processes of a machine share one copy. A file is a line of JSON (what it is, then name, dtype, shape and
offset of each array), padding and the arrays, each aligned to 64 bytes. An index is good for a file of one
size that was not written to, nor changed in any other way, since it was made. It must not know what the
arrays mean.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import logging
import mmap
import os
import shutil
import stat
import tempfile
import weakref
from array import array as packed
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from edl_torch.errors import DataFormatError, SourceChanged
from edl_torch.readers.shared.files import FileStamp, file_lock, whole_file

log = logging.getLogger("edl_torch.readers")

Array = npt.NDArray[Any]

# Below, an array travels in a reader's pickle faster than a file is made and mapped.
SPILL_BYTES = 1 << 20
_MAGIC = "edl_torch arrays 1"
_ALIGNMENT = 64
_LONGEST_HEADER = 1 << 20
# Python's names of undecodable files and JSON's lone surrogates both survive this codec.
_CODEC = "utf-8", "surrogatepass"


class MappedArrays(Mapping[str, Array]):
    """Read-only arrays by name, mapped when the first is asked for; pickles as its path.

    One made by `spill` has no path that others could open: a process that is being started inherits the file,
    any other pickle holds the arrays themselves.

    Args:
        path: A file that `write_arrays` made.
        expected: The header that it must have, if any: a copy that maps the file later than its original
            shall not take the index of other data for its own.

    Raises, at the first access, DataFormatError for another file, SourceChanged for the index of other data,
    and FileNotFoundError for none.
    """

    def __init__(self, path: str | os.PathLike[str], expected: Mapping[str, Any] | None = None) -> None:
        self.path = os.fspath(path)
        self._expected = expected
        self._opened: tuple[dict[str, Any], dict[str, Array]] | None = None
        self._label = ""
        self._descriptor: int | None = None

    @classmethod
    def spill(cls, arrays: Mapping[str, Array], label: str = "arrays") -> MappedArrays:
        """Put arrays into a temporary file without a name, in the folder that `TMPDIR` says.

        It goes with the last process that maps it, even if all of them are killed. Raises OSError where there
        is no room.
        """
        with tempfile.TemporaryFile(prefix=f"edl_torch-{label}-") as file:
            _write(file, arrays, {})
            file.flush()
            return cls._of_descriptor(os.dup(file.fileno()), label)

    @classmethod
    def _of_descriptor(cls, descriptor: int, label: str) -> MappedArrays:
        mapped = cls(f"<temporary {label}>")
        mapped._label, mapped._descriptor = label, descriptor
        weakref.finalize(mapped, os.close, descriptor)
        mapped._opened = _map(descriptor, mapped.path)
        return mapped

    @property
    def header(self) -> Mapping[str, Any]:
        """What the writer noted beside the arrays."""
        return self._open()[0]

    def __getitem__(self, name: str) -> Array:
        return self._open()[1][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._open()[1])

    def __len__(self) -> int:
        return len(self._open()[1])

    def __reduce__(self) -> tuple[Any, ...]:
        if self._descriptor is None:
            return type(self), (self.path, self._expected)
        if get_spawning_popen() is None:
            return type(self).spill, (dict(self), self._label)
        return _inherited, (DupFd(self._descriptor), self._label)

    def __repr__(self) -> str:
        return f"<MappedArrays {self.path!r}>"

    def _open(self) -> tuple[dict[str, Any], dict[str, Array]]:
        if self._opened is None:
            with open(self.path, "rb") as file:
                header, arrays = _map(file.fileno(), self.path)
            if self._expected is not None and header != self._expected:
                raise SourceChanged(
                    f"the index '{self.path}' was made of other data than this reader's: the data has "
                    "changed meanwhile; start the job again"
                )
            self._opened = header, arrays
        return self._opened


def write_arrays(
    path: str | os.PathLike[str], arrays: Mapping[str, Array], header: Mapping[str, Any] | None = None
) -> None:
    """Write a file for `MappedArrays`, whole or not at all: readers of the path see the old file or the new.

    Raises OSError of the file system (no space, no permission) and leaves no part of a file.
    """
    with whole_file(Path(path)) as file:
        _write(file, arrays, dict(header or {}))


def _write(file: BinaryIO, arrays: Mapping[str, Array], header: dict[str, Any]) -> None:
    rows, position = [], 0
    for name, array in arrays.items():
        if array.dtype.hasobject:
            raise TypeError(f"array {name!r} holds Python objects, which cannot be mapped")
        rows.append([name, array.dtype.str, list(array.shape), position])
        position = _aligned(position + array.nbytes)
    described = {"what": _MAGIC, "header": header, "arrays": rows, "bytes": position}
    file.write(json.dumps(described).encode() + b"\n")
    for array in arrays.values():
        file.write(bytes(_aligned(file.tell()) - file.tell()))
        file.write(np.ascontiguousarray(array).data.cast("B") if array.size else b"")
    file.write(bytes(_aligned(file.tell()) - file.tell()))


def _inherited(duplicate: Any, label: str) -> MappedArrays:
    return MappedArrays._of_descriptor(duplicate.detach(), label)


def _map(descriptor: int, path: str) -> tuple[dict[str, Any], dict[str, Array]]:
    # No read, no seek: processes that inherit a descriptor have one position between them.
    size = os.fstat(descriptor).st_size
    whole = mmap.mmap(descriptor, size, access=mmap.ACCESS_READ) if size else b""
    header_bytes = whole.find(b"\n", 0, _LONGEST_HEADER) + 1
    described = _described(whole[:header_bytes], path)
    start = _aligned(header_bytes)
    if size < start + described["bytes"]:
        raise DataFormatError(f"the index '{path}' is cut short: remove it, it is built again")
    arrays = {
        name: np.ndarray(tuple(shape), dtype=dtype, buffer=whole, offset=start + offset)
        for name, dtype, shape, offset in described["arrays"]
    }
    return described["header"], arrays


def _described(line: bytes, path: str) -> dict[str, Any]:
    try:
        described = json.loads(line)
    except ValueError:
        described = None
    if not isinstance(described, dict) or described.get("what") != _MAGIC:
        raise DataFormatError(f"'{path}' is no index of this version: remove it, it is built again")
    return described


def _aligned(position: int) -> int:
    return -(-position // _ALIGNMENT) * _ALIGNMENT


def shared(arrays: Mapping[str, Array], label: str, above: int = SPILL_BYTES) -> Mapping[str, Array]:
    """The arrays, in a temporary file where they take more than `above` bytes together.

    Without room for a file they stay in memory, with a warning: loader workers then have copies of their own.
    """
    total = sum(array.nbytes for array in arrays.values())
    if total <= above:
        return dict(arrays)
    try:
        return MappedArrays.spill(arrays, label=label)
    except OSError as exc:
        log.warning(
            "label=%s bytes=%d the index stays in memory, once for each loader worker (%s); TMPDIR names "
            "another folder for temporary files",
            *(label, total, exc),
        )
        return dict(arrays)


class StringTable:
    """An immutable sequence of `str`, held as one UTF-8 blob and int64 bounds (8 bytes an entry).

    So the index of a dataset with millions of files stays small and pickles fast. A large one is mapped from
    a file that all processes of the trainer share.
    """

    __slots__ = ("_arrays", "_blob", "_bounds")

    def __init__(self, strings: Iterable[str] = ()) -> None:
        blob, bounds = bytearray(), packed("q", [0])
        for string in strings:
            blob += string.encode(*_CODEC)
            bounds.append(len(blob))
        arrays: dict[str, Array] = {
            "blob": np.frombuffer(blob, np.uint8),
            "bounds": np.frombuffer(bounds, np.int64),
        }
        self.__setstate__(shared(arrays, "strings"))

    def __setstate__(self, arrays: Mapping[str, Array]) -> None:
        self._arrays = arrays
        self._blob = memoryview(arrays["blob"])  # type: ignore[arg-type]
        self._bounds = arrays["bounds"]

    def __getstate__(self) -> Mapping[str, Array]:
        return self._arrays

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < len(self):
            raise IndexError(f"entry {index} of a table of {len(self)}")
        return str(self._blob[self._bounds[index] : self._bounds[index + 1]], *_CODEC)

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))

    def raw(self, first: int, after: int) -> tuple[memoryview, memoryview]:
        """Return the bytes of the entries `first … after - 1`, one after the other, and their lengths."""
        bounds = self._bounds[first : after + 1]
        return self._blob[bounds[0] : bounds[-1]], np.diff(bounds).astype("<i4").data

    @property
    def nbytes(self) -> int:
        """Bytes held, in memory or in the file."""
        return len(self._blob) + self._bounds.nbytes

    def __repr__(self) -> str:
        return f"<StringTable n={len(self)} nbytes={self.nbytes}>"


BESIDE = "beside"


def cached_index(
    stamp: FileStamp,
    kind: str,
    build: Callable[[], Mapping[str, Array]],
    *,
    options: str = "",
    index_dir: str | os.PathLike[str] | None = None,
) -> MappedArrays:
    """The index of a file: the kept one if it was made of this very file, else `build()`, which is kept.

    Args:
        stamp: The file.
        kind: What sort of index, with the version of its meaning: "recordio2".
        build: Makes the arrays. What it raises goes to the caller.
        options: What else the index depends on, such as a dialect.
        index_dir: A folder, or `BESIDE` for `<file>.<kind>.edl-index` beside the data. Default:
            `EDL_INDEX_DIR`, else `edl_torch/` in the user's cache (`XDG_CACHE_HOME`, `~/.cache`), for a user
            without a home `edl_torch-<uid>` in the folder for temporary files; where that is not his alone,
            a folder of this process.

    Of several processes that start at once one builds, and the others take what it kept. Where it cannot be
    kept (a read-only folder, a full disk) a warning says so and the index lives in a temporary file. Raises
    SourceChanged when the data changes while its index is built.
    """
    place = index_place(stamp, kind, options, index_dir)
    header = {
        "path": stamp.path,
        "size": stamp.size,
        "mtime_ns": stamp.mtime_ns,
        "ctime_ns": stamp.ctime_ns,
        "kind": kind,
        "options": options,
    }
    kept = _kept(place, header)
    if kept is not None:
        return kept
    with suppress(OSError):  # without the folder there is no lock, and a warning when the index is written
        place.parent.mkdir(parents=True, exist_ok=True)
    with file_lock(place):
        kept = _kept(place, header)
        return _built(stamp, place, header, build) if kept is None else kept


def _built(
    stamp: FileStamp, place: Path, header: Mapping[str, Any], build: Callable[[], Mapping[str, Array]]
) -> MappedArrays:
    arrays = build()
    stamp.check()
    try:
        write_arrays(place, arrays, header)
    except OSError as exc:
        log.warning(
            "path=%s its index cannot be kept at '%s' (%s) and is built again by the next process; "
            "EDL_INDEX_DIR or index_dir= name another folder",
            *(stamp.path, place, exc.strerror),
        )
        return MappedArrays.spill(arrays, label=str(header["kind"]))
    return MappedArrays(place, header)


def index_place(
    stamp: FileStamp, kind: str, options: str = "", index_dir: str | os.PathLike[str] | None = None
) -> Path:
    """The path at which `cached_index` keeps an index; it, or its folder, may not be there."""
    if index_dir is not None and os.fspath(index_dir) == BESIDE:
        tail = f".{_digest(options)[:8]}" if options else ""
        return Path(f"{stamp.path}.{kind}{tail}.edl-index")
    chosen = (os.environ.get("EDL_INDEX_DIR") or None) if index_dir is None else index_dir
    folder = _default_folder() if chosen is None else Path(chosen)
    return folder / f"{Path(stamp.path).name[:100]}.{kind}.{_digest(stamp.path, options)}.edl-index"


def _default_folder() -> Path:
    if cache := os.environ.get("XDG_CACHE_HOME"):
        return Path(cache) / "edl_torch"
    try:
        return Path.home() / ".cache" / "edl_torch"
    except RuntimeError:  # a container's user may have none
        return _own_folder(Path(tempfile.gettempdir()) / f"edl_torch-{os.getuid()}")


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode("utf-8", "surrogateescape")).hexdigest()[:24]


def _kept(place: Path, header: Mapping[str, Any]) -> MappedArrays | None:
    found = MappedArrays(place)
    try:
        return MappedArrays(place, header) if found.header == header else None
    except FileNotFoundError:
        return None
    except (DataFormatError, OSError) as exc:
        log.warning("index=%s cannot be used and is built again: %s", place, exc)
        return None


def _own_folder(folder: Path) -> Path:
    """`folder`, where everybody may make one, if it is this user's alone; else a new one, and a warning."""
    try:
        with suppress(FileExistsError):
            folder.mkdir(0o700)
        found = os.lstat(folder)
    except OSError:
        return folder  # nothing can be kept there, which who wants to keep something says
    mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return folder if mine and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else _new_folder(folder)


@functools.cache
def _new_folder(instead_of: Path) -> Path:
    made = Path(tempfile.mkdtemp(prefix="edl_torch-"))
    log.warning(
        "'%s' is not this user's alone: nothing is read from it, as others may have written it, and this "
        "process keeps its indexes in '%s' until it ends; EDL_INDEX_DIR names a folder of your own",
        *(instead_of, made),
    )
    atexit.register(_remove, made, os.getpid())
    return made


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked child
        shutil.rmtree(folder, ignore_errors=True)
