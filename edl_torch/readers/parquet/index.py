"""Which files a Parquet dataset has, and what their footers say, as compact arrays.

Format: https://parquet.apache.org/docs/file-format/. It reads footers, never rows, and keeps no file open.
"""

from __future__ import annotations

import os
import posixpath
import re
import zlib
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np

from edl_torch.errors import DataFormatError, InvalidArgument, ReaderError
from edl_torch.fingerprint import Fingerprint, Part
from edl_torch.readers.shared.looks import blocks, chosen, listing
from edl_torch.readers.shared.mapped import StringTable, shared
from edl_torch.readers.storage import FileSystems as Storage
from edl_torch.readers.storage import Opened, is_url, reaching, storage_error
from edl_torch.shard import IndexArray

if TYPE_CHECKING:
    import pyarrow.parquet as pq


SUFFIXES = (".parquet", ".pq")
_OTHER_SCHEMES = ("odps://",)
_GLOB = re.compile(r"[*?\[]")
_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
_INTEGER = re.compile(r"-?\d{1,18}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The files as `base` (empty, or ending in '/') and names below it, in the order of the sources."""

    base: str
    names: tuple[str, ...]


def find_files(storage: Storage, data: str | Sequence[str]) -> Found:
    """The files of `data`; those of a folder or glob in the order of their names, those of a list as listed.

    Raises ReaderError for what does not exist or cannot be reached, DataFormatError for a folder or glob
    without Parquet files and InvalidArgument for a file that is listed twice.
    """
    entries = [data] if isinstance(data, str) else list(data)
    if not entries:
        raise InvalidArgument("the list of Parquet files is empty")
    found = [_files_of(storage, entry) for entry in entries]
    names = [name for _, files in found for name in files]
    if len(set(names)) < len(names):
        twice, _ = Counter(names).most_common(1)[0]
        raise InvalidArgument(f"'{twice}' is listed twice: two sources would have one name")
    base = found[0][0] if len(found) == 1 else _common_folder(names)
    return Found(base=base, names=tuple(name[len(base) :] for name in names))


def _files_of(storage: Storage, data: str) -> tuple[str, list[str]]:
    """Of one path, URL, folder or glob: the folder that partitions hang from, and its files' names."""
    storage.forget_listings(data)
    file_system, path = storage.resolve(data)
    with reaching(data):
        pattern = _GLOB.search(data)
        try:
            kind = file_system.info(path)["type"]
        except FileNotFoundError:
            if pattern is None:
                raise
            kind = "glob"
        if kind == "file":
            return data[: data.rfind("/") + 1], [data]
        if kind == "glob" and pattern is not None:
            base = data[: data.rfind("/", 0, pattern.start()) + 1]
            paths = list(_globbed(file_system, path))
        else:
            base = data.rstrip("/") + "/"
            paths = list(_below(file_system, path))
        # The file system has its own form of names: they shall begin as the user's did.
        root = storage.resolve(base or ".")[1].rstrip("/") + "/"
        if any(not path.startswith(root) for path in paths):
            raise ReaderError(f"'{base}': its file system lists names elsewhere ({paths[0]!r})")
    if not paths and kind == "glob":
        raise DataFormatError(f"'{data}' matches no Parquet file; check the pattern and the folder")
    if not paths:
        raise DataFormatError(
            f"'{data}' holds no Parquet file: their names must end in {' or '.join(SUFFIXES)} and not "
            "begin with '.' or '_'; for other names pass a glob that matches them"
        )
    return base, sorted({base + path[len(root) :] for path in paths})


def _below(file_system: Any, folder: str) -> Iterator[str]:
    """Parquet files at any depth; what begins with '.' or '_' is not data (`_SUCCESS`, `_metadata`)."""
    root = folder.rstrip("/") + "/"
    for path in file_system.find(folder):
        parts = path.removeprefix(root).split("/")
        if path.lower().endswith(SUFFIXES) and not any(_is_hidden(part) for part in parts):
            yield path


def _is_hidden(part: str) -> bool:
    return part.startswith((".", "_")) and "=" not in part


def _globbed(file_system: Any, pattern: str) -> Iterator[str]:
    for path, info in file_system.glob(pattern, detail=True).items():
        if info["type"] == "file":
            yield path
        else:
            yield from _below(file_system, path)


def _common_folder(names: Sequence[str]) -> str:
    """The longest beginning of all names that ends in '/'."""
    first, last = min(names), max(names)
    length = next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    base = first[: first.rfind("/", 0, length) + 1]
    return "" if base.endswith("://") else base


def partition_of(name: str) -> dict[str, str | None]:
    """The values in the folders `key=value` of a name below the dataset's base, as Hive writes them."""
    pairs = (part.partition("=") for part in posixpath.dirname(name).split("/") if "=" in part)
    return {unquote(key): None if value == _HIVE_NULL else unquote(value) for key, _, value in pairs}


def partition_types(found: Found) -> dict[str, type]:
    """The partition columns, `int` where every value is a whole number and `str` else.

    Raises DataFormatError for a file with other keys than the first one.
    """
    keys = list(partition_of(found.names[0]))
    types: dict[str, type] = dict.fromkeys(keys, int)
    for name in found.names:
        values = partition_of(name)
        if list(values) != keys:
            raise DataFormatError(
                f"'{found.base}{name}' is in a folder with the keys {list(values)}, but "
                f"'{found.base}{found.names[0]}' has {keys}: keep one layout in a dataset, or "
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
    if is_url(data):
        return not data.startswith(_OTHER_SCHEMES) and data.lower().rstrip("/").endswith(SUFFIXES)
    if os.path.isdir(data):
        return _holds_parquet(data)
    is_there = os.path.isfile(data) or _GLOB.search(data) is not None
    return is_there and data.lower().endswith(SUFFIXES)


def _holds_parquet(folder: str) -> bool:
    """Goes down the first subfolders until a folder has files, which then decide."""
    while True:
        with os.scandir(folder) as entries:
            visible = sorted((entry for entry in entries if entry.name[0] not in "._"), key=lambda e: e.name)
        files = [entry.name for entry in visible if entry.is_file()]
        folders = [entry.path for entry in visible if entry.is_dir()]
        if files or not folders:
            return any(name.lower().endswith(SUFFIXES) for name in files)
        folder = folders[0]


_THREADS = 16  # they wait for the network
_MAGIC = b"PAR1"
_ENCRYPTED = b"PARE"
_TAIL = 8  # bytes after the footer: its length, and the magic
_LOOKED_INTO = 16  # files whose pages are looked at, or one in so many
_PAIRS, _COLUMNS, _BLOCK_BYTES, _SMALL_BLOCKS, _PIECES = 24, 16, 2048, 4, 16
_STRIDE = 0x9E3779B1  # far from any period that data have
SMALL_BYTES = 1 << 16  # which Arrow reads at once when it opens a file
_NOTED = 2  # reads: Arrow reads the end of a file, and then what it lacks of the footer


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetIndex:
    """What the footers say.

    base, names: the files. arrays: int64 `sizes` [n] in bytes; `group_ends` [groups of all files], the row of
    its file after each group's last; `first_group` [n + 1], where a file's groups begin in `group_ends`;
    `footers` and `pages` [n], digests of each footer, and of some pages of some files, else 0; `written`
    [n] checksums of when each was last written to, as this machine knows it.
    """

    base: str
    names: StringTable
    arrays: Mapping[str, IndexArray]

    def __len__(self) -> int:
        return len(self.names)

    def name(self, file: int) -> str:
        """The file's path or URL."""
        return self.base + self.names[file]

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
        """The file's rows."""
        ends = self.group_ends(file)
        return int(ends[-1]) if len(ends) else 0

    def fingerprint(self, also: Sequence[Part] = ()) -> Fingerprint:
        """Of each file its size and footer; pages of some, as rows in another order have the same footer."""
        each = zip(*(self.arrays[name].tolist() for name in ("sizes", "footers", "pages")), strict=True)
        return listing("sampled", self.names, {place: f"{look}" for place, look in enumerate(each)}, also)

    def rows_per_group(self) -> int:
        """The most common length of a row group, the last ones of files left out where there are others."""
        lengths = [np.diff(self.group_ends(file), prepend=0) for file in range(len(self))]
        inner = np.concatenate([each[:-1] if len(each) > 1 else each for each in lengths])
        values, counts = np.unique(inner, return_counts=True)
        return int(values[counts.argmax()]) if len(values) else 0


def build_index(storage: Storage, found: Found, wanted: Sequence[str] | None) -> tuple[ParquetIndex, Any]:
    """Read all footers; the index, and the Arrow schema of the columns `wanted` (None: all of them).

    Raises what opening a file raises, InvalidArgument for a column that the first file has not, and
    DataFormatError where there is no row, or a file's columns differ from the first one's, naming file and
    column. Files without rows may have any columns.
    """
    sizes, first_group, group_ends = array("q"), array("q", [0]), array("q")
    footers, pages, written = array("q"), array("I"), array("I")
    schema, first = None, ""
    for name, footer in zip(found.names, _footers(storage, found), strict=True):
        if not any(footer.rows):
            pass  # its writer saw no value that could tell it a type
        elif schema is None:
            first = found.base + name
            schema = _chosen(footer.schema, wanted, first)
        else:
            _compare(schema, footer.schema, wanted, found.base + name, first)
        sizes.append(footer.size)
        footers.append(footer.digest)
        pages.append(footer.pages)
        written.append(footer.written)
        group_ends.extend(np.cumsum(footer.rows, dtype=np.int64).tolist())
        first_group.append(len(group_ends))
    if schema is None:
        raise DataFormatError(
            f"no row in '{found.base}{found.names[0]}' and {len(found.names) - 1} more file(s)"
        )
    numbers = {"sizes": sizes, "first_group": first_group, "group_ends": group_ends}
    numbers |= {"footers": footers, "pages": pages, "written": written}
    arrays = shared({name: np.array(each, dtype=each.typecode) for name, each in numbers.items()}, "parquet")
    return ParquetIndex(base=found.base, names=StringTable(found.names), arrays=arrays), schema


def whole_fingerprint(storage: Storage, index: ParquetIndex, also: Sequence[Part]) -> Fingerprint:
    """Return the fingerprint of all bytes of all files."""
    looks = {n: _whole(storage, index.name(n)) for n in range(len(index))}
    return listing("whole", index.names, looks, also)


def _whole(storage: Storage, name: str) -> str:
    file = storage.open(name)

    def read(start: int, end: int) -> bytes:
        file.handle.seek(start)
        return bytes(file.handle.read(end - start))

    try:
        return blocks(file.size, read, whole=True)
    finally:
        file.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Footer:
    size: int
    rows: list[int]
    schema: Any
    digest: int
    pages: int
    written: int


def _footers(storage: Storage, found: Found) -> Iterator[_Footer]:
    names = [found.base + name for name in found.names]
    looked_into = set(chosen(len(names), max(_LOOKED_INTO, len(names) // _LOOKED_INTO)))
    if len(names) == 1:
        yield _footer(storage, names[0], 1)
        return
    shared_by = min(len(looked_into), _LOOKED_INTO)
    # The threads are gone before any loader worker is forked.
    with ThreadPoolExecutor(min(_THREADS, len(names)), thread_name_prefix="edl-footers") as pool:
        yield from pool.map(
            partial(_footer, storage), names, [shared_by * (n in looked_into) for n in range(len(names))]
        )


def _footer(storage: Storage, name: str, looked_into: int) -> _Footer:
    file = ParquetFile(storage, name)
    try:
        return _Footer(
            size=file.size,
            rows=file.rows_of_groups(),
            schema=file.schema,
            digest=file.footer(),
            pages=file.pages(looked_into) if looked_into else 0,
            written=file.written,
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

    def __init__(self, storage: Storage, name: str) -> None:
        self.name = name
        opened = storage.open(name)
        self._noted = _Noting(opened.handle) if opened.remote else None
        self._opened = opened if self._noted is None else replace(opened, handle=self._noted)
        self.stamp = opened.stamp()  # when it was opened
        try:
            self.file = _parse(self._opened, name)
        except ReaderError:
            self._opened.close()
            raise
        self.size = self._opened.size  # in bytes
        self.remote = self._opened.remote  # whether reading it may fail on the way
        self.schema = self.file.schema_arrow  # of all columns, Arrow's

    def rows_of_groups(self) -> list[int]:
        """The number of rows in each row group."""
        footer = self.file.metadata
        return [footer.row_group(group).num_rows for group in range(footer.num_row_groups)]

    def footer(self) -> int:
        """The footer's length and a checksum of it, of a large one in pieces: where a column of a row group
        has another length all that follow begin elsewhere."""
        length = int(self.file.metadata.serialized_size) + _TAIL
        data = self._read(max(0, self.size - length), self.size)
        if len(data) > SMALL_BYTES:
            pieces = range(0, len(data), len(data) // _PIECES)
            data = b"".join(data[at : at + _BLOCK_BYTES] for at in pieces)
        return length << 32 | zlib.crc32(data)

    def pages(self, files: int) -> int:
        """A checksum of blocks of two columns in some row groups: the largest, and the smallest.

        Of a small file all bytes count, and of a small column of a row group. The fewer `files` are looked
        into, the more row groups and blocks of each.
        """
        if self.size <= SMALL_BYTES:
            return zlib.crc32(self._read(0, self.size))
        footer, checksum = self.file.metadata, 0
        pairs = 1 if self.remote else max(1, _PAIRS // files)  # of blocks, one of each column
        groups = chosen(footer.num_row_groups, pairs)
        columns: list[int] = []
        for group in groups:
            row_group = footer.row_group(group)
            if not columns:
                by_size = sorted(
                    chosen(row_group.num_columns, _COLUMNS),
                    key=lambda number: int(row_group.column(number).total_compressed_size),
                )
                columns = by_size[-1:] if self.remote else list(dict.fromkeys((by_size[-1], by_size[0])))
            for number in columns:
                for start, end in self._blocks(row_group.column(number), group, pairs // len(groups)):
                    checksum = zlib.crc32(self._read(start, end), checksum)
        return checksum

    def _blocks(self, column: Any, group: int, most: int) -> Iterator[tuple[int, int]]:
        """Yield where some of a column's blocks lie, spread over it, at other places in each row group."""
        first = column.dictionary_page_offset or column.data_page_offset
        end = min(self.size, first + column.total_compressed_size)
        count = -(-(end - first) // _BLOCK_BYTES)
        if count <= max(most, _SMALL_BLOCKS) and not self.remote:
            yield first, end
            return
        for block in range(most):
            start = first + (group * _STRIDE + block * count // most) % count * _BLOCK_BYTES
            yield start, min(start + _BLOCK_BYTES, end)

    @property
    def written(self) -> int:
        """A checksum of its version in an object store, or of when it was last written to; 0 for neither."""
        if self._opened.version:
            return zlib.crc32(self._opened.version.encode())
        return 0 if self.stamp is None else zlib.crc32(b"%d" % self.stamp[1])

    def is_as_it_was(self) -> bool:
        """Whether what has its name was not written to since this file was opened, as far as can be seen."""
        return self.stamp == self._opened.stamp()

    def _read(self, start: int, end: int) -> bytes:
        if self._noted is None:
            return bytes(self._opened.handle.read_at(end - start, start))  # Arrow's own: one call
        if (found := self._noted.found(start, end)) is not None:
            return found
        self._opened.handle.seek(start)
        return bytes(self._opened.handle.read(end - start))

    def close(self) -> None:
        """Let go of the file."""
        self.file.close()
        self._opened.close()


class _Noting:
    """A remote file's handle that keeps what was read while it was opened: a footer then costs nothing."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._reads: list[tuple[int, bytes]] = []

    def read(self, size: int = -1) -> bytes:
        start, data = self._handle.tell(), bytes(self._handle.read(size))
        if len(self._reads) < _NOTED:
            self._reads.append((start, data))
        return data

    def found(self, start: int, end: int) -> bytes | None:
        """The bytes of a range that was read as a part of one."""
        for first, data in self._reads:
            if first <= start and end <= first + len(data):
                return data[start - first : end - first]
        return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


def _parse(opened: Opened, name: str) -> pq.ParquetFile:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # Remote: the byte ranges of a row group's columns are joined into few requests ahead of decoding.
        return pq.ParquetFile(opened.handle, pre_buffer=opened.remote, page_checksum_verification=True)
    except Exception as exc:
        if is_arrows_own(exc, pa):
            raise DataFormatError(f"'{name}' {_what_is_wrong(opened)} ({one_line(exc)})") from exc
        raise storage_error(exc, name) from exc


def is_arrows_own(exc: Exception, pa: Any) -> bool:
    """Whether Arrow found the bytes wrong; what reading them raises has a number or a class of its own."""
    return isinstance(exc, pa.ArrowException) or (type(exc) is OSError and exc.errno is None)


def one_line(exc: Exception) -> str:
    """What an exception says, without Arrow's line breaks."""
    return " ".join(str(exc).split())


def _what_is_wrong(opened: Opened) -> str:
    opened.handle.seek(0)
    start = opened.handle.read(len(_MAGIC))
    opened.handle.seek(max(opened.size - len(_MAGIC), 0))
    end = opened.handle.read(len(_MAGIC))
    if _ENCRYPTED in (start, end):
        return "is an encrypted Parquet file, which this reader does not decrypt"
    if not opened.size:
        return "is empty: it is no Parquet file, or its writer never finished"
    if start != _MAGIC:
        return "is no Parquet file: it does not begin as one"
    if end != _MAGIC:
        return "is a truncated Parquet file: its footer is missing; write or copy it again"
    return "is a damaged Parquet file: its footer cannot be read; write or copy it again"
