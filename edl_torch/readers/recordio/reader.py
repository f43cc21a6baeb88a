"""RecordIO files, of both dialects and with all their compressors; each file is a source of its own.

Reads a chunk whole, verifies its checksum once and keeps the last chunks. It must not know formats
(`format.py`) or how an index is made.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, Unpack

from edl_torch.errors import DataFormatError, InvalidArgument
from edl_torch.fingerprint import Part
from edl_torch.readers.base import Range
from edl_torch.readers.recordio.format import MAGIC_BYTES, dialect_named
from edl_torch.readers.recordio.record_bytes import Decode, decoder
from edl_torch.readers.recordio.source import (
    Arrays,
    Chunk,
    RecordIOSource,
    build_index,
    sources_of_index,
)
from edl_torch.readers.shared.files import BlockCache
from edl_torch.readers.shared.finder import Finder, Paths
from edl_torch.readers.shared.looks import arguments, name_of_function
from edl_torch.readers.shared.mapped import StringTable
from edl_torch.readers.shared.sources import FilesReader
from edl_torch.readers.storage import Storage, StorageOptions, is_elsewhere, local_path
from edl_torch.shard import Task, TaskType

DEFAULT_CACHE_BYTES = 64 << 20

_LOOKED_AT = 64  # files of a folder
_SUFFIX = ".recordio"


class RecordIODataReader(FilesReader[RecordIOSource]):
    """Records are the bytes of RecordIO files; each file is a source, named by its path.

    Files of pyrecordio ("python") and of wangkuiyi/recordio ("go") start alike: which one a file is, its
    chain of headers and a checksum prove. Every chunk's checksum is verified when it is read. Records may
    be empty, and so may chunks and files.

    Args:
        data: A file, a folder (all files in it and below, but names that begin with `.` or `_`), a glob, a
            range, a manifest, or a list of these; paths or URLs. Folders and globs are sorted by name.
        dialect: "python" or "go" for files that shall not be asked.
        decode: Makes something of a record's bytes: a function (it travels to loader workers), "text",
            "json", "npy", "npz", or "module:function".
        cache_bytes: How much of the last chunks each process keeps, decompressed; at least the last one, and
            those of the shards that a shuffle mixes.
        store: Options of the store, and where indexes are kept: see `StorageOptions`.

    Raises DataFormatError, which names file, chunk and offset, for damaged, cut and other files, and
    ReaderUnavailable where cramjam or google-crc32c is needed and not installed. Files must stay as they are:
    a reader refuses one that changed since it was indexed.
    """

    reads_blocks = True
    imports = ("cramjam", "google_crc32c")
    finder = Finder(deep=True)

    def __init__(
        self,
        data: Paths,
        *,
        dialect: str | None = None,
        decode: Decode | str | None = None,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        **store: Unpack[StorageOptions],
    ) -> None:
        super().__init__(Storage.of(self, store))
        if dialect is not None:
            dialect_named(dialect)
        if isinstance(cache_bytes, bool) or not isinstance(cache_bytes, int) or cache_bytes < 0:
            raise InvalidArgument(f"cache_bytes={cache_bytes!r}: expected a number of bytes")
        self.decode: Decode | None = decoder(decode)
        self._decode_name = name_of_function(decode) if callable(decode) else decode or ""
        self.cache_bytes = cache_bytes
        with self._storage.apart() as apart:
            files = self.finder.files(data, apart)
            self._arrays: Arrays = build_index(files, apart, dialect)
        self._names = StringTable(files)
        self._setup()

    def _setup(self) -> None:
        """What each process has of its own."""
        self._files = {file.name: file for file in sources_of_index(self._names, self._arrays)}
        self._cache: BlockCache[Chunk] = BlockCache(self.cache_bytes)

    def _made_by(self) -> list[Part]:
        """What decodes records, by its name."""
        return arguments("decode", self._decode_name) if self._decode_name else []

    def read_records(self, task: Task) -> Iterable[Any]:
        """The records one by one. Raises ReaderError for another source or a range outside of it."""
        source = self._file(task.shard_name, task.start, task.end)
        super().expect([(source.name, task.start, task.end)], in_order=True)
        records = chain.from_iterable(self._parts(source, task.start, task.end))
        return records if self.decode is None else map(self.decode, records)

    def read_record(self, name: str, index: int) -> Any:
        """Record `index` of the file `name`. Raises ReaderError for another file or number."""
        source = self._file(name, index, index + 1)
        row = bisect_right(source.firsts, index) - 1
        chunk = self._cache.get(source.row + row)
        if chunk is None:
            chunk = self._chunk(source, row)
        record = chunk[index - source.firsts[row]]
        return record if self.decode is None else self.decode(record)

    def expect(self, ranges: Sequence[Range], *, in_order: bool = False) -> None:
        """Keep the chunks of these records, whatever `cache_bytes` is, unless they come in order."""
        super().expect(ranges, in_order=in_order)
        wanted: list[int] = []
        for name, start, end in ranges if not in_order else ():
            if end > start:
                source = self._file(name, start, end)
                rows = range(source.chunk_of(start), source.chunk_of(end - 1) + 1)
                wanted += (source.row + row for row in rows)
        self._cache.expect(wanted)

    @classmethod
    def arguments_for(cls, data: str, mode: TaskType, given: Mapping[str, Any]) -> dict[str, Any] | None:
        """Constructor arguments where `data` is a file, folder or glob that starts as RecordIO, else None; a
        URL is judged by its name."""
        if is_elsewhere(data):
            return {"data": data} if data.endswith(_SUFFIX) else None
        path = local_path(data)
        try:
            named = cls.finder.below(path) if os.path.isdir(path) else cls.finder.files(path)
            return {"data": data} if any(map(_has_magic, islice(named, _LOOKED_AT))) else None
        except DataFormatError:
            return None

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
            for after, records in source.read_run(self._read(source), row, end):
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
        if kept is None:
            kept = self._cache.put(source.row + row, lambda: source.read_chunk(self._read(source), row))
        return kept

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_files", "_cache")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._setup()


def _has_magic(path: str) -> bool:
    if not os.path.isfile(path):
        return False
    try:
        with open(path, "rb", buffering=0) as file:
            start = file.read(len(MAGIC_BYTES))
    except OSError:
        return False
    return start == MAGIC_BYTES or (not start and path.endswith(_SUFFIX))
