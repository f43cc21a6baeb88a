"""Which files are meant by a path, URL, folder, glob, range or list of these; the same here and in stores."""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from edl_torch.errors import DataFormatError, InvalidArgument
from edl_torch.readers.storage import Storage, is_url

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
_NOT_DATA = (".", "_")  # hidden files; marks such as _SUCCESS
_INDEX = ".edl-index"
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_MOST_NAMES = 1_000_000  # of a range


@dataclass(frozen=True, slots=True, kw_only=True)
class Finder:
    """Finds files whose names end in one of `suffixes`, or in one and `.gz`; without any, all files.

    Names that begin with `.` or `_` do not count. A folder stands for its files, `deep` for those below too;
    in one that is known by its files, others that end in one of `beside` may lie among them. Braces stand
    for a range of numbers or for words, as in a shell: `train-{000..099}.tar`, `{train,val}.csv`.
    """

    suffixes: tuple[str, ...] = ()
    deep: bool = False
    beside: tuple[str, ...] = ()

    def files(self, data: Paths, storage: Storage | None = None) -> list[str]:
        """Return the files: of a folder or glob sorted by name, of a range or list as they stand.

        URLs are looked for in `storage`. Raises DataFormatError for what is not there, for a folder or glob
        without a file, and for a file that is listed twice; and what the storage raises.
        """
        entries = [data] if isinstance(data, str | os.PathLike) else data
        found = [
            file
            for entry in entries
            for name in expanded(os.fspath(entry))
            for file in (self._in_store(name, storage) if is_url(name) else self._of_entry(name))
        ]
        if not found:
            raise InvalidArgument("the list of data files is empty")
        if len(set(found)) < len(found):
            twice, _ = Counter(found).most_common(1)[0]
            raise DataFormatError(f"'{twice}' is listed twice: its records would be read twice")
        return found

    def _of_entry(self, path: str) -> list[str]:
        if os.path.isdir(path):
            found = sorted(self.below(path))
            expected = self._expected()
        elif os.path.lexists(path):
            return [path]
        else:
            if not glob.has_magic(path):
                raise DataFormatError(f"the data file '{path}' does not exist; check the path")
            matching = glob.glob(path, recursive=True)
            found = sorted(name for name in matching if _counts(name) and os.path.isfile(name))
            expected = "a file that matches it"
        if not found:
            raise DataFormatError(f"'{path}' has no data file: expected {expected}; check the path")
        return found

    def _expected(self) -> str:
        ending = f"that ends in {', '.join(self.suffixes)} (others can be named by a glob)"
        return f"a name {ending if self.suffixes else 'that begins with neither . nor _'}"

    def _in_store(self, url: str, storage: Storage | None) -> list[str]:
        """The files of a URL. One that is named as a file is not looked at: whoever reads it is told."""
        if storage is None:
            raise DataFormatError(f"'{url}' is a URL, and this reader reads none: copy the data to a disk")
        if glob.has_magic(url):
            before = re.split(r"[*?[]", url, maxsplit=1)[0]
            folder, expected = before[: before.rindex("/") + 1], "a name that matches it"
            names = (one.name for one in storage.listing(folder))
            found = [name for name in names if _counts(name) and _matches(name, url)]
        elif (self.suffixes and self.is_named(url)) or (not self.suffixes and storage.look(url) is not None):
            return [url]
        else:
            folder, expected = url.rstrip("/") + "/", self._expected()
            inside = (one.name[len(folder) :] for one in storage.listing(folder))
            mine = (name for name in inside if self.is_named(name) and (self.deep or "/" not in name))
            found = [folder + name for name in mine if all(map(_counts, name.split("/")))]
        if not found:
            raise DataFormatError(f"'{url}' has no data file: expected {expected}; check the path")
        return sorted(found)

    def below(self, top: str) -> Iterator[str]:
        """Yield the files in a folder, in no order. Raises DataFormatError where it cannot be listed."""

        def fail(error: OSError) -> None:
            said = f"the folder '{error.filename}' cannot be listed: {error.strerror}"
            raise DataFormatError(said) from error

        for folder, subfolders, names in os.walk(top, onerror=fail):
            subfolders[:] = sorted(filter(_counts, subfolders)) if self.deep else []
            yield from (os.path.join(folder, name) for name in names if _counts(name) and self.is_named(name))

    def is_named(self, name: str) -> bool:
        """Whether a file's name ends as it should."""
        return not self.suffixes or name.lower().removesuffix(".gz").endswith(self.suffixes)

    def is_all_of(self, data: str) -> bool:
        """Whether a path is a file that is named so, or a folder, glob or range of nothing else.

        A URL is judged by its name.
        """
        if is_url(data):
            return bool(self.suffixes) and self.is_named(data)
        if os.path.isdir(data):
            names = (name for name in os.listdir(data) if not name.lower().endswith(self.beside))
            named = [os.path.join(data, name) for name in names if _counts(name)]
        elif os.path.exists(data):
            named = [data]
        else:
            named = [path for name in expanded(data) for path in glob.glob(name, recursive=True)]
        return bool(named) and all(os.path.isfile(path) and self.is_named(path) for path in named)


def expanded(name: str) -> Iterator[str]:
    """Yield each name that braces stand for; of a file that is called so itself that one. Raises
    InvalidArgument for a range of more than a million names."""
    found = _BRACES.search(name)
    if found is None or (not is_url(name) and os.path.lexists(name)):
        yield name
        return
    numbers = _RANGE.fullmatch(found[1])
    if numbers:
        first, last, width = int(numbers[1]), int(numbers[2]), len(numbers[1])
        if not first <= last < first + _MOST_NAMES:
            raise InvalidArgument(f"'{name}': a range goes up, to a million names at most, as {{000..099}}")
        inside = [f"{number:0{width}}" for number in range(first, last + 1)]
    else:
        inside = found[1].split(",")
    for one in inside:
        yield from expanded(name[: found.start()] + one + name[found.end() :])


def _matches(name: str, pattern: str) -> bool:
    """As a glob of files does: no * or ? crosses a slash, but ** does."""
    if "**" in pattern:
        return fnmatchcase(name, pattern.replace("**/", "*").replace("**", "*"))
    ours, theirs = name.split("/"), pattern.split("/")
    return len(ours) == len(theirs) and all(map(fnmatchcase, ours, theirs))


def _counts(path: str) -> bool:
    return not os.path.basename(path).startswith(_NOT_DATA) and not path.endswith(_INDEX)
