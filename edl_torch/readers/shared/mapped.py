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
import io
import json
import logging
import mmap
import os
import shutil
import stat
import sys
import tempfile
import weakref
from array import array as packed
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import islice
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

from edl_torch.errors import DataFormatError, InvalidArgument, SourceChanged
from edl_torch.readers.shared.files import FileStamp, file_lock, read_range
from edl_torch.shard import IndexArray
from edl_torch.system.whole_files import whole_file

if TYPE_CHECKING:
    from edl_torch.readers.storage import Storage

log = logging.getLogger("edl_torch.readers")

Array = npt.NDArray[Any]

# Below, an array travels in a reader's pickle faster than a file is made and mapped.
SPILL_BYTES = 1 << 20
# Below, an index is read and not mapped: a map takes a descriptor before Python 3.13.
_SMALL_BYTES = 1 << 14
_AT_ONCE = 1000  # strings
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
        return cls._in_file(lambda file: _write(file, arrays, {}), label)

    @classmethod
    def of_bytes(cls, pieces: Iterable[bytes], label: str = "arrays") -> MappedArrays:
        """The arrays of a file that was read from elsewhere, in a temporary file. Raises DataFormatError."""
        return cls._in_file(lambda file: file.writelines(pieces), label)

    @classmethod
    def _in_file(cls, write: Callable[[BinaryIO], object], label: str) -> MappedArrays:
        with tempfile.TemporaryFile(prefix=f"edl_torch-{label}-") as file:
            write(file)
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
                header, arrays = _map(file.fileno(), self.path, read_below=_SMALL_BYTES)
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


def arrays_as_bytes(arrays: Mapping[str, Array], header: Mapping[str, Any]) -> bytes:
    """What `write_arrays` writes."""
    file = io.BytesIO()
    _write(file, arrays, dict(header))
    return file.getvalue()


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


def _map(descriptor: int, path: str, read_below: int = 1) -> tuple[dict[str, Any], dict[str, Array]]:
    # No read, no seek: processes that inherit a descriptor have one position between them.
    size = os.fstat(descriptor).st_size
    whole: mmap.mmap | memoryview
    if size < read_below:
        whole = _read(descriptor, size)
    elif sys.version_info >= (3, 13):
        whole = mmap.mmap(descriptor, size, access=mmap.ACCESS_READ, trackfd=False)
    else:
        whole = mmap.mmap(descriptor, size, access=mmap.ACCESS_READ)  # holds a descriptor
    searched = whole if isinstance(whole, mmap.mmap) else bytes(whole)  # a map is not copied for it
    header_bytes = searched.find(b"\n", 0, _LONGEST_HEADER) + 1
    described = _described(bytes(whole[:header_bytes]), path)
    start = _aligned(header_bytes)
    if size < start + described["bytes"]:
        raise DataFormatError(f"the index '{path}' is cut short: remove it, it is built again")
    arrays = {
        name: np.ndarray(tuple(shape), dtype=dtype, buffer=whole, offset=start + offset)
        for name, dtype, shape, offset in described["arrays"]
    }
    return described["header"], arrays


