"""The bytes of data files, here or in stores, as they were when they were looked at; readers of those.

A file of this machine is read at once. Of an object whole ranges are asked for before they are read: those of
the records that a lease, or the index of a file, will want (`expect`), in requests of 1 MiB of which many are
under way. It must not know what a record is.
"""

from __future__ import annotations

import hashlib
import io
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np

from edl_torch.errors import DataFormatError
from edl_torch.fingerprint import Fingerprint, Part
from edl_torch.readers.base import AbstractDataReader, Range, check_range, no_source
from edl_torch.readers.shared.files import OPEN_FILES, FileStamp, OpenFile, Read
from edl_torch.readers.shared.finder import Finder, refuse_no_file
from edl_torch.readers.shared.looks import below, listing
from edl_torch.readers.shared.mapped import Array, cached_index
from edl_torch.readers.storage import Data, Object, Storage, is_elsewhere, local_path
from edl_torch.readers.storage.requests import Ahead
from edl_torch.shard import TaskType

REQUEST_BYTES = 1 << 20
_THREADS = 16
_WORTH_KEEPING = 1 << 18  # bytes: a smaller file is indexed as fast as an index is opened


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectStamp(FileStamp):
    """An object in a store as it was listed; its two times are its tag. Each read of it is compared."""

    @classmethod
    def of_object(cls, one: Object) -> ObjectStamp:
        return cls(path=one.name, size=one.size, mtime_ns=one.tag, ctime_ns=one.tag)

    @property
    def object(self) -> Object:
        """What a store is asked for."""
        return Object(self.path, self.size, self.mtime_ns)

    @property
    def is_told_by_size(self) -> bool:
        """Whether its store has no tag of it."""
        return not self.object.tag

    def check(self) -> None:
        """Reads have done so."""


_T = TypeVar("_T")


def each_looked_at(names: Sequence[str], look: Callable[[str], _T], *, away: int) -> Iterator[_T]:
    """Yield what `look` finds in each file, or raise what it raises, in order: by threads, `away` of them for
    files in stores. They are gone before any loader worker is forked."""
    if len(names) == 1:
        yield look(names[0])
        return
    most = away if is_elsewhere(names[0]) else _THREADS
    with ThreadPoolExecutor(min(most, len(names)), thread_name_prefix="edl-sources") as pool:
        yield from pool.map(look, names)


def look_at(name: str, storage: Storage, what: str) -> FileStamp:
    """Look at a file or an object now. Raises DataFormatError for what is neither, which was to be `what`,
    OSError, and what the storage raises."""
    if is_elsewhere(name):
        one = storage.look(name)
        if one is None:
            raise DataFormatError(f"'{name}' does not exist; check the path and the bucket")
        return ObjectStamp.of_object(one)
    path = local_path(name)
    refuse_no_file(path)
    if os.path.isdir(path):
        raise DataFormatError(f"'{name}' is a folder: expected {what}")
    return FileStamp.of(path)


def stamp_arrays(stamps: Sequence[FileStamp]) -> dict[str, Array]:
    """What tells files from others, as one index of all of them keeps it; int64 [files] each."""
    columns = {"sizes": "size", "mtimes": "mtime_ns", "ctimes": "ctime_ns"}
    return {
        name: np.array([getattr(stamp, each) for stamp in stamps], np.int64) for name, each in columns.items()
    }


def stamps_in(names: Iterable[str], arrays: Mapping[str, Array]) -> list[FileStamp]:
    """The stamps of the files of these names, of which `stamp_arrays` made the arrays."""
    columns = (arrays[name].tolist() for name in ("sizes", "mtimes", "ctimes"))
    return [
        (ObjectStamp if is_elsewhere(name) else FileStamp)(
            path=local_path(name), size=size, mtime_ns=mtime_ns, ctime_ns=ctime_ns
        )
        for name, size, mtime_ns, ctime_ns in zip(names, *columns, strict=True)
    ]


def can_be_kept(stamp: FileStamp) -> bool:
    """Whether an index of it can be told from one of another object: some stores say no more than a size."""
    return bool(stamp.mtime_ns) or not isinstance(stamp, ObjectStamp)


def index_of(
    stamp: FileStamp, kind: str, build: Callable[[], Mapping[str, Array]], storage: Storage, options: str = ""
) -> Mapping[str, Array]:
    """`cached_index`; of a file that is indexed as fast as an index is opened, `build()`."""
    if stamp.size >= _WORTH_KEEPING and can_be_kept(stamp):
        return cached_index(stamp, kind, build, options=options, storage=storage)
    arrays = build()
    stamp.check()
    return arrays


