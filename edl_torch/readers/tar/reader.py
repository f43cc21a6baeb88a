"""Tar shards, read a sample at a time and in any order; each tar is a source of its own.

A sample comes in one read with the headers of its members, which must be the one sample that the index says.
It must not know how tars are parsed (`index.py`).
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from edl_torch.errors import BadRecord, DataFormatError, InvalidArgument, ReaderError
from edl_torch.fingerprint import Fingerprint
from edl_torch.readers.base import AbstractDataReader, check_range, is_source_error, no_source
from edl_torch.readers.images.decode import checked_min_side, decode_image
from edl_torch.readers.recordio.record_bytes import decode_json, decode_npy, decode_text
from edl_torch.readers.shared.files import FileStamp, Finder, OpenFiles, Paths, Read
from edl_torch.readers.shared.looks import arguments, below, listing
from edl_torch.readers.shared.mapped import Array, StringTable, shared
from edl_torch.readers.tar.index import BrokenTar, TarIndex, Windowed, index_tar, looks_of, sample_parts
from edl_torch.shard import Task, TaskType

_THREADS = 16
_INLINE = 1 << 16  # bytes: loader workers share a larger index as a mapped file
_AT_ONCE = 1 << 20  # bytes: of a larger sample only what is wanted is read
_RUN = 1 << 18  # bytes: smaller samples that lie together are read so many at once

_FINDER = Finder(
    suffixes=(".tar", ".tgz", ".tbz", ".tbz2", ".txz", ".tzst", ".tar.zst", ".tar.bz2", ".tar.xz")
)
_BESIDE = (".idx", ".json", ".yaml", ".md", ".txt")  # what else may lie in a folder of tars

Decoder = Callable[[bytes], Any]
_IMAGES = frozenset({"jpg", "jpeg", "png", "webp"})
_PICKLES = frozenset({"pyd", "pkl", "pickle"})


def _whole_number(data: bytes) -> int:
    try:
        return int(data)
    except ValueError as exc:
        raise BadRecord(f"is no whole number: {data[:40]!r}") from exc


_DECODERS: dict[str, Decoder] = {
    "cls": _whole_number,
    "json": decode_json,
    "npy": decode_npy,
    "txt": decode_text,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TarSource:
    """One tar: the samples begin at `starts`, whose last entry is the end of the last one."""

    name: str
    starts: memoryview
    stamp: FileStamp
    looks: str
    taken_from: str

    @property
    def records(self) -> int:
        """Number of samples."""
        return len(self.starts) - 1

    def is_same(self, read: Read) -> bool:
        """Whether what is read is what was indexed, as far as `looks` tell."""
        return looks_of(read, self.stamp.size, np.asarray(self.starts)) == self.looks


class TarReader(AbstractDataReader):
    """Records are the samples of tar shards, as the `webdataset` package groups them: members in a row whose
    names are alike up to the first dot behind the last slash.

    Each tar is a source, named by its path as given. One pass over its headers makes an index, which is kept;
    one of `edl-torch index`, Megatron Energon or DALI beside the tar is taken where it fits.

    Args:
        data: A tar, a folder with `.tar` files, a glob, or a list of these.
        fields: What a record is: a tuple of the members with these suffixes, as `to_tuple` of `webdataset`
            makes it ("jpg;png" is the first of the two that is there; `__key__` and `__url__` are fields,
            too); one text is that member alone. Default: a dict of `__key__`, `__url__` (the tar) and all
            members by suffix.
        decoders: Functions of a member's bytes, by suffix ("depth.png" before "png"); they travel to loader
            workers.
        decode: Whether members are decoded by suffix: `.jpg .jpeg .png .webp` to images (uint8 [height,
            width, 3], RGB), `.cls` to int, `.json`, `.txt`, `.npy`. Others are bytes; with False all are that
            have no decoder of yours.
        min_side: As for `ImageFolderReader`.
        index_dir: Where indexes of larger tars are kept; see `readers.shared.mapped.cached_index`.

    Raises DataFormatError, which names the tar, for one that is damaged, cut short, sparse or packed; in
    reading, BadRecord with tar, key and member, and SourceChanged when a tar changes. Pickles (`.pyd`,
    `.pkl`, `.pickle`) are a ReaderError: to read one may run any program.
    """

    thread_safe = True
    imports = ("cv2",)

    def __init__(
        self,
        data: Paths,
        fields: str | Sequence[str] | None = None,
        *,
        decoders: Mapping[str, Decoder] | None = None,
        decode: bool = True,
        min_side: int | None = None,
        index_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        self.fields = _fields(fields)
        self._is_tuple = not isinstance(fields, str)
        own = {_suffix(name): function for name, function in (decoders or {}).items()}
        if wrong := next((name for name, function in own.items() if not callable(function)), None):
            raise InvalidArgument(f"decoders[{wrong!r}] is no function of a member's bytes")
        self._decoders = {**(_DECODERS if decode else {}), **own}
        self._decodes = decode
        self._images = _IMAGES - own.keys() if decode else frozenset()
        self._arguments = repr((self.fields, self._is_tuple, decode, sorted(own)))
        self.min_side = checked_min_side(min_side)
        self.yields_images = (
            self.fields is not None and len(self.fields) <= 2 and self._images.issuperset(self.fields[0])
        )
        files = tars(data)
        found = _index_all(files, index_dir)
        self._names = StringTable(files)
        self._taken_from = [index.taken_from for index in found]
        self._arrays: Mapping[str, Array] = shared(_joined(found), "tar", above=_INLINE)
        self._setup()
        if not self.count:
            raise DataFormatError(
                f"'{files[0]}'{' and others' * bool(files[1:])}: there is no sample; the name of a member is "
                "the sample's key, a dot, and what it is in it, as in 0001.jpg"
            )

    def _setup(self) -> None:
        """What each process has of its own."""
        self._sources: dict[str, TarSource] | None = None
        self._files = OpenFiles()

    @property
    def files(self) -> list[str]:
        """The names of the sources, in order."""
        return list(self._names)

    @property
    def count(self) -> int:
        """Number of samples in all tars."""
        return len(self._arrays["starts"]) - len(self._names)

    def create_shards(self, mode: TaskType = TaskType.TRAINING) -> dict[str, int]:
        """`{path: samples}`, the same for every mode."""
        return {name: source.records for name, source in self._by_name().items()}

    def fingerprint(self, *, whole: bool = False) -> Fingerprint:
        """Of each tar its size, some blocks, and where samples begin; and which fields a record has."""
        looks = {
            number: looks_of(self._read(source), source.stamp.size, np.asarray(source.starts), whole=True)
            if whole
            else source.looks
            for number, source in enumerate(self._by_name().values())
        }
        also = arguments("fields", self._arguments)
        return listing("whole" if whole else "sampled", below(self.files), looks, also)

    def read_records(self, task: Task) -> Iterator[Any]:
        """Yield the samples. Raises ReaderError for another source or a range outside of it."""
        source = self._source(task.shard_name)
        check_range(task.start, task.end, 0, source.records, source.name)
        first, starts = task.start, source.starts
        while first < task.end:
            after = min(bisect_right(starts, starts[first] + _RUN) - 1, task.end)
            if after <= first + 1:
                yield self._alone(source, first)
                first += 1
                continue
            place = starts[first]
            piece = self._read(source)(place, starts[after])
            for number in range(first, after):
                yield self._sample(source, number, piece, place)
            first = after

    def read_record(self, name: str, index: int) -> Any:
        """Sample `index` of the tar `name`. Raises ReaderError for another tar or number."""
        source = self._source(name)
        check_range(index, index + 1, 0, source.records, name)
        return self._alone(source, int(index))

    @classmethod
    def arguments_for(cls, data: str, mode: TaskType, given: Mapping[str, Any]) -> dict[str, Any] | None:
        """Constructor arguments for a tar, packed or not, a glob of tars, or a folder of them, else None."""
        return {"data": data} if _are_tars(data) else None

    def _alone(self, source: TarSource, number: int) -> Any:
        start, end = source.starts[number], source.starts[number + 1]
        if end - start <= _AT_ONCE:
            return self._sample(source, number, self._read(source)(start, end), start)
        return self._sample(source, number, None, 0)

    def _sample(self, source: TarSource, number: int, piece: bytes | None, place: int) -> Any:
        """A sample, from the bytes of the tar that begin at `place`, or read here where they are many."""
        start, end = source.starts[number], source.starts[number + 1]
        read = self._read(source)

        def cut(at: int, size: int) -> bytes:
            return read(at, at + size) if piece is None else piece[at - place : at - place + size]

        fetch = Windowed(read, end) if piece is None else cut
        try:
            key, parts = sample_parts(fetch, start, end)
        except BrokenTar as exc:
            source.stamp.check()  # where a writer put the time back
            if source.taken_from:
                raise ReaderError(
                    f"'{source.name}' is not as its index '{source.taken_from}' says ({exc}): remove the "
                    f"index, or make it anew with edl-torch index '{source.name}'"
                ) from exc
            raise BadRecord(f"'{source.name}' at byte {start:,}: {exc}") from exc
        except DataFormatError as exc:
            raise BadRecord(f"'{source.name}': {exc}") from exc

        def value(suffix: str) -> Any:
            return self._decoded(cut(*parts[suffix]), suffix, key, source.name)

        if self.fields is None:
            record = {"__key__": key, "__url__": source.name}
            for suffix in parts:
                record[suffix] = value(suffix)
            return record
        values = []
        for names in self.fields:
            name = next((name for name in names if name in parts or name in _ALWAYS), None)
            if name is None:
                raise BadRecord(
                    f"'{source.name}' sample {key!r} has no member {';'.join(names)!r}: it has "
                    + ", ".join(map(repr, parts))
                )
            values.append(value(name) if name in parts else key if name == "__key__" else source.name)
        return tuple(values) if self._is_tuple else values[0]

    def _decoded(self, data: bytes, suffix: str, key: str, tar: str) -> Any:
        tail = suffix
        while tail not in self._decoders and "." in tail:
            tail = tail.partition(".")[2]
        decode = self._decoders.get(tail)
        if decode is None and tail not in self._images:
            if self._decodes and tail in _PICKLES:
                raise ReaderError(
                    f"'{tar}' sample {key!r} member {suffix!r} is a pickle, which is not read, as it can run "
                    f"any program: leave it out by fields=, or give decoders={{{tail!r}: function}}"
                )
            return data
        try:
            if decode is None:
                return decode_image(data, f"{key}.{suffix}", self.min_side)
            return decode(data)
        except Exception as exc:
            if is_source_error(exc):
                raise
            said = str(exc) if isinstance(exc, BadRecord) else f"{type(exc).__name__}: {exc}"
            raise BadRecord(f"'{tar}' sample {key!r} member {suffix!r}: {said}") from exc

    def _read(self, source: TarSource) -> Read:
        return self._files.get(source.stamp, source.is_same).read

    def _source(self, name: str) -> TarSource:
        try:
            return (self._sources or self._by_name())[name]
        except KeyError:
            raise no_source(name, self._names, self) from None

    def _by_name(self) -> dict[str, TarSource]:
        if self._sources is None:
            rows, starts = self._arrays["rows"].tolist(), self._arrays["starts"].data
            looks = self._arrays["looks"].tobytes().hex()
            columns = (self._arrays[name].tolist() for name in ("sizes", "mtimes", "ctimes"))
            sources = {}
            for number, (name, taken_from, *stamp) in enumerate(
                zip(self._names, self._taken_from, *columns, strict=True)
            ):
                size, mtime_ns, ctime_ns = stamp
                sources[name] = TarSource(
                    name=name,
                    starts=starts[rows[number] : rows[number + 1]],
                    stamp=FileStamp(path=name, size=size, mtime_ns=mtime_ns, ctime_ns=ctime_ns),
                    looks=looks[32 * number : 32 * number + 32],
                    taken_from=taken_from,
                )
            self._sources = sources
        return self._sources

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_sources", "_files")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._setup()

    def __repr__(self) -> str:
        first = f"{self._names[0]!r}{' …' if len(self._names) > 1 else ''}"
        return f"<TarReader {first} files={len(self._names)} records={self.count}>"


_ALWAYS = ("__key__", "__url__")


def _suffix(name: str) -> str:
    return name.removeprefix(".").lower()


def _fields(fields: str | Sequence[str] | None) -> tuple[tuple[str, ...], ...] | None:
    if fields is None:
        return None
    named = [fields] if isinstance(fields, str) else list(fields)
    cut = [tuple(map(_suffix, filter(None, each.split(";")))) for each in named]
    if not cut or not all(cut):
        raise InvalidArgument(f"fields={fields!r}: expected suffixes of members, as in ('jpg;png', 'cls')")
    return tuple(cut)


def _index_all(files: Sequence[str], index_dir: str | os.PathLike[str] | None) -> list[TarIndex]:
    """In parallel: reading headers waits for disks. The first error, in order, is raised."""
    if len(files) == 1:
        return [index_tar(files[0], index_dir)]
    with ThreadPoolExecutor(min(_THREADS, len(files)), thread_name_prefix="tar-index") as pool:
        jobs = [pool.submit(index_tar, file, index_dir) for file in files]
        try:
            return [job.result() for job in jobs]
        finally:
            pool.shutdown(cancel_futures=True)


def _joined(found: Sequence[TarIndex]) -> dict[str, Array]:
    stamps = [index.stamp for index in found]
    return {
        "rows": np.cumsum([0, *(len(index.starts) for index in found)], dtype=np.int64),
        "starts": np.concatenate([index.starts for index in found]),
        "sizes": np.array([stamp.size for stamp in stamps], dtype=np.int64),
        "mtimes": np.array([stamp.mtime_ns for stamp in stamps], dtype=np.int64),
        "ctimes": np.array([stamp.ctime_ns for stamp in stamps], dtype=np.int64),
        "looks": np.frombuffer(b"".join(index.looks for index in found), np.uint8),
    }


def tars(data: Paths) -> list[str]:
    """The tars that are named so: of folders and globs sorted by name."""
    return _FINDER.files(data)


def _are_tars(data: str) -> bool:
    if not os.path.isdir(data):
        return _FINDER.is_all_of(data)
    names = [name for name in os.listdir(data) if not name.startswith((".", "_"))]
    tars = [name for name in names if _FINDER.is_named(name)]
    return bool(tars) and all(name in tars or name.lower().endswith(_BESIDE) for name in names)