def _read(descriptor: int, size: int) -> memoryview:
    room = np.empty(size + _ALIGNMENT, np.uint8)
    begin = -room.ctypes.data % _ALIGNMENT
    inside = room[begin : begin + size]
    inside[:] = np.frombuffer(read_range(descriptor, 0, size), np.uint8)
    inside.flags.writeable = False
    return inside.data


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
        blob, lengths, left = bytearray(), packed("q", [0]), iter(strings)
        while some := list(islice(left, _AT_ONCE)):
            text = "".join(some)
            data = text.encode(*_CODEC)
            blob += data
            is_ascii = len(data) == len(text)
            lengths.extend(map(len, some) if is_ascii else (len(each.encode(*_CODEC)) for each in some))
        arrays: dict[str, Array] = {
            "blob": np.frombuffer(blob, np.uint8),
            "bounds": np.cumsum(np.frombuffer(lengths, np.int64)),
        }
        self.__setstate__(shared(arrays, "strings"))

    @classmethod
    def of(cls, arrays: Mapping[str, Array]) -> StringTable:
        """The table whose `arrays` these are."""
        table = cls.__new__(cls)
        table.__setstate__(shared(arrays, "strings"))
        return table

    @property
    def arrays(self) -> Mapping[str, Array]:
        """What it is made of: `blob`, uint8, and `bounds`, int64."""
        return self._arrays

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

    def take(self, places: IndexArray) -> StringTable:
        """The entries at these places, which go up."""
        blob, bounds = self._arrays["blob"], self._bounds
        runs = np.split(places, np.flatnonzero(np.diff(places) != 1) + 1) if len(places) else []
        pieces = [blob[bounds[run[0]] : bounds[run[-1] + 1]] for run in runs]
        return StringTable.of(
            {
                "blob": np.concatenate(pieces) if pieces else blob[:0],
                "bounds": np.cumsum(np.concatenate([[0], np.diff(bounds)[places]]), dtype=np.int64),
            }
        )

    def end_in(self, suffixes: Iterable[str]) -> npt.NDArray[np.bool_]:
        """Of each entry whether it ends in one of these, which are in lower case, in any case of ASCII."""
        blob, bounds = self._arrays["blob"], self._bounds
        ends = np.zeros(len(self), np.bool_)
        for suffix in suffixes:
            letters = np.frombuffer(suffix.encode(*_CODEC), np.uint8)
            left = np.flatnonzero(~ends & (np.diff(bounds) >= len(letters)))
            for back, letter in enumerate(letters[::-1].tolist(), 1):
                here = blob[bounds[left + 1] - back]
                is_upper = (here >= ord("A")) & (here <= ord("Z"))
                left = left[np.where(is_upper, here | 0x20, here) == letter]
            ends[left] = True
        return ends

    def have_hidden(self) -> npt.NDArray[np.bool_]:
        """Of each entry, a path, whether a part of it begins with a dot."""
        blob, bounds = self._arrays["blob"], self._bounds
        dots = np.flatnonzero(blob == ord("."))
        entries = np.searchsorted(bounds, dots, side="right") - 1
        begins = (bounds[entries] == dots) | (blob[dots - 1] == ord("/"))
        hidden = np.zeros(len(self), np.bool_)
        hidden[entries[begins]] = True
        return hidden

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


class Keep(Protocol):
    """A place for arrays: what is there is whole, or not there."""

    def version(self) -> object:
        """What tells what is kept from what was kept before; None where nothing is."""

    def load(self, header: Mapping[str, Any]) -> MappedArrays | None:
        """What is kept, where it has this header."""

    def save(
        self, arrays: Mapping[str, Array], header: Mapping[str, Any], instead_of: object
    ) -> MappedArrays:
        """Keep arrays in the place of that version, and return them as they are kept; where they cannot be,
        a warning says so."""

    def alone(self, found: Callable[[], MappedArrays | None]) -> AbstractContextManager[MappedArrays | None]:
        """Return what was found; None where nothing is, and others who ask wait until the block ends."""


def cached_index(
    stamp: FileStamp,
    kind: str,
    build: Callable[[], Mapping[str, Array]],
    *,
    options: str = "",
    storage: Storage | None = None,
) -> MappedArrays:
    """The index of a file: the kept one if it was made of this very file, else `build()`, which is kept.

    Args:
        stamp: The file.
        kind: What sort of index, with the version of its meaning: "recordio2".
        build: Makes the arrays. What it raises goes to the caller.
        options: What else the index depends on, such as a dialect.
        storage: Its `index_dir` is a folder, a prefix of a store, or `BESIDE` for `<file>.<kind>.edl-index`
            beside the data. Default: `EDL_INDEX_DIR`, else `edl_torch/` in the user's cache
            (`XDG_CACHE_HOME`, `~/.cache`), for a user without a home `edl_torch-<uid>` in the folder for
            temporary files; where that is not his alone, a folder of this process.

    Of several processes that start at once one builds, and the others take what it kept. Where it cannot be
    kept (a read-only folder, a full disk) a warning says so and the index lives in a temporary file. Raises
    SourceChanged when the data changes while its index is built.
    """
    header = {**asdict(stamp), "kind": kind, "options": options}

    def built() -> Mapping[str, Array]:
        arrays = build()
        stamp.check()
        return arrays

    return kept_index(kept_at(stamp, kind, options, storage), header, built)


def kept_at(stamp: FileStamp, kind: str, options: str, storage: Storage | None) -> Keep:
    """Where an index is kept; in a `storage`, where its `index_dir` is a prefix of one."""
    index_dir = None if storage is None else storage.index_dir
    if storage is None or index_dir is None or not _is_prefix(index_dir):
        return KeptHere(index_place(stamp, kind, options, index_dir))
    return storage.keep(f"{index_dir.rstrip('/')}/{_index_name(stamp.path, kind, options)}")