class Sources:
    """Reads files and objects by their stamps; the files that were read last stay open.

    Args:
        storage: Where objects are asked for.
        keep: Of an expected range, as many requests' bytes are kept behind the place that is read; None: all,
            until other ranges are expected.
    """

    def __init__(self, storage: Storage, keep: int | None = None) -> None:
        self._storage, self._keep = storage, keep
        self._forget()

    def _forget(self) -> None:
        """What each process has of its own."""
        self._own = object()
        weakref.finalize(self, OPEN_FILES.put_away, self._own)
        self._expected: dict[str, list[_Range]] = {}
        self._pid = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {"_storage": self._storage, "_keep": self._keep}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def reading(self, stamp: FileStamp, is_same: Callable[[Read], bool] = lambda _: False) -> Read:
        """What reads a file from … to before …; `is_same` as for `OpenFile`. Raises what opening raises."""
        if isinstance(stamp, ObjectStamp):
            return partial(self._of_object, stamp)
        return OPEN_FILES.get(self._own, stamp.path, partial(OpenFile, stamp, is_same)).read

    def each(self, stamp: ObjectStamp, spans: Sequence[tuple[int, int]]) -> Iterator[bytes]:
        """Yield ranges of an object; those that were not expected are asked for at once."""
        if any(self._range_of(stamp, *span) for span in spans):
            return (self._of_object(stamp, *span) for span in spans)
        return self._storage.read_many((stamp.object, start, end - start) for start, end in spans)

    def expect(
        self,
        ranges: Sequence[tuple[FileStamp, int, int]],
        *,
        in_order: bool = False,
        piece: int = REQUEST_BYTES,
    ) -> None:
        """Ask for the bytes from … to before … of objects; those of `in_order` are read once each."""
        known = {(name, one.start, one.end): one for name, found in self._expected.items() for one in found}
        self._expected = {}
        for stamp, start, end in ranges:
            if isinstance(stamp, ObjectStamp) and end > start:
                one = None if in_order else known.get((stamp.path, start, end))
                if one is None:
                    keep = 1 if in_order else self._keep
                    one = _Range(self._storage, stamp.object, start, end, piece, keep)
                self._expected.setdefault(stamp.path, []).append(one)

    @staticmethod
    def requests_of(ranges: Sequence[tuple[FileStamp, int, int]]) -> list[tuple[Object, int, int]]:
        """What `expect` asks a store for."""
        return [
            (stamp.object, at, min(REQUEST_BYTES, end - at))
            for stamp, start, end in ranges
            if isinstance(stamp, ObjectStamp)
            for at in range(start, end, REQUEST_BYTES)
        ]

    def _of_object(self, stamp: ObjectStamp, start: int, end: int) -> bytes:
        end = min(end, stamp.size)
        one = self._range_of(stamp, start, end)
        if one is not None:
            return one.read(start, end)
        return self._storage.read(stamp.object, start, end - start)

    def _range_of(self, stamp: ObjectStamp, start: int, end: int) -> _Range | None:
        if self._pid != os.getpid():  # what a fork inherits is asked for by its parent
            self._forget()
        expected = self._expected.get(stamp.path, ())
        return next((one for one in expected if one.start <= start and end <= one.end), None)


