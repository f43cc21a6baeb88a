"""Which files a Parquet dataset has, and what their footers say, as compact arrays.

Format: https://parquet.apache.org/docs/file-format/. It reads footers, never rows, and keeps no file open.
"""

from __future__ import annotations

import os
import posixpath
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, takewhile
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np

from edl_torch.errors import DataFormatError, EdlError, InvalidArgument, ReaderError
from edl_torch.fingerprint import Fingerprint, Part
from edl_torch.readers.shared.finder import Finder, Paths, base_of, is_glob, names_below
from edl_torch.readers.shared.looks import blocks, chosen, listing, looked
from edl_torch.readers.shared.mapped import Array, StringTable, shared
from edl_torch.readers.shared.sources import each_looked_at
from edl_torch.readers.storage import (
    Object,
    ObjectFile,
    Piece,
    Storage,
    is_elsewhere,
    local_path,
    storage_error,
)
from edl_torch.shard import IndexArray

if TYPE_CHECKING:
    import pyarrow.parquet as pq


SUFFIXES = (".parquet", ".pq")
_OTHER_SCHEMES = ("odps://",)
_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
_INTEGER = re.compile(r"-?\d{1,18}", re.ASCII)


FILES = Finder(suffixes=SUFFIXES, deep=True)


def found_in(data: Paths, storage: Storage) -> tuple[str, tuple[str, ...]]:
    """The folder that partitions of `data` hang from, empty or ending in '/', and the files' names below it,
    in the order of the sources. Raises ReaderError."""
    files = FILES.files(data, storage)
    base = os.path.commonprefix(files)  # noqa: RUF071  it is cut at a slash
    base = base[: base.rfind("/") + 1]
    base = "" if base.endswith("://") else base
    given = os.fspath(data) if isinstance(data, str | os.PathLike) else files[0]
    if given not in files:
        top = base_of(given) if is_glob(given) else given.rstrip("/") + "/"
        base = top if base.startswith(top) else base  # else braces or a manifest named them
    return base, tuple(name[len(base) :] for name in files)


def partition_of(name: str) -> dict[str, str | None]:
    """The values in the folders `key=value` of a name below the dataset's base, as Hive writes them."""
    pairs = (part.partition("=") for part in posixpath.dirname(name).split("/") if "=" in part)
    return {unquote(key): None if value == _HIVE_NULL else unquote(value) for key, _, value in pairs}


def partition_types(base: str, names: Sequence[str]) -> dict[str, type]:
    """The partition columns, `int` where every value is a whole number and `str` else.

    Raises DataFormatError for a file with other keys than the first one.
    """
    keys = list(partition_of(names[0]))
    types: dict[str, type] = dict.fromkeys(keys, int)
    for name in names:
        values = partition_of(name)
        if list(values) != keys:
            raise DataFormatError(
                f"'{base}{name}' is in a folder with the keys {list(values)}, but "
                f"'{base}{names[0]}' has {keys}: keep one layout in a dataset, or "
                "pass partitions=False"
            )
        for key, value in values.items():
            if value is not None and not _INTEGER.fullmatch(value):
                types[key] = str
    return types


def claims(data: str) -> bool:
    """Whether `data` is a Parquet file, a glob of them, a folder that holds some, or a URL of such a name.

    Judged by names, and quickly for what is something else, such as a folder of a million images.
    """
    if is_elsewhere(data):
        return not data.startswith(_OTHER_SCHEMES) and data.lower().rstrip("/").endswith(SUFFIXES)
    path = local_path(data)
    if not os.path.isdir(path):
        is_named = path.lower().endswith(SUFFIXES) and (os.path.isfile(path) or is_glob(path))
        return is_named or FILES.is_all_of(data)
    files = (name for name in names_below(path) if not name.endswith("/"))
    first = next(files, "")  # the folder that it is in decides
    beside = takewhile(lambda name: posixpath.dirname(name) == posixpath.dirname(first), files)
    return any(name.lower().endswith(SUFFIXES) for name in chain([first], beside))


