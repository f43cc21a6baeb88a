"""Which tars are meant by a path, URL, folder, glob, range or list, and whether data are tars at all."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator

from edl_torch.errors import DataFormatError, InvalidArgument
from edl_torch.readers.shared.files import Finder, Paths
from edl_torch.readers.storage import Storage, is_url

_PACKED = (".tgz", ".tbz", ".tbz2", ".txz", ".tzst", ".tar.zst", ".tar.bz2", ".tar.xz")  # refused by name
_FINDER = Finder(suffixes=(".tar", *_PACKED))
_BESIDE = (".idx", ".json", ".yaml", ".md", ".txt")  # what else may lie in a folder of tars
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


def tars(data: Paths, storage: Storage) -> list[str]:
    """The tars that are meant, of folders and globs sorted by name. Raises DataFormatError, ReaderError."""
    entries = [data] if isinstance(data, str | os.PathLike) else data
    found = [file for entry in entries for file in _of_entry(os.fspath(entry), storage)]
    if not found:
        raise InvalidArgument("the list of tars is empty")
    twice, count = Counter(found).most_common(1)[0]
    if count > 1:
        raise DataFormatError(f"'{twice}' is listed twice: its samples would be read twice")
    return found


def _of_entry(entry: str, storage: Storage) -> list[str]:
    if os.path.lexists(entry) or not _BRACES.search(entry):
        named = [entry]
    else:
        named = list(_expanded(entry))
    if not is_url(entry):
        return [file for name in named for file in _FINDER.files(name)]
    return [file for name in named for file in _of_url(name, storage)]


def _of_url(url: str, storage: Storage) -> list[str]:
    if _FINDER.is_named(url):
        return [url]
    folder = url.rstrip("/") + "/"
    found = sorted(
        one.name
        for one in storage.listing(folder)
        if "/" not in (name := one.name[len(folder) :]) and name[:1] not in "._" and _FINDER.is_named(name)
    )
    if not found:
        raise DataFormatError(f"'{url}' has no tar in it: check the bucket and the path")
    return found


def _expanded(text: str) -> Iterator[str]:
    """Each name that braces stand for: `{000..099}`, `{a,b}`, several of them."""
    found = _BRACES.search(text)
    if found is None:
        yield text
        return
    numbers = _RANGE.fullmatch(found[1])
    if numbers:
        first, last, width = int(numbers[1]), int(numbers[2]), len(numbers[1])
        inside = [f"{number:0{width}}" for number in range(first, last + 1)]
    else:
        inside = found[1].split(",")
    for one in inside:
        yield from _expanded(text[: found.start()] + one + text[found.end() :])


def are_tars(data: str) -> bool:
    """Whether a path or URL names tars, packed or not, or is a folder of them."""
    if is_url(data):
        return _FINDER.is_named(data)
    if _BRACES.search(data) and not os.path.lexists(data):
        return _FINDER.is_named(data)
    if not os.path.isdir(data):
        return _FINDER.is_all_of(data)
    names = [name for name in os.listdir(data) if not name.startswith((".", "_"))]
    named = [name for name in names if _FINDER.is_named(name)]
    return bool(named) and all(name in named or name.lower().endswith(_BESIDE) for name in names)