class _Range:
    """A part of an object that is asked for in pieces. Several threads may read it."""

    def __init__(
        self, storage: Storage, one: Object, start: int, end: int, piece: int, keep: int | None
    ) -> None:
        self.start, self.end, self._piece, self._keep = start, end, piece, keep
        self._pieces: dict[int, Data] = {}
        self._lock = threading.Lock()
        wanted = [(one, at, min(piece, end - at)) for at in range(start, end, piece)]
        self._ahead: Ahead = storage.ahead(wanted)

    def read(self, start: int, end: int) -> bytes:
        """The bytes from … to before …, which are in it."""
        first = (start - self.start) // self._piece
        last = max(first, (end - 1 - self.start) // self._piece)
        with self._lock:
            parts = [self._take(number) for number in range(first, last + 1)]
            if self._keep is not None:
                for passed in [number for number in self._pieces if number < first - self._keep]:
                    del self._pieces[passed]
        at = self.start + first * self._piece
        return bytes((parts[0] if len(parts) == 1 else b"".join(parts))[start - at : end - at])

    def _take(self, number: int) -> Data:
        if number not in self._pieces:
            self._pieces[number] = self._ahead.take(number)
        return self._pieces[number]


def read_once(stamp: FileStamp, storage: Storage) -> Read:
    """What reads a file or an object that is looked at once, as it was then."""
    if isinstance(stamp, ObjectStamp):
        return Sources(storage).reading(stamp)
    return OpenFile(stamp, lambda _: False).read


class ObjectStream(io.RawIOBase):
    """The bytes of an object one after the other, asked for ahead."""

    def __init__(self, storage: Storage, one: Object) -> None:
        wanted = [(one, at, min(REQUEST_BYTES, one.size - at)) for at in range(0, one.size, REQUEST_BYTES)]
        self._parts: Iterator[bytes] = storage.read_many(wanted)
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Read the next bytes."""
        if not self._left:
            self._left = memoryview(next(self._parts, b""))
        count = min(len(buffer), len(self._left))
        buffer[:count], self._left = self._left[:count], self._left[count:]
        return count


def whole_digest(name: str, storage: Storage) -> str:
    """A digest of all bytes of a file or an object, as it is now; "missing" where it is not there."""
    digest = hashlib.blake2b(digest_size=16)
    try:
        one = storage.look(name) if is_elsewhere(name) else None
        if is_elsewhere(name) and one is None:
            return "missing"
        with open(local_path(name), "rb") if one is None else ObjectStream(storage, one) as file:
            while data := file.read(REQUEST_BYTES):
                digest.update(data)
    except OSError:
        return "missing"
    return digest.hexdigest()


class DataFile(Protocol):
    """A file of records, as it was when it was indexed."""

    @property
    def name(self) -> str:
        """Its path or URL, as it was given."""

    @property
    def stamp(self) -> FileStamp:
        """The file that is read: of a packed one its copy."""

    @property
    def count(self) -> int:
        """Number of records."""

    @property
    def looks(self) -> str:
        """What was looked at in it, for fingerprints."""

    def looked_at(self, storage: Storage, *, whole: bool) -> str:
        """What `looks` would be now, or of the `whole` file."""

    def is_same(self, read: Read) -> bool:
        """Whether what is read is what was indexed; as for `OpenFile`."""

    def span(self, start: int, end: int) -> tuple[int, int]:
        """The bytes from … to before … that have the records `start … end - 1`, of which there is one."""


F = TypeVar("F", bound=DataFile)


class FilesReader(AbstractDataReader, Generic[F]):
    """A reader of files, here or in stores; each is a source, named by its path or URL as given.

    A subclass makes its files, while the reader is made inside of `_indexing`, and makes records of bytes.
    """

    finder: ClassVar[Finder]  # of what is the reader's by its name
    _files: Mapping[str, F]  # by name, in order

    def __init__(self, storage: Storage) -> None:
        super().__init__()
        self._storage = storage
        self._bytes = Sources(storage)

    @contextmanager
    def _indexing(self) -> Iterator[Storage]:
        """Read, and ask, by way of another process until the block ends: loader workers are forked later."""
        with self._storage.apart() as apart:
            self._bytes = Sources(apart)
            yield apart
        self._bytes = Sources(self._storage)

    @property
    def files(self) -> list[str]:
        """The names of the sources, in order."""
        return list(self._files)

    @property
    def count(self) -> int:
        """Number of records in all files."""
        return sum(file.count for file in self._files.values())

    def create_shards(self, mode: TaskType = TaskType.TRAINING) -> dict[str, int]:
        """A source for each file, the same ones for every mode."""
        return {name: file.count for name, file in self._files.items()}

    @property
    def looks_again(self) -> bool:  # type: ignore[override]
        """Whether `fingerprint` looks at some files anew: those of which a read sees no change."""
        return any(file.stamp.is_told_by_size for file in self._files.values())

    def fingerprint(self, *, whole: bool = False) -> Fingerprint:
        """What was looked at in each file, and what makes records of them."""
        looks = {place: file.looks for place, file in enumerate(self._files.values())}
        with self._storage.apart() as apart:
            for place, file in enumerate(self._files.values()):
                if whole or file.stamp.is_told_by_size:
                    looks[place] = file.looked_at(apart, whole=whole)
        return listing("whole" if whole else "sampled", below(self.files), looks, self._made_by())

    def _made_by(self) -> list[Part]:
        """What decides what becomes of the same bytes; as by default it is no part, in tokens of before."""
        return []

    def expect(self, ranges: Sequence[Range], *, in_order: bool = False) -> None:
        """Ask for these records of files that lie in a store."""
        self._bytes.expect(self._away(ranges), in_order=in_order)

    def requests_of(self, ranges: Sequence[Range]) -> Sequence[tuple[Object, int, int]] | None:
        """One for each MiB of a range."""
        return self._bytes.requests_of(self._away(ranges)) if any(map(is_elsewhere, self._files)) else None

    def _away(self, ranges: Sequence[Range]) -> list[tuple[FileStamp, int, int]]:
        """The bytes of these records, of files that lie in a store."""
        runs = ((self._file(*each), *each[1:]) for each in ranges if each[2] > each[1])
        return [(file.stamp, *file.span(*run)) for file, *run in runs if isinstance(file.stamp, ObjectStamp)]

    @classmethod
    def arguments_for(cls, data: str, mode: TaskType, given: Mapping[str, Any]) -> dict[str, Any] | None:
        """Constructor arguments for a file by its name, or a folder, glob or range of such; else None."""
        return {"data": data} if cls.finder.is_all_of(data) else None

    def _file(self, name: str, start: int, end: int) -> F:
        """The file `name`. Raises ReaderError for another, and for records that it has not."""
        try:
            file = self._files[name]
        except KeyError:
            raise no_source(name, self._files, self) from None
        if not 0 <= start <= end <= file.count:
            check_range(start, end, 0, file.count, name)
        return file

    def _read(self, file: F) -> Read:
        """What reads it. Raises SourceChanged if the file is not the one that was indexed."""
        return self._bytes.reading(file.stamp, file.is_same)

    def __repr__(self) -> str:
        names = self.files
        first = f"{names[0]!r}{' …' if names[1:] else ''}"
        return f"<{type(self).__name__} {first} files={len(names)} records={self.count}>"