_THREADS_AWAY = 64
_MAGIC = b"PAR1"
_ENCRYPTED = b"PARE"
_TAIL = 8  # bytes after the footer: its length, and the magic
_LOOKED_INTO, _ONE_IN = 8, 16  # files whose pages are looked at, or one in so many
_PAIRS, _COLUMNS, _BLOCK_BYTES, _SMALL_BLOCKS, _PIECES = 24, 16, 512, 16, 16
_STRIDE = 0x9E3779B1  # far from any period that data have
SMALL_BYTES = 1 << 16  # which Arrow reads at once when it opens a file


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetIndex:
    """What the footers say.

    base, names: the files. arrays: int64 `sizes` [n] in bytes; `group_ends` [groups of all files], the row of
    its file after each group's last; `first_group` [n + 1], where a file's groups begin in `group_ends`;
    `footers` and `pages` [n], digests of each footer, and of some pages of some files, else 0; `written`
    [n] when each was last written to, as this machine knows it, or what its store says of its version.
    """

    base: str
    names: StringTable
    arrays: Mapping[str, IndexArray]

    def __len__(self) -> int:
        return len(self.names)

    def name(self, file: int) -> str:
        """The file's path or URL."""
        return self.base + self.names[file]

    def object(self, file: int) -> Object:
        """The file as it was when it was indexed."""
        return Object(self.name(file), int(self.arrays["sizes"][file]), int(self.arrays["written"][file]))

    def group_ends(self, file: int) -> IndexArray:
        """The row after the last one of each of the file's row groups."""
        first, after = self.arrays["first_group"][file : file + 2].tolist()
        return self.arrays["group_ends"][first:after]

    def group_of(self, file: int, row: int) -> tuple[int, int, int]:
        """The row group that has a row of the file, its first row, and the row after its last."""
        ends = self.group_ends(file)
        group = int(ends.searchsorted(row, side="right"))
        return group, int(ends[group - 1]) if group else 0, int(ends[group])

    def rows(self, file: int) -> int:
        ends = self.group_ends(file)
        return int(ends[-1]) if len(ends) else 0

    @property
    def is_told_by_size(self) -> bool:
        """Whether reads of some files see no other ones of the same size: their store has no tags."""
        untagged = np.flatnonzero(self.arrays["written"] == 0).tolist()
        return any(is_elsewhere(self.name(file)) for file in untagged)

    def fingerprint(self, storage: Storage, also: Sequence[Part] = (), *, whole: bool = False) -> Fingerprint:
        """Of each file its size and footer; pages of some, as rows in another order have the same footer. Or
        all bytes of the `whole`."""
        if whole:
            with storage.apart() as apart:
                files = map(self.object, range(len(self)))
                looks = [looked(apart, one, partial(blocks, one.size, whole=True)) for one in files]
            return listing("whole", self.names, dict(enumerate(looks)), also)
        columns = [self.arrays[name].tolist() for name in ("sizes", "footers", "pages")]
        each = list(zip(*columns, strict=True))
        if self.is_told_by_size:
            with storage.apart() as apart:
                found = _footers(apart, list(map(self.name, range(len(self)))))
                each = [(one.size, one.digest, one.pages) for one in found]
        return listing("sampled", self.names, {place: f"{look}" for place, look in enumerate(each)}, also)

    def rows_per_group(self) -> int:
        """The most common length of a row group, the last ones of files left out where there are others."""
        lengths = [np.diff(self.group_ends(file), prepend=0) for file in range(len(self))]
        inner = np.concatenate([each[:-1] if len(each) > 1 else each for each in lengths])
        values, counts = np.unique(inner, return_counts=True)
        return int(values[counts.argmax()]) if len(values) else 0


