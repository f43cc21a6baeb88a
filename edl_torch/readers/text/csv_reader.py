"""CSV files of any size: records by row, batches by column.

It holds no record: rows are found through an index in a memory-mapped file. It must not know how a field
becomes a value.
"""

from __future__ import annotations

import codecs
import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

import numpy as np

from edl_torch.errors import BadRecord, DataFormatError, InvalidArgument, ReaderUnavailable
from edl_torch.fingerprint import Part
from edl_torch.readers.shared.finder import Finder, Paths
from edl_torch.readers.shared.looks import arguments
from edl_torch.readers.storage import Storage, StorageOptions
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
from edl_torch.readers.text.text_reader import Gathered, Indexing, TextFile, TextFilesReader
from edl_torch.shard import IndexArray, Task

_DELIMITERS = ";\t|,"
_HEAD = 100  # records that a heading is told by
_SAMPLE = 1000  # records that types are inferred from, spread over all files


class CsvReader(TextFilesReader):
    """Records `{column: value}` of CSV files; batches `{column: array}` through pyarrow.

    Each file is a source, named by its path as given. Its rows are indexed once, in parallel, and the index
    is kept; gzip files are unpacked once beside it. Fields may be quoted and hold line ends and doubled
    quotes; lines end in LF, CRLF or CR; a byte order mark and a missing last line end do not matter; lines
    without anything are no records.

    Args:
        data: A file, a folder with `.csv` or `.tsv` files (or these and `.gz`), a glob, a range, a manifest,
            or a list of those; paths or URLs.
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
        chunk_bytes: The piece of a file that one thread indexes at a time.
        store: Options of the store, and where indexes are kept: see `StorageOptions`.

    Raises DataFormatError, naming the file, for data that cannot be used; InvalidArgument for options; in
    reading, BadRecord with file, line and reason for a record of another width, with a value of another
    type, or that is not text, SourceChanged when a file changes, and from `read_batch` ReaderUnavailable
    without pyarrow.
    """

    finder = Finder(suffixes=(".csv", ".tsv"))

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
        chunk_bytes: int = CHUNK_BYTES,
        **store: Unpack[StorageOptions],
    ) -> None:
        super().__init__(Storage.of(self, store))
        if isinstance(null_values, str):
            raise InvalidArgument(f"null_values={null_values!r} is one string: pass a sequence of strings")
        if header not in (True, False, "auto"):
            raise InvalidArgument(f"header={header!r}: expected True, False or 'auto'")
        nulls = frozenset(null_values)
        with self._indexing() as apart:
            paths = self.finder.files(data, apart)
            usual = _delimiter(paths) if delimiter is None else delimiter
            self._dialect = CsvDialect(delimiter=usual, quote_char=quote_char, encoding=encoding)
            indexing = Indexing(storage=apart, rules=self._dialect.rules, chunk_bytes=chunk_bytes)
            self._files = indexing.files(paths)
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

    def _made_by(self) -> list[Part]:
        """How columns are made of a file's bytes."""
        layout, dialect = self._layout, self._dialect
        fills = sorted((layout.fill_nulls or {}).items())
        columns = sorted(self.dtypes.items()), list(layout.names), sorted(layout.nulls), fills
        order = [self.columns] if layout.as_tuples else []  # which no name tells then
        encoding = codecs.lookup(dialect.encoding).name
        return arguments("columns", columns, dialect.delimiter, dialect.quote_char, encoding, *order)

    def read_records(self, task: Task) -> Iterator[Any]:
        """Yield the rows. Raises ReaderError for another source or a range outside of it."""
        for file, start, block in self._blocks(task):
            yield from self._records(file, start, block)

    def read_record(self, name: str, index: int) -> Any:
        """Row `index`. Raises ReaderError for another source or a number outside of it."""
        number = int(index)
        file = self._file(name, number, number + 1)
        return self._parse(file, number, self._read(file)(*file.span(number, number + 1)))

    def read_batch(self, name: str, indices: IndexArray) -> Any:
        """Rows as `{column: array}` (a tuple of arrays with `as_tuples`), str columns as objects."""
        numbers = np.asarray(indices, dtype=np.int64)
        first, after = (int(numbers.min()), int(numbers.max()) + 1) if len(numbers) else (0, 0)
        file = self._file(name, first, after)
        gathered = self._gather(file, numbers)
        batch = arrow_columns(gathered.joined(), len(gathered), self._dialect, self._layout)
        if batch is None:
            each = zip(numbers.tolist(), gathered.rows(), strict=True)
            parsed = [self._parse(file, number, row) for number, row in each]
            if self._layout.as_tuples:
                parsed = [dict(zip(self.columns, values, strict=True)) for values in parsed]
            batch = columns_of(parsed, self._layout)
        return tuple(batch.values()) if self._layout.as_tuples else batch

    def _records(self, file: TextFile, start: int, block: Gathered) -> Iterator[Any]:
        """By Arrow if it is there and nothing is wrong; it and the parser of rows agree."""
        try:
            columns = arrow_columns(block.joined(), len(block), self._dialect, self._layout)
        except ReaderUnavailable:
            columns = None
        if columns is None:
            for number, row in enumerate(block.rows(), start):
                yield self._parse(file, number, row)
            return
        kinds = [kind for _, kind in self._layout.columns]
        each = zip(kinds, columns.values(), strict=True)
        lists = (column.tolist() if kind.scalar is None else list(column) for kind, column in each)
        for values in zip(*lists, strict=True):
            yield values if self._layout.as_tuples else dict(zip(columns, values, strict=True))

    def _parse(self, file: TextFile, number: int, row: bytes) -> Any:
        try:
            return self._parser.parse(row)
        except ValueError as exc:
            raise BadRecord(f"{self._line(file, number)} {exc}") from exc

    def _find_heading(
        self, header: Header, names: Sequence[str] | None, nulls: frozenset[str], *, checks_delimiter: bool
    ) -> tuple[str, ...]:
        """Settle whether files have a heading, by the first that has records; all must have the same."""
        filled = [file for file in self._files.values() if file.count]
        if not filled:
            raise DataFormatError(f"{self._named()}: there is no record")
        one = filled[0]
        head = [self._first_fields(one)]
        first = self._gather(one, np.arange(min(_HEAD, one.count))).rows()
        if checks_delimiter and len(head[0]) == 1:
            _check_delimiter(self._dialect, first, one.name)
        if header == "auto":
            head += [self._dialect.fields(row, "replace") for row in first[1:]]
            try:
                header = has_heading(head, nulls, one.name)
            except DataFormatError:
                if len(head[0]) == 1:  # what is not cut by delimiter= holds no numbers
                    _check_delimiter(self._dialect, first, one.name)
                raise
        if header:
            for file in filled[1:]:
                if (found := self._first_fields(file)) != head[0]:
                    raise DataFormatError(
                        f"'{file.name}' begins with {found[:20]} and '{one.name}' with "
                        f"{head[0][:20]}: files of one reader have the same heading; or pass header=False "
                        "and names="
                    )
            self._files = {
                name: replace(file, skips=1, count=max(file.count - 1, 0))
                for name, file in self._files.items()
            }
            if not self.count:
                raise DataFormatError(f"'{one.name}' has a heading and no record")
        return column_names(head[0], header, names, one.name)

    def _sample(self) -> Iterator[list[str]]:
        counts = np.array([file.count for file in self._files.values()])
        ends = np.cumsum(counts)
        chosen = np.unique(np.linspace(0, ends[-1] - 1, _SAMPLE).astype(np.int64))
        places = np.searchsorted(ends, chosen, side="right")
        files = list(self._files.values())
        for place in np.unique(places).tolist():
            numbers = chosen[places == place] - (ends[place] - counts[place])
            for row in self._gather(files[place], numbers).rows():
                yield self._dialect.fields(row, "replace")

    def _first_fields(self, file: TextFile) -> list[str]:
        row = self._read(file)(*file.span(0, 1))
        try:
            return self._dialect.fields(row)
        except UnicodeDecodeError as exc:
            raise DataFormatError(
                f"{self._line(file, 0)} is not {self._dialect.encoding}: {exc.reason}; name the "
                "file's own encoding with encoding="
            ) from exc


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
