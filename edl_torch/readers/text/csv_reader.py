"""CSV files of any size: records by row, batches by column.

It holds no record: rows are found through an index in a memory-mapped file. It must not know how a field
becomes a value.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from edl_torch.errors import BadRecord, DataFormatError, InvalidArgument, ReaderUnavailable
from edl_torch.fingerprint import Fingerprint
from edl_torch.readers.shared.finder import Finder, Paths
from edl_torch.readers.shared.looks import arguments
from edl_torch.readers.storage import is_url
from edl_torch.readers.text.csv_values import (
    CsvDialect,
    CsvLayout,
    Header,
    RowParser,
    arrow_columns,
    checked_fills,
    chosen_columns,
    column_names,
    columns_of,
    has_heading,
    inferred,
)
from edl_torch.readers.text.row_index import CHUNK_BYTES
from edl_torch.readers.text.text_reader import (
    Gathered,
    SourceFiles,
    TextFilesReader,
    TextSource,
    open_source,
)
from edl_torch.shard import IndexArray, Task, TaskType

_FINDER = Finder(suffixes=(".csv", ".tsv"))
_DELIMITERS = ";\t|,"
_HEAD = 100  # records that a heading is told by
_SAMPLE = 1000  # records that types are inferred from, spread over all files
_MANIFEST_ONLY = {"root", "classes", "has_header", "min_side"}


class CsvReader(TextFilesReader):
    """Records `{column: value}` of CSV files; batches `{column: array}` through pyarrow.

    Each file is a source, named by its path as given. Its rows are indexed once, in parallel, and the index
    is kept; gzip files are unpacked once beside it. Fields may be quoted and hold line ends and doubled
    quotes; lines end in LF, CRLF or CR; a byte order mark and a missing last line end do not matter; lines
    without anything are no records.

    Args:
        data: A file, a folder with `.csv` or `.tsv` files (or these and `.gz`), a glob, or a list of those.
        columns: The columns that records have, in this order; default all.
        dtypes: Types by column (`csv_values.py` has the table). Those of other columns are inferred from up
            to 1000 records spread over all files, the same ones in every process: `reader.dtypes` has them.
        header: Whether each file begins with a heading. "auto" tells by numbers below it, and raises where
            it cannot.
        names: Column names instead of the heading's; files without either have f0, f1, …
        delimiter: One ASCII character. Default: a tab for `.tsv`, else a comma.
        quote_char: What quotes fields; None where quotes mean nothing.
        encoding: UTF-8, or another in which line ends and the delimiter are bytes of their own.
        null_values: Fields that mean "no value" in columns of other types than str: NaN in floating-point
            ones, what `fill_nulls` says, else the record is bad.
        fill_nulls: What stands for no value, by column.
        as_tuples: Records are tuples of values, batches tuples of arrays.
        index_dir: Where indexes are kept; see `edl_torch.readers.shared.mapped.cached_index`.
        chunk_bytes: The piece of a file that one thread indexes at a time.

    Raises DataFormatError, naming the file, for data that cannot be used; InvalidArgument for options; in
    reading, BadRecord with file, line and reason for a record of another width, with a value of another
    type, or that is not text, SourceChanged when a file changes, and from `read_batch` ReaderUnavailable
    without pyarrow.
    """

    def __init__(
        self,
        data: Paths,
        columns: Sequence[str] | None = None,
        dtypes: Mapping[str, Any] | None = None,
        *,
        header: Header = "auto",
        names: Sequence[str] | None = None,
        delimiter: str | None = None,
        quote_char: str | None = '"',
        encoding: str = "utf-8",
        null_values: Sequence[str] = ("",),
        fill_nulls: Mapping[str, Any] | None = None,
        as_tuples: bool = False,
        index_dir: str | os.PathLike[str] | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        super().__init__()
        if isinstance(null_values, str):
            raise InvalidArgument(f"null_values={null_values!r} is one string: pass a sequence of strings")
        if header not in (True, False, "auto"):
            raise InvalidArgument(f"header={header!r}: expected True, False or 'auto'")
        paths = _FINDER.files(data)
        usual = _delimiter(paths) if delimiter is None else delimiter
        self._dialect = CsvDialect(delimiter=usual, quote_char=quote_char, encoding=encoding)
        rules = self._dialect.rules
        self._files = SourceFiles(
            open_source(path, rules, index_dir=index_dir, chunk_bytes=chunk_bytes) for path in paths
        )
        self._skips = int(header is True)
        nulls = frozenset(null_values)
        all_names = self._find_heading(header, names, nulls, checks_delimiter=delimiter is None)
        wanted, types = chosen_columns(all_names, columns, dtypes, paths[0])
        missing = [name for name in wanted if name not in types]
        if missing:
            types |= inferred(self._sample(), all_names, missing, nulls)
        self._layout = CsvLayout(
            names=all_names,
            columns=tuple((name, types[name]) for name in wanted),
            nulls=nulls,
            fill_nulls=checked_fills(fill_nulls, {name: types[name] for name in wanted}),
            as_tuples=as_tuples,
        )
        self._parser = RowParser(self._dialect, self._layout)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of a record."""
        return tuple(name for name, _ in self._layout.columns)

    @property
    def dtypes(self) -> dict[str, str]:
        """The type of each column, as given or inferred. It may be given to another reader as `dtypes`."""
        return {name: kind.name for name, kind in self._layout.columns}

    def fingerprint(self, *, whole: bool = False) -> Fingerprint:
        """Of each file its size, some blocks, and where its records begin; and how columns are made of it."""
        layout, dialect = self._layout, self._dialect
        fills = sorted((layout.fill_nulls or {}).items())
        columns = sorted(self.dtypes.items()), list(layout.names), sorted(layout.nulls), fills
        also = arguments("columns", columns, dialect.delimiter, dialect.quote_char, dialect.encoding)
        return self._files.fingerprint(whole=whole, also=also)

    def read_records(self, task: Task) -> Iterator[Any]:
        """Yield the rows. Raises ReaderError for another source or a range outside of it."""
        source = self._source(task.shard_name, task.start, task.end)
        first, after = task.start + self._skips, task.end + self._skips
        for start, block in self._files.blocks(source, first, after):
            yield from self._records(source, start, block)

    def read_record(self, name: str, index: int) -> Any:
        """Row `index`. Raises ReaderError for another source or a number outside of it."""
        number = int(index)
        source = self._source(name, number, number + 1)
        number += self._skips
        return self._parse(source, number, self._files.read(source, *source.index.span(number)))

    def read_batch(self, name: str, indices: IndexArray) -> Any:
        """Rows as `{column: array}` (a tuple of arrays with `as_tuples`), str columns as objects."""
        numbers = np.asarray(indices, dtype=np.int64)
        if len(numbers):
            self._source(name, int(numbers.min()), int(numbers.max()) + 1)
        source = self._source(name, 0, 0)
        numbers = numbers + self._skips
        gathered = self._files.gather(source, numbers)
        batch = arrow_columns(gathered.joined(), len(gathered), self._dialect, self._layout)
        if batch is None:
            each = zip(numbers.tolist(), gathered.rows(), strict=True)
            parsed = [self._parse(source, number, row) for number, row in each]
            if self._layout.as_tuples:
                parsed = [dict(zip(self.columns, values, strict=True)) for values in parsed]
            batch = columns_of(parsed, self._layout)
        return tuple(batch.values()) if self._layout.as_tuples else batch

    @classmethod
    def arguments_for(cls, data: str, mode: TaskType, given: Mapping[str, Any]) -> dict[str, Any] | None:
        """Constructor arguments for a `.csv` or `.tsv` file (or with `.gz`), or a folder of nothing else."""
        if given.keys() & _MANIFEST_ONLY:
            return None
        return {"data": data} if not is_url(data) and _FINDER.is_all_of(data) else None

    def _records(self, source: TextSource, start: int, block: Gathered) -> Iterator[Any]:
        """By Arrow if it is there and nothing is wrong; it and the parser of rows agree."""
        try:
            columns = arrow_columns(block.joined(), len(block), self._dialect, self._layout)
        except ReaderUnavailable:
            columns = None
        if columns is None:
            for number, row in enumerate(block.rows(), start):
                yield self._parse(source, number, row)
            return
        kinds = [kind for _, kind in self._layout.columns]
        each = zip(kinds, columns.values(), strict=True)
        lists = (column.tolist() if kind.scalar is None else list(column) for kind, column in each)
        for values in zip(*lists, strict=True):
            yield values if self._layout.as_tuples else dict(zip(columns, values, strict=True))

    def _parse(self, source: TextSource, number: int, row: bytes) -> Any:
        try:
            return self._parser.parse(row)
        except ValueError as exc:
            raise BadRecord(f"{self._files.line(source, number)} {exc}") from exc

    def _find_heading(
        self, header: Header, names: Sequence[str] | None, nulls: frozenset[str], *, checks_delimiter: bool
    ) -> tuple[str, ...]:
        """Settle whether files have a heading, by the first that has records; all must have the same."""
        filled = [source for source in self._files.sources.values() if source.index.count]
        if not filled:
            raise DataFormatError(f"{self._files.names()}: there is no record")
        head = [self._first_fields(filled[0])]
        first = self._files.gather(filled[0], np.arange(min(_HEAD, filled[0].index.count))).rows()
        if checks_delimiter and len(head[0]) == 1:
            _check_delimiter(self._dialect, first, filled[0].name)
        if header == "auto":
            head += [self._dialect.fields(row, "replace") for row in first[1:]]
            self._skips = int(has_heading(head, nulls, filled[0].name))
        if self._skips:
            for source in filled[1:]:
                if (found := self._first_fields(source)) != head[0]:
                    raise DataFormatError(
                        f"'{source.name}' begins with {found[:20]} and '{filled[0].name}' with "
                        f"{head[0][:20]}: files of one reader have the same heading; or pass header=False "
                        "and names="
                    )
        if not any(self.create_shards().values()):
            raise DataFormatError(f"'{filled[0].name}' has a heading and no record")
        return column_names(head[0], bool(self._skips), names, filled[0].name)

    def _sample(self) -> Iterator[list[str]]:
        counts = np.array(list(self.create_shards().values()))
        ends = np.cumsum(counts)
        chosen = np.unique(np.linspace(0, ends[-1] - 1, _SAMPLE).astype(np.int64))
        files = np.searchsorted(ends, chosen, side="right")
        sources = list(self._files.sources.values())
        for file in np.unique(files).tolist():
            numbers = chosen[files == file] - (ends[file] - counts[file]) + self._skips
            for row in self._files.gather(sources[file], numbers).rows():
                yield self._dialect.fields(row, "replace")

    def _first_fields(self, source: TextSource) -> list[str]:
        row = self._files.read(source, *source.index.span(0))
        try:
            return self._dialect.fields(row)
        except UnicodeDecodeError as exc:
            raise DataFormatError(
                f"{self._files.line(source, 0)} is not {self._dialect.encoding}: {exc.reason}; name the "
                "file's own encoding with encoding="
            ) from exc

    def __repr__(self) -> str:
        counts = self.create_shards().values()
        return f"<CsvReader files={len(counts)} records={sum(counts)} columns={len(self.columns)}>"


def _delimiter(paths: list[str]) -> str:
    kinds = {Finder(suffixes=(".tsv",)).is_named(path) for path in paths}
    if len(kinds) > 1:
        raise InvalidArgument(
            "some of the files are .tsv and some are not: read them by two readers, or pass delimiter="
        )
    return "\t" if kinds == {True} else ","


def _check_delimiter(dialect: CsvDialect, rows: Sequence[bytes], file: str) -> None:
    """Raise DataFormatError for rows of one column that another delimiter cuts into several, all alike."""
    for other in _DELIMITERS:
        try:
            cut = replace(dialect, delimiter=other)
            counts = {len(cut.fields(row, "replace")) for row in rows}
        except (InvalidArgument, csv.Error):  # it quotes, may be half a character, or these are no rows by it
            continue
        if len(rows) > 1 and len(counts) == 1 and counts != {1}:
            raise DataFormatError(
                f"'{file}' has one column, but {counts.pop()} where {other!r} separates them: read it by "
                f"CsvReader('{file}', delimiter={other!r}); delimiter={dialect.delimiter!r} is for one column"
            )