def build_index(
    storage: Storage, base: str, names: Sequence[str], wanted: Sequence[str] | None
) -> tuple[ParquetIndex, Any]:
    """Read all footers of files below a folder; the index, and the Arrow schema of the columns `wanted`, None
    for all of them.

    Raises what opening a file raises, InvalidArgument for a column that the first file has not, and
    DataFormatError where there is no row, or a file's columns differ from the first one's, naming file and
    column. Files without rows may have any columns.
    """
    footers = []
    schema, first = None, ""
    for name, footer in zip(names, _footers(storage, [base + name for name in names]), strict=True):
        if not any(footer.rows):
            pass  # its writer saw no value that could tell it a type
        elif schema is None:
            first = base + name
            schema = _chosen(footer.schema, wanted, first)
        else:
            _compare(schema, footer.schema, wanted, base + name, first)
        footers.append(replace(footer, schema=None))
    if schema is None:
        raise DataFormatError(f"no row in '{base}{names[0]}' and {len(names) - 1} more file(s)")
    arrays: dict[str, Array] = {
        "sizes": np.array([footer.size for footer in footers], np.int64),
        "written": np.array([footer.written for footer in footers], np.int64),
        "footers": np.array([footer.digest for footer in footers], np.int64),
        "pages": np.array([footer.pages for footer in footers], np.uint32),
        "first_group": np.cumsum([0, *(len(footer.rows) for footer in footers)], dtype=np.int64),
        "group_ends": np.concatenate([np.cumsum(footer.rows, dtype=np.int64) for footer in footers]),
    }
    return ParquetIndex(base=base, names=StringTable(names), arrays=shared(arrays, "parquet")), schema


@dataclass(frozen=True, slots=True, kw_only=True)
class _Footer:
    size: int
    rows: list[int]
    schema: Any
    digest: int
    pages: int
    written: int


