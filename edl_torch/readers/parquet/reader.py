"""Parquet files as columns or rows: files, folders, Hive partitions and globs, local or remote.

Of the row groups that are decoded the last ones are kept, so that each is read once for a shard.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from edl_torch.errors import BadRecord, DataFormatError, InvalidArgument, ReaderError, SourceChanged
from edl_torch.fingerprint import Fingerprint
from edl_torch.readers.arrow import Columns, RowPicker, filled_type, numpy_columns, row_numbers, rows, scalar
from edl_torch.readers.base import AbstractDataReader, Range, check_range, no_source, required
from edl_torch.readers.parquet.index import (
    SMALL_BYTES,
    ParquetFile,
    ParquetIndex,
    build_index,
    claims,
    find_files,
    is_arrows_own,
    one_line,
    partition_of,
    partition_types,
    whole_fingerprint,
)
from edl_torch.readers.shared.files import BlockCache
from edl_torch.readers.shared.looks import arguments
from edl_torch.readers.storage import FileSystems as Storage
from edl_torch.readers.storage import storage_error
from edl_torch.shard import IndexArray, Task, TaskType

_BLOCK = 1024  # rows that become Python objects at a time
Data = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


class ParquetReader(AbstractDataReader):
    """Records are rows, `{column: value}`; batches are `{column: array}` (see `readers.arrow`).

    Each file is a source, named by its path or URL; an empty file is none. A row group is decoded as a whole
    and kept, so that shuffled reads of a shard decode each of its row groups once. Shards that are cut where
    row groups end (`records_per_shard=reader.rows_per_group`, or a multiple) share none of them with others.

    Args:
        data: A file, a folder (files at any depth that end in .parquet or .pq; what begins with '.' or '_' is
            skipped), a glob, any fsspec URL of these, or a list of them.
        columns: The columns to read, in this order; default all (without the row labels that pandas adds).
        partitions: Whether folders `key=value` below `data` become columns: int64 where all values are whole
            numbers, else strings. A column that the files have themselves stays as it is there.
        fill_nulls: What stands for NULL, by column: integers and booleans have no value for it. In a column
            of lists a list stands for NULL lists, any other value for NULL inside of lists.
        storage_options: For fsspec: endpoint, credentials. They travel to loader workers and are not shown.
        cache_bytes: How many bytes of decoded row groups each process keeps (always one, and those of the
            shards that a shuffle mixes).

    Raises ReaderError for what does not exist or cannot be reached, DataFormatError for what is not Parquet,
    truncated, or of another schema than the first file, and InvalidArgument for columns that are not there.
    """

    reads_blocks = True

    def __init__(
        self,
        data: Data,
        columns: Sequence[str] | None = None,
        *,
        partitions: bool = True,
        fill_nulls: Mapping[str, Any] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        cache_bytes: int = 512 << 20,
    ) -> None:
        super().__init__()
        required("pyarrow.parquet", "reader 'parquet' needs pyarrow: pip install 'edl-torch[parquet]'")
        if columns is not None and (
            isinstance(columns, str) or not columns or len(set(columns)) < len(columns)
        ):
            raise InvalidArgument(f"columns={columns!r}: expected a list of different column names")
        given = os.fspath(data) if isinstance(data, str | os.PathLike) else [os.fspath(one) for one in data]
        self._storage = storage = Storage(storage_options)
        found = find_files(storage, given)
        keys = partition_types(found) if partitions else {}
        in_files = None if columns is None else [name for name in columns if name not in keys]
        self._index, schema = build_index(storage, found, in_files)
        self._keys = {key: kind for key, kind in keys.items() if key not in schema.names}
        self.columns = [*schema.names, *self._keys] if columns is None else list(columns)
        self._fills = _checked_fills(fill_nulls, schema, self._keys, self.columns)
        self._groups = RowGroups(storage, self._index, schema, cache_bytes)
        self._numbers: dict[str, int] | None = None
        self._pickers: dict[tuple[int, int], RowPicker] = {}  # of row groups that are kept

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_numbers": None, "_pickers": {}}

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
        also = arguments("columns", sorted(self.columns), sorted(self._fills.items()))
        return whole_fingerprint(self._storage, self._index, also) if whole else self._index.fingerprint(also)

    def read_records(self, task: Task) -> Iterator[dict[str, Any]]:
        """Yield rows. Raises ReaderError for another source or a range outside of it."""
        file = self._number(task.shard_name, task.start, task.end)
        return self._rows(file, task.start, task.end)

    def read_record(self, name: str, index: int) -> dict[str, Any]:
        """One row. Raises ReaderError for another source or a number outside of it."""
        file = self._number(name, index, index + 1)
        group, first, _ = self._index.group_of(file, int(index))
        table = self._groups.table(file, group, 1)
        picker = self._pickers.get((file, group))
        if picker is None or picker.table is not table:
            picker = self._new_picker(file, group, table)
        return picker.row(int(index) - first)

    def read_batch(self, name: str, indices: IndexArray) -> Columns:
        """The rows `indices` as one array a column, in this order."""
        if not len(indices):
            raise ReaderError(f"an empty batch of {name!r} was asked for")
        first, last = int(indices.min()), int(indices.max())
        file = self._number(name, first, last + 1)
        if last - first + 1 == len(indices) and bool((np.diff(indices) == 1).all()):
            return self._columns(list(self._slices(file, first, last + 1)), file)
        groups = np.searchsorted(self._index.group_ends(file), indices, side="right")
        order = np.argsort(groups, kind="stable")
        parts = list(self._taken(file, groups[order], indices[order]))
        columns = self._columns(parts, file)
        if len(parts) == 1:
            return columns
        back = np.argsort(order)
        return {column: values[back] for column, values in columns.items()}

    @classmethod
    def arguments_for(cls, data: str, mode: TaskType, given: Mapping[str, Any]) -> dict[str, Any] | None:
        """Constructor arguments for what holds Parquet files, by its names; else None."""
        return {"data": data} if claims(data) else None

    def close(self) -> None:
        """Let go of files and decoded row groups; the reader can be used again."""
        self._pickers.clear()
        self._groups.close()

    def expect(self, ranges: Sequence[Range], *, in_order: bool = False) -> None:
        """Keep the row groups of these rows, whatever `cache_bytes` is, unless they come in order."""
        wanted = []
        for name, start, end in () if in_order else ranges:
            file = self._number(name, start, end)
            ends = self._index.group_ends(file)
            first, last = np.searchsorted(ends, (start, end - 1), side="right").tolist()
            wanted += [(file, group) for group in range(first, last + 1)]
        self._groups.tables.expect(wanted)

    def _new_picker(self, file: int, group: int, table: Any) -> RowPicker:
        same = next(rows(self._partition(file, 1), self._fills)) if self._keys else {}
        # A picker holds its row group: one that is not kept must not be either.
        self._pickers = {key: one for key, one in self._pickers.items() if key in self._groups.tables}
        self._pickers[file, group] = picker = RowPicker(table, self._fills, same, self.columns)
        return picker

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
        for part in self._slices(file, start, end):
            for first in range(0, part.num_rows, _BLOCK):
                yield from rows(self._whole(part.slice(first, _BLOCK), file), self._fills)

    def _slices(self, file: int, start: int, end: int) -> Iterator[Any]:
        """The rows `start … end - 1` as parts of row groups; nothing is copied."""
        while start < end:
            group, first, after = self._index.group_of(file, start)
            stop = min(end, after)
            yield self._groups.table(file, group, stop - start).slice(start - first, stop - start)
            start = stop

    def _taken(self, file: int, groups: IndexArray, indices: IndexArray) -> Iterator[Any]:
        """The rows `indices`, of which those of one row group stand together."""
        ends = self._index.group_ends(file)
        edges = [0, *(np.flatnonzero(np.diff(groups)) + 1).tolist(), len(groups)]
        for at, after in pairwise(edges):
            group = int(groups[at])
            first = int(ends[group - 1]) if group else 0
            yield self._groups.table(file, group, after - at).take(row_numbers(indices[at:after] - first))

    def _columns(self, parts: list[Any], file: int) -> Columns:
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
        self.tables: BlockCache[Any] = BlockCache(self._cache_bytes, self._drop)
        self._dropped_groups = self._dropped_rows = self._wanted_rows = 0
        self.decoded = 0
        self._warned = False
        self._files: OrderedDict[int, ParquetFile] = OrderedDict()
        self._pid = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        kept = ("_storage", "_index", "_schema", "_cache_bytes")
        return {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def table(self, file: int, group: int, wanted: int) -> Any:
        """A row group, of which `wanted` rows are read now.

        Raises BadRecord for a damaged one and ReaderError where the file cannot be read.
        """
        key = file, group
        self._wanted_rows += wanted
        table = self.tables.get(key)
        if table is None:
            table = self.tables.put(key, lambda: self._read(file, group))
            self.decoded += 1
            if not self._warned and self._dropped_groups >= _WASTE_AFTER:
                self._warn_of_waste(key, table)
        return table

    def close(self) -> None:
        """Let go of the files and tables; the next use opens them again."""
        for file in self._files.values():
            if self._pid == os.getpid():
                file.close()
        self._forget()

    def _drop(self, table: Any) -> None:
        self._dropped_groups += 1
        self._dropped_rows += table.num_rows

    def _warn_of_waste(self, key: Key, table: Any) -> None:
        if self._dropped_rows <= _WASTE * self._wanted_rows:
            return
        self._warned = True
        log.warning(
            "file=%s row_group=%d bytes=%d rows_decoded=%d rows_wanted=%d row groups are decoded for few of "
            "their rows: cut shards where row groups end (records_per_shard=reader.rows_per_group), shuffle "
            "by shuffle_shards=True and the dataset's shuffle=True, or raise cache_bytes=%d",
            *(self._index.name(key[0]), key[1], table.nbytes, self._dropped_rows, self._wanted_rows),
            self._cache_bytes,
        )

    def _read(self, file: int, group: int) -> Any:
        import pyarrow as pa

        name = self._index.name(file)
        try:
            try:
                return self._decode(file, group)
            except (pa.ArrowInvalid, OSError):
                # It may be another file by now; an answer of the network that was cut short looks the same.
                self._close(file)
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

    def _close(self, file: int) -> None:
        """Let go of an open file."""
        opened = self._files.pop(file, None)
        if opened is not None:
            opened.close()

    def _decode(self, file: int, group: int) -> Any:
        import pyarrow as pa

        ends = self._index.group_ends(file)
        expected = int(ends[group]) - (int(ends[group - 1]) if group else 0)
        names = self._schema.names
        # In a loader worker the other cores belong to others, and a fork may have taken Arrow's threads.
        threads = multiprocessing.parent_process() is None
        if not names:
            return pa.table({"": pa.nulls(expected)})  # a table without any column would forget its length
        opened = self._file(file)
        table = opened.file.read_row_group(group, columns=names, use_threads=threads).select(names)
        if table.num_rows != expected:
            raise pa.ArrowInvalid(f"{table.num_rows} rows decoded, {expected} expected")
        if not opened.is_as_it_was():  # what was decoded may be of two writers
            self._close(file)
            return self._decode(file, group)
        return table

    def _file(self, file: int) -> ParquetFile:
        if self._pid != os.getpid():
            self._files, self._pid = OrderedDict(), os.getpid()
        found = self._files.pop(file, None) or self._open(file)
        self._files[file] = found
        if len(self._files) > _OPEN_FILES:
            self._files.popitem(last=False)[1].close()
        return found

    def _open(self, file: int) -> ParquetFile:
        name = self._index.name(file)
        self._storage.forget_listings(name)
        try:
            opened = ParquetFile(self._storage, name)
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
        if pages and not opened.remote and opened.pages(len(self._index)) != pages:  # there each is a request
            return "its pages are others"
        written = opened.written != int(self._index.arrays["written"][file])
        # Of the others some pages, or none, were looked at: that they are the same shows nothing.
        is_seen_whole = pages and size <= SMALL_BYTES and not opened.remote
        return "it was written to since" if written and not is_seen_whole else None


def _changed(name: str, how: str) -> SourceChanged:
    return SourceChanged(
        f"'{name}' has changed since the reader was made ({how}): data must stay as it is while a job uses "
        "it; start the job again with a new reader"
    )
