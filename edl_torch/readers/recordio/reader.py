"""RecordIO files, of both dialects and with all their compressors; each file is a source of its own.

Reads a chunk whole, verifies its checksum once and keeps the last chunks. It must not know formats
(`format.py`) or how an index is made.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice
from typing import Any

from edl_torch.errors import DataFormatError, InvalidArgument, ReaderError
from edl_torch.fingerprint import Fingerprint
from edl_torch.readers.base import AbstractDataReader, Range, check_range, no_source
from edl_torch.readers.recordio.format import HEADER_BYTES, MAGIC_BYTES, Header, dialect_named
from edl_torch.readers.recordio.record_bytes import Decode, decoder
from edl_torch.readers.recordio.source import (
    Arrays,
    Chunk,
    RecordIOSource,
    build_index,
    sources_of_index,
)
from edl_torch.readers.shared.files import BlockCache, OpenFile, OpenFiles, Read
from edl_torch.readers.shared.finder import Finder, Paths
from edl_torch.readers.shared.looks import below, listing, sizes
from edl_torch.readers.shared.mapped import StringTable
from edl_torch.shard import Task, TaskType

DEFAULT_CACHE_BYTES = 64 << 20

_FINDER = Finder(deep=True)
_LOOKED_AT = 64  # files of a folder


class RecordIODataReader(AbstractDataReader):
    """Records are the bytes of RecordIO files; each file is a source, named by its path.

    Files of pyrecordio ("python") and of wangkuiyi/recordio ("go") start alike: which one a file is, its
    chain of headers and a checksum prove. Every chunk's checksum is verified when it is read. Records may
    be empty, and so may chunks and files.

    Args:
        data: A file, a folder (all files in it and below, but names that begin with `.` or `_`), a glob, or a
            list of these. Folders and globs are sorted by name.
        dialect: "python" or "go" for files that shall not be asked.
        decode: Makes something of a record's bytes: a function (it travels to loader workers), "text",
            "json", "npy", "npz", or "module:function".
        cache_bytes: How much of the last chunks each process keeps, decompressed; at least the last one, and
            those of the shards that a shuffle mixes.
        index_dir: Where indexes of larger files are kept: a folder, or "beside" for beside the data; default
            as `readers.shared.mapped` says.

    Raises DataFormatError, which names file, chunk and offset, for damaged, cut and other files, and
    ReaderUnavailable where cramjam or google-crc32c is needed and not installed. Files must stay as they are:
    a reader refuses one that changed since it was indexed.
    """

    reads_blocks = True

    def __init__(
        self,
        data: Paths,
        *,
        dialect: str | None = None,
        decode: Decode | str | None = None,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        index_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        if dialect is not None:
            dialect_named(dialect)
        if isinstance(cache_bytes, bool) or not isinstance(cache_bytes, int) or cache_bytes < 0:
            raise InvalidArgument(f"cache_bytes={cache_bytes!r}: expected a number of bytes")
        self.decode: Decode | None = decoder(decode)
        self.cache_bytes = cache_bytes
        files = _FINDER.files(data)
        self._arrays: Arrays = build_index(files, dialect, index_dir)
        self._names = StringTable(files)
        self._setup()
        self._prepare()

    def _prepare(self) -> None:
        """Import codecs now, by the first file: loader workers that are forked then have them."""
        first = next(iter(self._by_name().values()))
        with suppress(OSError, ReaderError):  # of a file that is gone already; who reads it is told
            # Not kept open: it may be another file when it is read.
            head = OpenFile(first.stamp, first.is_same).read(0, HEADER_BYTES)
            if len(head) == HEADER_BYTES:
                first.dialect.prepare(Header(*first.dialect.words(head)).compressor)

    def _setup(self) -> None:
        """What each process has of its own."""
        self._sources: dict[str, RecordIOSource] | None = None
        self._cache: BlockCache[Chunk] = BlockCache(self.cache_bytes)
        self._files = OpenFiles()

    @property
    def files(self) -> list[str]:
        """The names of the sources, in order."""
        return list(self._names)

    @property
    def count(self) -> int:
        """Number of records in all files."""
        return sum(source.records for source in self._by_name().values())

    def create_shards(self, mode: TaskType = TaskType.TRAINING) -> dict[str, int]:
        """`{path: records}`, the same for every mode."""
        return {name: source.records for name, source in self._by_name().items()}

    def fingerprint(self, *, whole: bool = False) -> Fingerprint:
        """Of each file its size and the headers of its chunks, which have checksums of the data."""
        names = list(self._names)
        if whole:
            return listing("whole", below(names), sizes(len(names), lambda n: [names[n]], whole=True))
        each = zip(self._arrays["sizes"].tolist(), self._arrays["headers"].tolist(), strict=True)
        looks = {place: f"{size} {headers:x}" for place, (size, headers) in enumerate(each)}
        return listing("sampled", below(names), looks)

    def read_records(self, task: Task) -> Iterable[Any]:
        """The records one by one. Raises ReaderError for another source or a range outside of it."""
        source = self._source(task.shard_name)
        check_range(task.start, task.end, 0, source.records, source.name)
        records = chain.from_iterable(self._parts(source, task.start, task.end))
        return records if self.decode is None else map(self.decode, records)

    def read_record(self, name: str, index: int) -> Any:
        """Record `index` of the file `name`. Raises ReaderError for another file or number."""
        source = self._source(name)
        if not 0 <= index < source.records:
            check_range(index, index + 1, 0, source.records, name)
        row = bisect_right(source.firsts, index) - 1
        chunk = self._cache.get(source.row + row)
        if chunk is None:
            chunk = self._read(source, row)
        record = chunk[index - source.firsts[row]]
        return record if self.decode is None else self.decode(record)

    def expect(self, ranges: Sequence[Range], *, in_order: bool = False) -> None:
        """Keep the chunks of these records, whatever `cache_bytes` is, unless they come in order."""
        wanted: list[int] = []
        for name, start, end in () if in_order else ranges:
            source = self._source(name)
            check_range(start, end, 0, source.records, name)
            first, last = source.row + source.chunk_of(start), source.row + source.chunk_of(end - 1)
            wanted += range(first, last + 1)
        self._cache.expect(wanted)

    @classmethod
    def arguments_for(cls, data: str, mode: TaskType, given: Mapping[str, Any]) -> dict[str, Any] | None:
        """Constructor arguments where `data` is a file, folder or glob that starts as RecordIO, else None."""
        return {"data": data} if holds_recordio(data) else None

    def _parts(self, source: RecordIOSource, start: int, end: int) -> Iterator[tuple[bytes, ...]]:
        row = source.chunk_of(start)
        while start < end:
            run_end = source.run_end(row, end)
            if start == source.firsts[row] and run_end > row:
                yield from self._run(source, row, run_end)
                row = run_end
            else:
                first = source.firsts[row]
                chunk = self._chunk(source, row)
                yield chunk.records(start - first, min(end - first, len(chunk)))
                row += 1
            start = source.firsts[row]

    def _run(self, source: RecordIOSource, row: int, end: int) -> Iterator[tuple[bytes, ...]]:
        """Whole chunks are not kept: whoever reads in sequence does not come back soon."""
        try:
            for after, records in source.read_run(self._file(source), row, end):
                row = after
                yield records
            return
        except DataFormatError:
            pass
        for number in range(row, end):  # which of them is damaged, after the records of those before it
            chunk = self._chunk(source, number)
            yield chunk.records(0, len(chunk))

    def _chunk(self, source: RecordIOSource, row: int) -> Chunk:
        kept = self._cache.get(source.row + row)
        return self._read(source, row) if kept is None else kept

    def _read(self, source: RecordIOSource, row: int) -> Chunk:
        return self._cache.put(source.row + row, lambda: source.read_chunk(self._file(source), row))

    def _file(self, source: RecordIOSource) -> Read:
        return self._files.get(source.stamp, source.is_same).read

    def _source(self, name: str) -> RecordIOSource:
        try:
            return (self._sources or self._by_name())[name]
        except KeyError:
            raise no_source(name, self._names, self) from None

    def _by_name(self) -> dict[str, RecordIOSource]:
        if self._sources is None:
            sources = sources_of_index(self._names, self._arrays)
            self._sources = {source.name: source for source in sources}
        return self._sources

    def __getstate__(self) -> dict[str, Any]:
        own = ("_sources", "_cache", "_files")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._setup()

    def __repr__(self) -> str:
        names = list(self._by_name())
        first = f"{names[0]!r}{' …' if names[1:] else ''}"
        return f"<RecordIODataReader {first} files={len(names)} records={self.count}>"


def holds_recordio(path: str) -> bool:
    """Whether a path, or one of the first files of a folder or glob, starts with the magic number."""
    try:
        named = _FINDER.below(path) if os.path.isdir(path) else _FINDER.files(path)
        return any(map(_has_magic, islice(named, _LOOKED_AT)))
    except DataFormatError:
        return False


def _has_magic(path: str) -> bool:
    if not os.path.isfile(path):
        return False
    try:
        with open(path, "rb", buffering=0) as file:
            start = file.read(len(MAGIC_BYTES))
    except OSError:
        return False
    return start == MAGIC_BYTES or (not start and path.endswith(".recordio"))
