"""Parquet files as columns or rows: files, folders, Hive partitions and globs, local or remote.

Of the row groups that are decoded the last ones are kept, so that each is read once for a shard.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, Unpack

import numpy as np

from edl_torch.errors import BadRecord, DataFormatError, InvalidArgument, ReaderError, SourceChanged
from edl_torch.fingerprint import Fingerprint
from edl_torch.readers.arrow import (
    Columns,
    RowBlock,
    RowPicker,
    filled_type,
    numpy_columns,
    rows,
    scalar,
    slices,
    taken,
)
from edl_torch.readers.base import AbstractDataReader, Range, check_range, no_source
from edl_torch.readers.parquet.index import (
    SMALL_BYTES,
    ParquetFile,
    ParquetIndex,
    build_index,
    claims,
    found_in,
    is_arrows_own,
    one_line,
    partition_of,
    partition_types,
)
from edl_torch.readers.shared.files import OPEN_FILES, BlockCache
from edl_torch.readers.shared.finder import Paths
from edl_torch.readers.shared.looks import arguments
from edl_torch.readers.shared.packages import required
from edl_torch.readers.storage import Object, Piece, Storage, StorageOptions, is_elsewhere, storage_error
from edl_torch.readers.storage.requests import Ahead, Fetch
from edl_torch.shard import IndexArray, Task, TaskType

_BLOCK = 1024  # rows that become Python objects at a time


class ParquetReader(AbstractDataReader):
    """Records are rows, `{column: value}`; batches are `{column: array}` (see `readers.arrow`).

    Each file is a source, named by its path or URL; an empty file is none. A row group is decoded as a whole
    and kept, so that shuffled reads of a shard decode each of its row groups once. Shards that are cut where
    row groups end (`records_per_shard=reader.rows_per_group`, or a multiple) share none of them with others.

    Args:
        data: A file, a folder (files at any depth that end in .parquet or .pq; what begins with '.' or '_' is
            skipped), a glob, a range, a manifest, URLs of these, or a list of them.
        columns: The columns to read, in this order; default all (without the row labels that pandas adds).
        partitions: Whether folders `key=value` below `data` become columns: int64 where all values are whole
            numbers, else strings. A column that the files have themselves stays as it is there.
        fill_nulls: What stands for NULL, by column: integers and booleans have no value for it. In a column
            of lists a list stands for NULL lists, any other value for NULL inside of lists.
        cache_bytes: How many bytes of decoded row groups each process keeps (always one, and those of the
            shards that a shuffle mixes).
        store: Options of the store, and where indexes are kept: see `StorageOptions`.

    Raises ReaderError for what does not exist or cannot be reached, DataFormatError for what is not Parquet,
    truncated, or of another schema than the first file, and InvalidArgument for columns that are not there.
    """

    reads_blocks = True

    def __init__(
        self,
        data: Paths,
        columns: Sequence[str] | None = None,
        *,
        partitions: bool = True,
        fill_nulls: Mapping[str, Any] | None = None,
        cache_bytes: int = 512 << 20,
        **store: Unpack[StorageOptions],
    ) -> None:
        super().__init__()
        required("pyarrow.parquet", "reader 'parquet' needs pyarrow: pip install 'edl-torch[parquet]'")
        if columns is not None and (
            isinstance(columns, str) or not columns or len(set(columns)) < len(columns)
        ):
            raise InvalidArgument(f"columns={columns!r}: expected a list of different column names")
        self._storage = storage = Storage.of(self, store)
        with storage.apart() as apart:
            base, names = found_in(data, apart)
            keys = partition_types(base, names) if partitions else {}
            in_files = None if columns is None else [name for name in columns if name not in keys]
            self._index, schema = build_index(apart, base, names, in_files)
        self._keys = {key: kind for key, kind in keys.items() if key not in schema.names}
        self.looks_again = self._index.is_told_by_size
        self.columns = [*schema.names, *self._keys] if columns is None else list(columns)
        self._fills = _checked_fills(fill_nulls, schema, self._keys, self.columns)
        self._groups = RowGroups(storage, self._index, schema, cache_bytes)
        self._numbers: dict[str, int] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_numbers": None}

    @property
    def rows_per_group(self) -> int:
        """The usual length of a row group. It, or a multiple of it, is a good `records_per_shard`."""
        return self._index.rows_per_group()

    @property
    def groups_decoded(self) -> int:
        """How many row groups this process has read."""
        return self._groups.decoded

    def create_shards(self, mode: TaskType = TaskType.TRAINING) -> dict[str, int]:
        """The rows of each file that has any; the same for every mode."""
        counts = ((self._index.name(file), self._index.rows(file)) for file in range(len(self._index)))
        return {name: count for name, count in counts if count}

    def fingerprint(self, *, whole: bool = False) -> Fingerprint:
        """Of each file its size and footer, and pages of some files."""
        also = arguments("columns", list(self.columns), sorted(self._fills.items()))
        return self._index.fingerprint(self._storage, also, whole=whole)

    def read_records(self, task: Task) -> Iterator[dict[str, Any]]:
        """Yield rows. Raises ReaderError for another source or a range outside of it."""
        file = self._number(task.shard_name, task.start, task.end)
        if task.end > task.start:
            self._groups.ask_for(self._groups_of(file, task.start, task.end))
        return self._rows(file, task.start, task.end)

    def read_record(self, name: str, index: int) -> dict[str, Any]:
        """One row. Raises ReaderError for another source or a number outside of it."""
        file = self._number(name, index, index + 1)
        group, first, _ = self._index.group_of(file, int(index))
        block = self._groups.block(file, group, 1)
        picker = block.picker
        if picker is None:
            same = next(rows(self._partition(file, 1), self._fills)) if self._keys else {}
            picker = block.picker = RowPicker(block.table, self._fills, same, self.columns)
        return picker.row(int(index) - first)

    def read_batch(self, name: str, indices: IndexArray) -> Columns:
        """The rows `indices` as one array a column, in this order."""
        if not len(indices):
            raise ReaderError(f"an empty batch of {name!r} was asked for")
        file = self._number(name, int(indices.min()), int(indices.max()) + 1)
        self._groups.want(len(indices))
        return taken(indices, partial(self._block_of, file), partial(self._columns, file))

    @classmethod
    def arguments_for(cls, data: str, mode: TaskType, given: Mapping[str, Any]) -> dict[str, Any] | None:
        """Constructor arguments for what holds Parquet files, by its names; else None."""
        return {"data": data} if claims(data) else None

    def close(self) -> None:
        """Let go of files and decoded row groups; the reader can be used again."""
        self._groups.close()

    def expect(self, ranges: Sequence[Range], *, in_order: bool = False) -> None:
        """Keep the row groups of these rows, whatever `cache_bytes` is, unless they come in order."""
        each = [(self._number(name, start, end), start, end) for name, start, end in ranges if end > start]
        wanted = [key for one in each for key in self._groups_of(*one)]
        self._groups.ask_for(wanted)
        self._groups.tables.expect(() if in_order else wanted)

    def requests_of(self, ranges: Sequence[Range]) -> Sequence[tuple[Object, int, int]] | None:
        """Of each file what opens it, and of each row group the columns, once: the last ones are kept."""
        if not is_elsewhere(self._index.name(0)):
            return None
        each = ((self._number(name, start, end), start, end) for name, start, end in ranges if end > start)
        return self._groups.requests_of(dict.fromkeys(key for one in each for key in self._groups_of(*one)))

    def _groups_of(self, file: int, start: int, end: int) -> list[Key]:
        """The row groups that have the rows `start … end - 1`."""
        first, last = np.searchsorted(self._index.group_ends(file), (start, end - 1), side="right").tolist()
        return [(file, group) for group in range(first, last + 1)]

    def _number(self, name: str, start: int, end: int) -> int:
        """The file of a source, after a check of the range."""
        if self._numbers is None:
            self._numbers = {self._index.name(file): file for file in range(len(self._index))}
        file = self._numbers.get(name)
        if file is None:
            raise no_source(name, self._numbers, self)
        check_range(start, end, 0, self._index.rows(file), name)
        return file

    def _rows(self, file: int, start: int, end: int) -> Iterator[dict[str, Any]]:
        self._groups.want(end - start)
        for part in slices(start, end, partial(self._block_of, file)):
            for first in range(0, part.num_rows, _BLOCK):
                yield from rows(self._whole(part.slice(first, _BLOCK), file), self._fills)

    def _block_of(self, file: int, row: int) -> tuple[RowBlock, int, int]:
        group, first, after = self._index.group_of(file, row)
        return self._groups.block(file, group), first, after

    def _columns(self, file: int, parts: list[Any]) -> Columns:
        import pyarrow as pa

        table = parts[0] if len(parts) == 1 else pa.concat_tables(parts)
        return numpy_columns(self._whole(table, file), self._fills)

    def _whole(self, table: Any, file: int) -> Any:
        """With the partition's columns, in the order that was asked for."""
        if not self._keys:
            return table
        same = self._partition(file, table.num_rows)
        for name in self._keys:
            table = table.append_column(name, same.column(name))
        return table.select(self.columns)

    def _partition(self, file: int, count: int) -> Any:
        """`count` rows of the partition's columns alone."""
        import pyarrow as pa

        values, columns = partition_of(self._index.names[file]), {}
        for key, kind in self._keys.items():
            value, same = values[key], pa.nulls(count, _arrow_type(kind))
            columns[key] = same if value is None else pa.repeat(scalar(kind(value), same.type), count)
        return pa.table(columns)

    def __repr__(self) -> str:
        total = sum(self._index.rows(file) for file in range(len(self._index)))
        return f"<ParquetReader '{self._index.base}' files={len(self._index)} records={total}>"


