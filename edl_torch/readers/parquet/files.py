"""Which files a Parquet dataset has: of a path, a URL, a folder, a glob, or a list of these.

It lists names and sizes and must not open a file.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from edl_torch.errors import DataFormatError, InvalidArgument, ReaderError
from edl_torch.readers.storage import Storage, is_url, reaching

SUFFIXES = (".parquet", ".pq")
_OTHER_SCHEMES = ("odps://",)
_MAGIC = re.compile(r"[*?\[]")
_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
_INTEGER = re.compile(r"-?\d{1,18}", re.ASCII)

PartitionValue = int | str | None


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
    found = [_Entry(storage, entry) for entry in entries]
    names = [name for entry in found for name in entry.names]
    if len(set(names)) < len(names):
        twice, _ = Counter(names).most_common(1)[0]
        raise InvalidArgument(f"'{twice}' is listed twice: two sources would have one name")
    base = found[0].base if len(found) == 1 else _common_folder(names)
    return Found(base=base, names=tuple(name[len(base) :] for name in names))


class _Entry:
    """One path, URL, folder or glob: its files' names, and the folder that partitions hang from."""

    def __init__(self, storage: Storage, data: str) -> None:
        storage.forget_listings(data)
        file_system, path = storage.resolve(data)
        with reaching(data):
            try:
                kind = file_system.info(path)["type"]
            except FileNotFoundError:
                if not _MAGIC.search(data):
                    raise
                kind = "glob"
            self.base = data[: data.rfind("/") + 1]
            self.names = [data]
            if kind == "glob":
                self.base = data[: data.rfind("/", 0, _MAGIC.search(data).start()) + 1]  # type: ignore[union-attr]
                self.names = self._named(storage, list(_globbed(file_system, path)))
            elif kind != "file":
                self.base = data.rstrip("/") + "/"
                self.names = self._named(storage, list(_below(file_system, path)))
        if not self.names and kind == "glob":
            raise DataFormatError(f"'{data}' matches no Parquet file; check the pattern and the folder")
        if not self.names:
            raise DataFormatError(
                f"'{data}' holds no Parquet file: their names must end in {' or '.join(SUFFIXES)} and not "
                "begin with '.' or '_'; for other names pass a glob that matches them"
            )

    def _named(self, storage: Storage, paths: list[str]) -> list[str]:
        """The paths as the file system has them, put as names that begin as the user's did."""
        root = storage.resolve(self.base or ".")[1].rstrip("/") + "/"
        if any(not path.startswith(root) for path in paths):
            raise ReaderError(f"'{self.base}': its file system lists names elsewhere ({paths[0]!r})")
        return sorted({self.base + path[len(root) :] for path in paths})


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
    """Whether `data` is a Parquet file, a glob of them, a folder that holds some, or a URL of either.

    Judged by names, and quickly for what is something else, such as a folder of a million images.
    A URL without an ending in its last part is taken for a folder of Parquet files: to list it would cost a
    request, and no other reader reads remote folders.
    """
    if is_url(data):
        ending = posixpath.splitext(_MAGIC.split(data.rstrip("/"))[-1])[1].lower()
        named = data.lower().rstrip("/").endswith(SUFFIXES)
        return not data.startswith(_OTHER_SCHEMES) and (named or not ending)
    if os.path.isdir(data):
        return _holds_parquet(data)
    is_there = os.path.isfile(data) or _MAGIC.search(data) is not None
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
