"""Decoded row groups of many Parquet files: the last ones used are kept, so each is read once for a shard.

It must not know which rows are wanted of them, nor what becomes of the values.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from edl_torch.errors import BadRecord, DataFormatError, ReaderError, SourceChanged
from edl_torch.readers.parquet.index import ParquetFile, ParquetIndex, is_arrows_own, one_line
from edl_torch.readers.shared.block_cache import BlockCache
from edl_torch.readers.storage import Storage, storage_error

log = logging.getLogger("edl_torch.readers")

_OPEN_FILES = 8
_WASTE = 4  # rows decoded and dropped for one that was wanted, after so many dropped row groups:
_WASTE_AFTER = 8

Key = tuple[int, int]  # file, row group


class RowGroups:
    """Row groups as Arrow tables of some columns; at most `cache_bytes` of them are kept, always the last.

    Files are opened when they are first read, by each process for itself: what a fork inherits of them is
    not used. Tables are: they are memory, and never change. `decoded` counts row groups that were read.
    """

    def __init__(self, storage: Storage, index: ParquetIndex, schema: Any, cache_bytes: int) -> None:
        self._storage = storage
        self._index = index
        self._schema = schema
        self._cache_bytes = cache_bytes
        self._forget()

    def _forget(self) -> None:
        self._tables: BlockCache[Any] = BlockCache(self._cache_bytes, self._drop)
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
        table = self._tables.get(key)
        if table is None:
            table = self._tables.put(key, lambda: self._read(file, group))
            self.decoded += 1
            if not self._warned and self._dropped_groups >= _WASTE_AFTER:
                self._warn_of_waste(key, table)
        return table

    def expect(self, keys: Iterable[Key]) -> None:
        """Keep these, once they are read, until others are expected."""
        self._tables.expect(keys)

    def keeps(self, key: Key) -> bool:
        """Whether this row group is in memory."""
        return key in self._tables

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
        table = opened.read_group(group, names, use_threads=threads).select(names)
        if table.num_rows != expected:
            raise pa.ArrowInvalid(f"{table.num_rows} rows decoded, {expected} expected")
        if not opened.is_as_it_was():  # what was decoded may be of two writers
            self._close(file)
            self._file(file)
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
        if opened.size != self._index.size(file):
            return f"{self._index.size(file):,} bytes then, {opened.size:,} now"
        rows = opened.rows_of_groups()
        if sum(rows) != self._index.rows(file):
            return f"{self._index.rows(file):,} rows then, {sum(rows):,} now"
        if len(rows) != len(self._index.group_ends(file)):
            return "its row groups are others"
        if opened.footer() != self._index.footer(file):
            return "its footer is another"
        pages = 0 if opened.remote else self._index.pages(file)  # there each costs a request
        return "its pages are others" if pages and opened.pages(len(self._index)) != pages else None


def _changed(name: str, how: str) -> SourceChanged:
    return SourceChanged(
        f"'{name}' has changed since the reader was made ({how}): data must stay as it is while a job uses "
        "it; start the job again with a new reader"
    )
