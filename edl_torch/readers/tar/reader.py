"""Tar shards, read a sample at a time and in any order, here and in stores.

A sample comes in one read with the headers of its members, which must be the one sample that the index says.
It must not know how tars are parsed (`index.py`).
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Unpack

import numpy as np

from edl_torch.errors import BadRecord, DataFormatError, InvalidArgument, ReaderError
from edl_torch.fingerprint import Fingerprint
from edl_torch.readers.base import Begun, IndexedReader, is_source_error
from edl_torch.readers.images.decode import checked_min_side, decode_image
from edl_torch.readers.recordio.record_bytes import decode_json, decode_npy, decode_text
from edl_torch.readers.shared.files import FileStamp, OpenFile, Read
from edl_torch.readers.shared.finder import Paths
from edl_torch.readers.shared.looks import arguments, below, chosen, listing, looked, name_of_function
from edl_torch.readers.shared.mapped import Array, StringTable, shared
from edl_torch.readers.shared.sources import ObjectStamp, Sources, each_looked_at, stamp_arrays, stamps_in
from edl_torch.readers.storage import Data, Object, Storage, StorageOptions, is_elsewhere
from edl_torch.readers.storage.requests import Ahead
from edl_torch.readers.tar.index import (
    LOOKED_AT,
    TARS,
    BrokenTar,
    TarIndex,
    Windowed,
    index_tar,
    looks_of,
    sample_parts,
)
from edl_torch.shard import TaskType

_THREADS_AWAY = 64  # that index tars of a store
_INLINE = 1 << 16  # bytes: loader workers share a larger index as a mapped file
_AT_ONCE = 1 << 20  # bytes: of a larger sample only what is wanted is read
_RUN, _RUN_AWAY = 1 << 18, 1 << 20  # bytes: smaller samples that lie together are read so many at once
_KEPT_AWAY = 32 << 20  # bytes: samples that are needed so close to each other may come in any order

Decoder = Callable[[bytes], Any]
_IMAGES = frozenset({"jpg", "jpeg", "png", "webp"})
_PICKLES = frozenset({"pyd", "pkl", "pickle"})
_ALWAYS = ("__key__", "__url__")


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
    """One tar: its samples begin at `starts`, whose last entry is the end of the last one."""

    name: str
    starts: memoryview
    stamp: FileStamp  # as it was when it was indexed
    looks: str
    taken_from: str

    @property
    def object(self) -> Object:
        """What a store is asked for."""
        return Object(self.stamp.path, self.stamp.size, self.stamp.mtime_ns)

    def is_same(self, read: Read) -> bool:
        """Whether what is read is what was indexed, as far as `looks` tell."""
        return looks_of(read, self.stamp.size, np.asarray(self.starts), LOOKED_AT) == self.looks

    def looked_at(self, storage: Storage, most: int, *, whole: bool) -> str:
        """What `most` blocks of it, or the `whole`, look like now. Raises SourceChanged."""
        look = partial(looks_of, size=self.stamp.size, starts=np.asarray(self.starts), most=most, whole=whole)
        if isinstance(self.stamp, ObjectStamp):
            return looked(storage, self.stamp.object, look)
        return look(OpenFile(self.stamp, self.is_same).read)


class TarReader(IndexedReader):
    """Records are the samples of tar shards, as the `webdataset` package groups them: members in a row whose
    names are alike up to the first dot behind the last slash.

    All tars are one source, named as the data are given; samples are numbered through them in order. One pass
    over the headers of each makes an index, which is kept; one of `edl-torch index`, Megatron Energon or DALI
    beside a tar is taken where it fits.

    Args:
        data: A tar, a folder with `.tar` files, a glob, a range as in `train-{000..099}.tar`, or a list of
            these; paths or URLs.
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
        store: Options of the store, and where indexes are kept: see `StorageOptions`.

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
        **store: Unpack[StorageOptions],
    ) -> None:
        self.fields = _fields(fields)
        self._is_tuple = not isinstance(fields, str)
        own = {_suffix(name): function for name, function in (decoders or {}).items()}
        if wrong := next((name for name, function in own.items() if not callable(function)), None):
            raise InvalidArgument(f"decoders[{wrong!r}] is no function of a member's bytes")
        self._decoders = {**(_DECODERS if decode else {}), **own}
        self._decodes = decode
        self._images = _IMAGES - own.keys() if decode else frozenset()
        functions = [(suffix, name_of_function(own[suffix])) for suffix in sorted(own)]
        self._arguments = repr((self.fields, self._is_tuple, decode, functions))
        self.yields_images = (
            self.fields is not None and len(self.fields) <= 2 and self._images.issuperset(self.fields[0])
        )
        self.min_side = checked_min_side(min_side)
        self._arguments += f" {self.min_side}" if self.min_side else ""
        self._storage = Storage.of(self, store)
        with self._storage.apart() as apart:
            files = TARS.files(data, apart)
            found = list(each_looked_at(files, partial(index_tar, storage=apart), away=_THREADS_AWAY))
        super().__init__(_called(data, files))
        self._names = StringTable(files)
        self._is_away = any(map(is_elsewhere, files))
        self._taken_from = [index.taken_from for index in found]
        self._arrays: Mapping[str, Array] = shared(_joined(found), "tar", above=_INLINE)
        self._setup()
        self.looks_again = any(source.stamp.is_told_by_size for source in self._tars())
        self.count = len(self._arrays["starts"]) - len(files)
        if not self.count:
            raise DataFormatError(
                f"'{files[0]}'{' and others' * bool(files[1:])}: there is no sample; the name of a member is "
                "the sample's key, a dot, and what it is in it, as in 0001.jpg"
            )

    def _setup(self) -> None:
        """What each process has of its own."""
        self._sources: list[TarSource] = []
        self._firsts: list[int] = []
        self._bytes = Sources(self._storage)

    @property
    def files(self) -> list[str]:
        """The tars, in order."""
        return list(self._names)

    def fingerprint(self, *, whole: bool = False) -> Fingerprint:
        """Of each tar its size and where samples begin, 64 blocks of up to 64 of them; and the fields."""
        sources = self._tars()
        looked_at = chosen(len(sources), LOOKED_AT)
        most = dict.fromkeys(looked_at, max(4, LOOKED_AT // len(looked_at)))
        with self._storage.apart() as apart, ThreadPoolExecutor(_THREADS_AWAY) as pool:

            def look(number: int) -> str:
                return sources[number].looked_at(apart, most.get(number, 0), whole=whole)

            looks = dict(enumerate(pool.map(look, range(len(sources)))))
        names = below([source.name for source in sources])
        return listing("whole" if whole else "sampled", names, looks, arguments("fields", self._arguments))

    def load(self, index: int) -> Any:
        """The sample, a dict or what `fields` say. Raises BadRecord."""
        source, number = self._place(index)
        start, end = source.starts[number], source.starts[number + 1]
        if end - start > _AT_ONCE and not is_elsewhere(source.name):
            return self._sample(source, number, None, 0)
        return self._sample(source, number, self._read(source)(start, end), start)

    def load_each(self, indices: Sequence[int]) -> Iterator[Any]:
        """Yield samples; those that lie together are read together."""
        if (begun := self.begin(indices)) is not None:
            yield from map(begun.record, range(len(indices)))
            return
        at = 0
        while at < len(indices):
            source, number, after = self._run(indices, at, _RUN)
            if after == at + 1:
                yield self.load(indices[at])
            else:
                place = source.starts[number]
                piece = self._read(source)(place, source.starts[number + after - at])
                for each in range(after - at):
                    yield self._sample(source, number + each, piece, place)
            at = after

    def begin(self, indices: Sequence[int]) -> Begun | None:
        """Ask for the bytes of samples that lie elsewhere; those that lie together are one request."""
        if not self._is_away:
            return None
        runs = _RunsAsked(self, self._storage, indices)
        return Begun(runs.ahead, record=runs.sample)

    def requests(self, indices: Sequence[int]) -> Sequence[tuple[Object, int, int]] | None:
        """One for each run of samples that lie together."""
        if not self._is_away:
            return None
        return [run.range for run in self._runs(indices) if is_elsewhere(run.source.name)]

    def _runs(self, indices: Sequence[int]) -> Iterator[_Run]:
        """Yield runs of samples that lie together, of those that are needed soon after each other: what is
        read of a run is kept until its last sample is needed. The runs come as they are needed."""
        at = 0
        while at < len(indices):
            after, nbytes = at, 0
            while after < len(indices) and nbytes < _KEPT_AWAY:
                source, number = self._place(indices[after])
                nbytes += source.starts[number + 1] - source.starts[number]
                after += 1
            places = sorted(range(at, after), key=indices.__getitem__)
            ordered, found, first = [indices[place] for place in places], [], 0
            while first < len(ordered):
                source, number, last = self._run(ordered, first, _RUN_AWAY)
                found.append(_Run(source, number, places[first:last]))
                first = last
            yield from sorted(found, key=lambda run: min(run.places))
            at = after

    @classmethod
    def arguments_for(cls, data: str, mode: TaskType, given: Mapping[str, Any]) -> dict[str, Any] | None:
        """Constructor arguments for a tar, packed or not, a glob or range, or a folder of them, else None."""
        return {"data": data} if TARS.is_all_of(data) else None

    def _run(self, indices: Sequence[int], at: int, most: int) -> tuple[TarSource, int, int]:
        """The tar and number of a sample, and the place after those behind it that follow it in the tar, as
        many as `most` bytes have."""
        source, number = self._place(indices[at])
        last = bisect_right(source.starts, source.starts[number] + most) - 2  # by then the bytes are enough
        stop = min(len(indices), at + max(1, last - number + 1))
        after = at + 1
        while after < stop and indices[after] == indices[after - 1] + 1:
            after += 1
        return source, number, after

    def _place(self, index: int) -> tuple[TarSource, int]:
        sources = self._tars()
        tar = bisect_right(self._firsts, index) - 1
        return sources[tar], index - self._firsts[tar]

    def _sample(self, source: TarSource, number: int, piece: Data | None, place: int) -> Any:
        """A sample, from the bytes of the tar that begin at `place`, or read here where they are many."""
        start, end = source.starts[number], source.starts[number + 1]
        view = None if piece is None else memoryview(piece)

        def cut(at: int, size: int) -> Data:
            return read(at, at + size) if view is None else view[at - place : at - place + size]

        read = self._read(source)
        fetch = Windowed(read, end) if view is None else lambda at, size: bytes(cut(at, size))
        try:
            key, parts = sample_parts(fetch, start, end)
        except BrokenTar as exc:
            raise self._broken(source, start, exc) from exc
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
                    f"{', '.join(map(repr, parts))} (members of a sample must lie together: tar --sort=name)"
                )
            values.append(value(name) if name in parts else key if name == "__key__" else source.name)
        return tuple(values) if self._is_tuple else values[0]

    def _broken(self, source: TarSource, start: int, exc: BrokenTar) -> ReaderError:
        source.stamp.check()  # where a writer put the time back
        if source.taken_from:
            return ReaderError(
                f"'{source.name}' is not as its index '{source.taken_from}' says ({exc}): remove the index, "
                f"or make it anew with edl-torch index '{source.name}'"
            )
        return BadRecord(f"'{source.name}' at byte {start:,}: {exc}")

    def _decoded(self, data: Data, suffix: str, key: str, tar: str) -> Any:
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
            return bytes(data)
        try:
            if decode is None:
                return decode_image(data, f"{key}.{suffix}", self.min_side)
            return decode(bytes(data))
        except Exception as exc:
            if is_source_error(exc):
                raise
            said = str(exc) if isinstance(exc, BadRecord) else f"{type(exc).__name__}: {exc}"
            raise BadRecord(f"'{tar}' sample {key!r} member {suffix!r}: {said}") from exc

    def _read(self, source: TarSource) -> Read:
        return self._bytes.reading(source.stamp, source.is_same)

    def _tars(self) -> list[TarSource]:
        if not self._sources:
            rows, starts = self._arrays["rows"].tolist(), self._arrays["starts"].data
            looks = self._arrays["looks"].tobytes().hex()
            stamps = stamps_in(self._names, self._arrays)
            sources = [
                TarSource(
                    name=name,
                    starts=starts[rows[number] : rows[number + 1]],
                    stamp=stamp,
                    looks=looks[32 * number : 32 * number + 32],
                    taken_from=taken_from,
                )
                for number, (name, taken_from, stamp) in enumerate(
                    zip(self._names, self._taken_from, stamps, strict=True)
                )
            ]
            self._firsts = [row - number for number, row in enumerate(rows[:-1])]
            self._sources = sources  # last: another thread looks for these
        return self._sources

    def __getstate__(self) -> dict[str, Any]:
        own = ("_sources", "_firsts", "_bytes")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._setup()

    def __repr__(self) -> str:
        return f"<TarReader {self.name!r} files={len(self._names)} records={self.count}>"


@dataclass(slots=True)
class _Run:
    """Samples that lie together: of a tar those from `number` on, at these places among those asked for."""

    source: TarSource
    number: int
    places: list[int]
    piece: Data | None = None  # their bytes, while some of them are to be made
    lock: threading.Lock = field(default_factory=threading.Lock)
    left: int = 0

    def __post_init__(self) -> None:
        self.left = len(self.places)

    @property
    def range(self) -> tuple[Object, int, int]:
        """What a store is asked for."""
        start, end = (self.source.starts[self.number + each] for each in (0, len(self.places)))
        return self.source.object, start, end - start


class _RunsAsked:
    """The bytes of samples that were asked for: a request for each run of samples that lie together."""

    def __init__(self, reader: TarReader, storage: Storage, indices: Sequence[int]) -> None:
        self._reader = reader
        self._runs = list(reader._runs(indices))
        each = enumerate(self._runs)
        self._of_place = {place: (run, at) for run, one in each for at, place in enumerate(one.places)}
        self.ahead: Ahead = storage.ahead([run.range for run in self._runs])

    def sample(self, place: int) -> Any:
        """The sample at a place among those that were asked for. Raises what `load` does."""
        request, at = self._of_place[place]
        run = self._runs[request]
        with run.lock:  # one of several threads takes the answer
            piece = self.ahead.take(request) if run.piece is None else run.piece
            run.left -= 1
            run.piece = piece if run.left > 0 else None
        return self._reader._sample(run.source, run.number + at, piece, run.source.starts[run.number])


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


def _called(data: Paths, files: Sequence[str]) -> str:
    """The name of the source."""
    if isinstance(data, str | os.PathLike):
        return os.fspath(data)
    return files[0] + (f" and {len(files) - 1:,} more" if files[1:] else "")


def _joined(found: Sequence[TarIndex]) -> dict[str, Array]:
    return {
        "rows": np.cumsum([0, *(len(index.starts) for index in found)], dtype=np.int64),
        "starts": np.concatenate([index.starts for index in found]),
        **stamp_arrays([index.stamp for index in found]),
        "looks": np.frombuffer(b"".join(index.looks for index in found), np.uint8),
    }