def _arrow_type(kind: type) -> Any:
    import pyarrow as pa

    return pa.int64() if kind is int else pa.string()


def _checked_fills(
    fills: Mapping[str, Any] | None, schema: Any, keys: Mapping[str, type], columns: Sequence[str]
) -> dict[str, Any]:
    import pyarrow as pa

    for name, value in (fills or {}).items():
        if name not in columns:
            raise InvalidArgument(
                f"fill_nulls names {name!r}, which is not read; columns: {', '.join(columns)}"
            )
        kind = _arrow_type(keys[name]) if name in keys else schema.field(name).type
        try:
            scalar(value, filled_type(kind, value))
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as exc:
            raise InvalidArgument(
                f"fill_nulls[{name!r}] = {value!r} is no value of type {kind}: {exc}"
            ) from exc
    return dict(fills or {})


log = logging.getLogger("edl_torch.readers")

_OPEN_FILES = 8
_AHEAD = 2  # row groups of a store that are asked for before they are needed
_WASTE = 4  # rows decoded and dropped for one that was wanted, after so many dropped row groups:
_WASTE_AFTER = 8

Key = tuple[int, int]  # file, row group


class RowGroups:
    """Row groups as Arrow tables of some columns; at most `cache_bytes` of them are kept, always the last.

    Files are opened when they are first read, by each process for itself: what a fork inherits of them is
    not used. `tables` are: they are memory, and never change. `decoded` counts row groups that were read.
    """

    def __init__(self, storage: Storage, index: ParquetIndex, schema: Any, cache_bytes: int) -> None:
        self._storage = storage
        self._index = index
        self._schema = schema
        self._cache_bytes = cache_bytes
        self._forget()

    def _forget(self) -> None:
        self.tables: BlockCache[RowBlock] = BlockCache(self._cache_bytes, self._drop)
        self._dropped_groups = self._dropped_rows = self._wanted_rows = 0
        self.decoded = 0
        self._warned = False
        self._own = object()
        weakref.finalize(self, OPEN_FILES.put_away, self._own)
        self._opening = threading.Lock()
        self._asked: dict[Key, int] = {}  # row groups of a store that are to come, by number in what follows
        self._ahead: Ahead | None = None
        self._pid = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        kept = ("_storage", "_index", "_schema", "_cache_bytes")
        return {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def want(self, rows: int) -> None:
        """Note that so many rows are read now."""
        self._wanted_rows += rows

    def block(self, file: int, group: int, wanted: int = 0) -> RowBlock:
        """A row group, of which `wanted` rows are read now.

        Raises BadRecord for a damaged one and ReaderError where the file cannot be read.
        """
        key = file, group
        self._wanted_rows += wanted
        block = self.tables.get(key)
        if block is None:
            block = self.tables.put(key, lambda: RowBlock(self._read(file, group)))
            self._asked.pop(key, None)
            self.decoded += 1
            if not self._warned and self._dropped_groups >= _WASTE_AFTER:
                self._warn_of_waste(key, block)
        return block

    def ask_for(self, groups: Sequence[Key]) -> None:
        """Know which row groups come next: of those in a store some are asked for before they are needed."""
        self._check_process()
        away = [key for key in groups if is_elsewhere(self._index.name(key[0])) and key not in self.tables]
        if self._asked.keys() >= set(away):  # a part of those that were asked for last, and are to come
            return
        wanted = list(dict.fromkeys(away))
        if self._ahead is not None:
            self._ahead.close()
        self._asked = {key: number for number, key in enumerate(wanted)}
        self._ahead = Ahead(len(wanted), lambda n: Fetch(partial(self._pieces, *wanted[n]), 0), most=_AHEAD)

    def requests_of(self, groups: Iterable[Key]) -> list[tuple[Object, int, int]]:
        """What reading these row groups asks a store for; their footers are read for that."""
        found: list[tuple[Object, int, int]] = []
        with self._storage.apart() as apart:
            for number, keys in groupby(groups, key=itemgetter(0)):
                file = ParquetFile(apart, self._index.object(number))
                found += file.opening_requests()
                found += (each for _, group in keys for each in file.requests_of(group, self._schema.names))
                file.close()
        return found

    def _pieces(self, file: int, group: int) -> list[Piece]:
        return self._file(file).fetch(group, self._schema.names)

    def close(self) -> None:
        """Let go of the files and tables; the next use opens them again."""
        OPEN_FILES.put_away(self._own)
        self._forget()

    def _drop(self, block: RowBlock) -> None:
        self._dropped_groups += 1
        self._dropped_rows += block.table.num_rows

    def _warn_of_waste(self, key: Key, block: RowBlock) -> None:
        if self._dropped_rows <= _WASTE * self._wanted_rows:
            return
        self._warned = True
        log.warning(
            "file=%s row_group=%d bytes=%d rows_decoded=%d rows_wanted=%d row groups are decoded for few of "
            "their rows: cut shards where row groups end (records_per_shard=reader.rows_per_group), shuffle "
            "by shuffle_shards=True and the dataset's shuffle=True, or raise cache_bytes=%d",
            *(self._index.name(key[0]), key[1], block.nbytes, self._dropped_rows, self._wanted_rows),
            self._cache_bytes,
        )

    def _read(self, file: int, group: int) -> Any:
        import pyarrow as pa

        name = self._index.name(file)
        try:
            try:
                return self._decode(file, group)
            except (pa.ArrowInvalid, OSError):  # it may be another file by now
                OPEN_FILES.put_away(self._own, file)
                return self._decode(file, group)
        except ReaderError:
            raise
        except Exception as exc:
            if isinstance(exc, pa.ArrowNotImplementedError):
                raise DataFormatError(
                    f"'{name}': a column cannot be read ({one_line(exc)}); leave it out with columns=[…]"
                ) from exc
            if not is_arrows_own(exc, pa):
                raise storage_error(exc, name) from exc
            said = f"'{name}' row group {group} is damaged ({one_line(exc)}); copy or write the file again"
            raise BadRecord(said) from exc

    def _decode(self, file: int, group: int) -> Any:
        import pyarrow as pa

        ends = self._index.group_ends(file)
        expected = int(ends[group]) - (int(ends[group - 1]) if group else 0)
        names = self._schema.names
        # In a loader worker the other cores belong to others, and a fork may have taken Arrow's threads.
        use_threads = multiprocessing.parent_process() is None
        if not names:
            return pa.table({"": pa.nulls(expected)})  # a table without any column would forget its length
        opened = self._file(file)
        if self._ahead is not None and (file, group) in self._asked:
            pieces = self._ahead.take(self._asked[file, group])
        else:
            pieces = opened.fetch(group, names)
        table = opened.decode(group, names, pieces, use_threads).select(names)
        if table.num_rows != expected:
            raise pa.ArrowInvalid(f"{table.num_rows} rows decoded, {expected} expected")
        if not opened.is_as_it_was():  # what was decoded may be of two writers
            OPEN_FILES.put_away(self._own, file)
            return self._decode(file, group)
        return table

    def _file(self, file: int) -> ParquetFile:
        self._check_process()
        with self._opening:
            return OPEN_FILES.get(self._own, file, partial(self._open, file), _OPEN_FILES)

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            self._own, self._asked, self._ahead, self._pid = object(), {}, None, os.getpid()
            self._opening = threading.Lock()

    def _open(self, file: int) -> ParquetFile:
        name = self._index.name(file)
        try:
            opened = ParquetFile(self._storage, self._index.object(file))
        except DataFormatError as exc:  # its footer was read when the reader was made
            raise _changed(name, str(exc)) from exc
        difference = self._difference(opened, file)
        if difference is not None:
            opened.close()
            raise _changed(name, difference)
        return opened

    def _difference(self, opened: ParquetFile, file: int) -> str | None:
        size, footer, pages = (int(self._index.arrays[name][file]) for name in ("sizes", "footers", "pages"))
        if opened.size != size:
            return f"{size:,} bytes then, {opened.size:,} now"
        rows = opened.rows_of_groups()
        if sum(rows) != self._index.rows(file):
            return f"{self._index.rows(file):,} rows then, {sum(rows):,} now"
        if len(rows) != len(self._index.group_ends(file)):
            return "its row groups are others"
        if opened.footer() != footer:
            return "its footer is another"
        if opened.remote and opened.object.tag:  # each read of it was compared
            return None
        if pages and opened.pages(len(self._index)) != pages:
            return "its pages are others"
        written = opened.written != int(self._index.arrays["written"][file])
        # Of the others some pages, or none, were looked at: that they are the same shows nothing.
        is_seen_whole = pages and size <= SMALL_BYTES
        return "it was written to since" if written and not is_seen_whole else None


def _changed(name: str, how: str) -> SourceChanged:
    return SourceChanged(
        f"'{name}' has changed since the reader was made ({how}): data must stay as it is while a job uses "
        "it; start the job again with a new reader"
    )