def _footers(storage: Storage, names: Sequence[str]) -> Iterator[_Footer]:
    looked_into = {names[n] for n in chosen(len(names), max(_LOOKED_INTO, len(names) // _ONE_IN))}
    shared_by = min(len(names), _ONE_IN)

    def look(name: str) -> _Footer:
        return _footer(storage, name, shared_by * (name in looked_into))

    return each_looked_at(names, look, away=_THREADS_AWAY)


def _footer(storage: Storage, name: str, looked_into: int) -> _Footer:
    one = storage.look(name)
    if one is None:
        raise DataFormatError(
            f"'{name}' does not exist; check the path{' and the bucket' * is_elsewhere(name)}"
        )
    file = ParquetFile(storage, one)
    try:
        return _Footer(
            size=file.size,
            rows=file.rows_of_groups(),
            schema=file.schema,
            digest=file.footer(),
            pages=file.pages(looked_into) if looked_into else 0,
            written=one.tag,
        )
    finally:
        file.close()


def _chosen(schema: Any, wanted: Sequence[str] | None, name: str) -> Any:
    import pyarrow as pa

    names = _data_columns(schema) if wanted is None else wanted
    missing = [column for column in names if column not in schema.names]
    if missing:
        raise InvalidArgument(
            f"'{name}' has no column {', '.join(map(repr, missing))}; it has {', '.join(schema.names)}"
        )
    twice = [column for column in names if len(schema.get_all_field_indices(column)) > 1]
    if twice:
        raise DataFormatError(f"'{name}' has several columns {twice[0]!r}: leave it out with columns=[…]")
    return pa.schema([_plain(schema.field(column)) for column in names])


def _data_columns(schema: Any) -> list[str]:
    """All columns but those in which pandas keeps its row labels."""
    return [n for n in schema.names if not (n.startswith("__index_level_") and n.endswith("__"))]


def _plain(field: Any) -> Any:
    """The field as far as files must agree in it: not in NULLs, metadata or how memory holds strings."""
    import pyarrow as pa

    kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
    narrow = {pa.large_string(): pa.string(), pa.large_binary(): pa.binary(), pa.string_view(): pa.string()}
    return pa.field(field.name, narrow.get(kind, kind))


def _compare(expected: Any, schema: Any, wanted: Sequence[str] | None, name: str, first: str) -> None:
    has, data = set(schema.names), _data_columns(schema)
    for column in expected:
        if column.name not in has:
            raise DataFormatError(f"'{name}' has no column {column.name!r}, which '{first}' has{_REMEDY}")
        kind = _plain(schema.field(column.name)).type
        if not kind.equals(column.type):
            raise DataFormatError(
                f"column {column.name!r} is {kind} in '{name}', but {column.type} in '{first}'{_REMEDY}"
            )
    if wanted is None and (more := [column for column in data if column not in expected.names]):
        raise DataFormatError(f"'{name}' has the column {more[0]!r}, which '{first}' has not{_REMEDY}")


_REMEDY = ": write the files with one schema, or name the columns that they share with columns=[…]"


class ParquetFile:
    """An open file and its footer, or an error that says what is wrong with the file.

    To be used in the process that opened it, and closed.
    """

    def __init__(self, storage: Storage, one: Object) -> None:
        import pyarrow as pa

        self.object = one
        self.remote = is_elsewhere(one.name)  # whether reading it may fail on the way
        self._handle: Any
        if self.remote:
            self._handle = ObjectFile(storage, one)
            self._handle.kept = self._handle.pieces([(max(0, one.size - SMALL_BYTES), one.size)])
        else:
            try:
                self._handle = pa.OSFile(local_path(one.name))
            except OSError as exc:
                raise storage_error(exc, one.name) from exc
        self._stamp = self._seen()  # when it was opened
        self.size = one.size if self.remote else self._handle.size()  # in bytes
        try:
            self.file = _parse(self._handle, self.size, one.name)
        except ReaderError:
            self._handle.close()
            raise
        self.schema = self.file.schema_arrow  # of all columns, Arrow's

    def _seen(self) -> tuple[int, int, int] | None:
        """Size and times of what has its name now; None where that is gone or in a store."""
        try:
            found = None if self.remote else os.stat(local_path(self.object.name))
        except OSError:
            return None
        return None if found is None else (found.st_size, found.st_mtime_ns, found.st_ctime_ns)

    def rows_of_groups(self) -> list[int]:
        footer = self.file.metadata
        return [footer.row_group(group).num_rows for group in range(footer.num_row_groups)]

    def footer(self) -> int:
        """The footer's length and a checksum of it, of a large one in pieces: where a column of a row group
        has another length all that follow begin elsewhere."""
        length = int(self.file.metadata.serialized_size) + _TAIL
        start = max(0, self.size - length)
        width, pieces = (_BLOCK_BYTES, _PIECES) if length > SMALL_BYTES else (self.size - start, 1)
        ranges = [(at, at + width) for at in range(start, self.size - width + 1, length // pieces)]
        return length << 32 | self._checksum(ranges)

    def pages(self, files: int) -> int:
        """A checksum of blocks of two columns in some row groups: the largest, and the smallest.

        Of a small file all bytes count, and of a small column of a row group. The fewer `files` are looked
        into, the more row groups and blocks of each.
        """
        if self.size <= SMALL_BYTES:
            return self._checksum([(0, self.size)])
        footer, ranges = self.file.metadata, list[tuple[int, int]]()
        pairs = max(1, _PAIRS // files)  # of blocks, one of each column
        groups = chosen(footer.num_row_groups, pairs)
        columns: list[int] = []
        for group in groups:
            row_group = footer.row_group(group)
            if not columns:
                places = chosen(row_group.num_columns, _COLUMNS)
                sizes = [row_group.column(number).total_compressed_size for number in places]
                columns = list(dict.fromkeys(places[sizes.index(most(sizes))] for most in (max, min)))
            for number in columns:
                ranges += self._blocks(row_group.column(number), group, pairs // len(groups))
        return self._checksum(ranges)

    def _blocks(self, column: Any, group: int, most: int) -> list[tuple[int, int]]:
        """Where some of a column's blocks lie, spread over it, at other places in each row group."""
        first = _first_byte(column)
        end = min(self.size, first + column.total_compressed_size)
        count = -(-(end - first) // _BLOCK_BYTES)
        if count <= max(most, _SMALL_BLOCKS):
            return [(first, end)]
        starts = [
            first + (group * _STRIDE + block * count // most) % count * _BLOCK_BYTES for block in range(most)
        ]
        return [(start, min(start + _BLOCK_BYTES, end)) for start in starts]

    @property
    def written(self) -> int:
        """When it was last written to; what its store says of its version; 0 where neither is known."""
        return self.object.tag if self.remote else self._stamp[1] if self._stamp else 0

    def is_as_it_was(self) -> bool:
        """Whether what has its name was not written to since this file was opened, as far as can be seen."""
        return self._stamp == self._seen()

    def fetch(self, group: int, columns: Sequence[str]) -> list[Piece]:
        """Ask a store for the bytes of some columns of a row group, which `decode` is to be given."""
        return self._handle.pieces(self._ranges(group, columns)) if self.remote else []

    def opening_requests(self) -> list[tuple[Object, int, int]]:
        """What a store was asked for to open it."""
        length = int(self.file.metadata.serialized_size)
        asked = [(self.object, max(0, self.size - SMALL_BYTES), min(self.size, SMALL_BYTES))]
        if length + _TAIL > asked[0][2]:  # Arrow reads a longer footer by itself
            asked.append((self.object, self.size - _TAIL - length, length))
        return asked

    def requests_of(self, group: int, columns: Sequence[str]) -> list[tuple[Object, int, int]]:
        """What `fetch` asks for."""
        found: list[tuple[Object, int, int]] = self._handle.requests_of(self._ranges(group, columns))
        return found

    def _ranges(self, group: int, columns: Sequence[str]) -> list[tuple[int, int]]:
        row_group, ranges = self.file.metadata.row_group(group), list[tuple[int, int]]()
        for number in range(row_group.num_columns):
            column = row_group.column(number)
            name = column.path_in_schema
            if any(name == one or name.startswith(one + ".") for one in columns):
                first = _first_byte(column)
                ranges.append((first, min(self.size, first + column.total_compressed_size)))
        return ranges

    def decode(self, group: int, columns: Sequence[str], pieces: list[Piece], threads: bool) -> Any:
        """A row group as an Arrow table of some columns. Raises what Arrow does."""
        if self.remote:
            self._handle.kept = pieces
        try:
            return self.file.read_row_group(group, columns=list(columns), use_threads=threads)
        finally:
            if self.remote:
                self._handle.kept = []

    def _checksum(self, ranges: Sequence[tuple[int, int]]) -> int:
        if self.remote:
            return zlib.crc32(b"".join(self._handle.each(ranges)))
        read = self._handle.read_at  # Arrow's own: one call
        return zlib.crc32(b"".join([read(end - start, start) for start, end in ranges]))

    def close(self) -> None:
        """Let go of the file."""
        self.file.close()
        self._handle.close()


def _first_byte(column: Any) -> int:
    """Where a column of a row group begins."""
    first = column.dictionary_page_offset
    return int(first if first and first < column.data_page_offset else column.data_page_offset)


def _parse(handle: Any, size: int, name: str) -> pq.ParquetFile:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(handle, page_checksum_verification=True)
    except EdlError:
        raise
    except Exception as exc:
        if is_arrows_own(exc, pa):
            raise DataFormatError(f"'{name}' {_what_is_wrong(handle, size)} ({one_line(exc)})") from exc
        raise storage_error(exc, name) from exc


def is_arrows_own(exc: Exception, pa: Any) -> bool:
    """Whether Arrow found the bytes wrong; what reading them raises has a number or a class of its own."""
    return isinstance(exc, pa.ArrowException) or (type(exc) is OSError and exc.errno is None)


def one_line(exc: Exception) -> str:
    """What an exception says, without Arrow's line breaks."""
    return " ".join(str(exc).split())


def _what_is_wrong(handle: Any, size: int) -> str:
    handle.seek(0)
    start = handle.read(len(_MAGIC))
    handle.seek(max(size - len(_MAGIC), 0))
    end = handle.read(len(_MAGIC))
    if _ENCRYPTED in (start, end):
        return "is an encrypted Parquet file, which this reader does not decrypt"
    if not size:
        return "is empty: it is no Parquet file, or its writer never finished"
    if start != _MAGIC:
        return "is no Parquet file: it does not begin as one"
    if end != _MAGIC:
        return "is a truncated Parquet file: its footer is missing; write or copy it again"
    return "is a damaged Parquet file: its footer cannot be read; write or copy it again"