def _is_prefix(index_dir: str) -> bool:
    return "://" in index_dir.removeprefix("file://")


def kept_index(
    place: Keep, header: Mapping[str, Any], build: Callable[[], Mapping[str, Array]], *, refresh: bool = False
) -> MappedArrays:
    """The arrays that are kept at a place with this header, else `build()`, which is kept; with `refresh`
    only what others keep from now on. Of several processes that start at once one builds."""
    before = place.version() if refresh else None

    def found() -> MappedArrays | None:
        return None if refresh and place.version() == before else place.load(header)

    kept = found()
    if kept is not None:
        return kept
    with place.alone(found) as kept:
        if kept is not None:
            return kept
        seen = place.version()
        arrays = build()
        # Where nobody can be alone another one may have been sooner: all take the same.
        kept = None if place.version() == seen else place.load(header)
        return place.save(arrays, header, seen) if kept is None else kept


@dataclass(frozen=True, slots=True)
class KeptHere:
    """Arrays in a file of this machine."""

    place: Path

    def version(self) -> object:
        """When it was written, and where."""
        try:
            found = os.stat(self.place)
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns

    def load(self, header: Mapping[str, Any]) -> MappedArrays | None:
        """Map it. One that cannot be used is none, with a warning."""
        try:
            fits = MappedArrays(self.place).header == header
        except FileNotFoundError:
            return None
        except (DataFormatError, OSError) as exc:
            log.warning("index=%s cannot be used and is built again: %s", self.place, exc)
            return None
        return MappedArrays(self.place, header) if fits else None

    def save(
        self, arrays: Mapping[str, Array], header: Mapping[str, Any], instead_of: object
    ) -> MappedArrays:
        """Write it, or a temporary file."""
        try:
            write_arrays(self.place, arrays, header)
        except OSError as exc:
            return not_kept(arrays, header, self.place, exc.strerror)
        return MappedArrays(self.place, header)

    @contextmanager
    def alone(self, found: Callable[[], MappedArrays | None]) -> Iterator[MappedArrays | None]:
        """Hold the lock on it."""
        with suppress(OSError):  # without the folder there is no lock, and a warning when it is written
            self.place.parent.mkdir(parents=True, exist_ok=True)
        with file_lock(self.place):
            yield found()


def not_kept(
    arrays: Mapping[str, Array], header: Mapping[str, Any], place: object, why: object
) -> MappedArrays:
    """The arrays in a temporary file, and a warning that they are kept nowhere."""
    log.warning(
        "path=%s its index cannot be kept at '%s' (%s) and is built again by the next process; "
        "EDL_INDEX_DIR or index_dir= name another folder",
        *(header["path"], place, why),
    )
    return MappedArrays.spill(arrays, label=str(header["kind"]))


def index_place(stamp: FileStamp, kind: str, options: str = "", index_dir: str | None = None) -> Path:
    """The path at which `cached_index` keeps an index; it, or its folder, may not be there. What is for this
    machine alone is in the usual folder where `index_dir` is a prefix."""
    if index_dir == BESIDE:
        if "://" in stamp.path:
            raise InvalidArgument(
                f"index_dir='{BESIDE}' is for files of this machine: name a folder for '{stamp.path}'"
            )
        tail = f".{_digest(options)[:8]}" if options else ""
        return Path(f"{stamp.path}.{kind}{tail}.edl-index")
    own = index_dir is None or _is_prefix(index_dir)
    chosen = (os.environ.get("EDL_INDEX_DIR") or None) if own else index_dir
    folder = _default_folder() if chosen is None else Path(chosen.removeprefix("file://"))
    return folder / _index_name(stamp.path, kind, options)


def _index_name(path: str, kind: str, options: str) -> str:
    return f"{Path(path).name[:100]}.{kind}.{_digest(path, options)}.edl-index"


def _default_folder() -> Path:
    if cache := os.environ.get("XDG_CACHE_HOME"):
        return Path(cache) / "edl_torch"
    try:
        return Path.home() / ".cache" / "edl_torch"
    except RuntimeError:  # a container's user may have none
        return _own_folder(Path(tempfile.gettempdir()) / f"edl_torch-{os.getuid()}")


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode("utf-8", "surrogateescape")).hexdigest()[:24]


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
