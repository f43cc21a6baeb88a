"""Which files are meant by a path, URL, folder, glob, range, list or manifest; the same here and in stores.

| given | files, in this order |
| --- | --- |
| a file, or the URL of one | it, whatever its name is |
| a folder | its files by name, those below it too where a reader reads `deep` |
| a glob | what matches, by name; of a folder that does, its files |
| `t-{000..099}.tar`, `{train,val}.csv` | as they stand, as a shell has them |
| `@shards.txt` | what its lines name, as they stand: paths below the manifest's folder, URLs, globs |
| a list | what each entry means, as they stand |

Names that begin with `.` or `_` are not data (hidden files, `_SUCCESS`), but folders `_key=value` are; a
glob goes through those folders that it names. What is there by a name that looks like a glob or a range is
meant by it. Links are followed, loops of them are not. It must not know what is in a file.
"""

from __future__ import annotations

import errno
import glob
import os
import re
import stat
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from urllib.parse import urlsplit

from edl_torch.errors import DataFormatError, InvalidArgument
from edl_torch.readers.shared.files import readable
from edl_torch.readers.shared.mapped import StringTable
from edl_torch.readers.storage import Storage, is_elsewhere, is_loop, is_url, is_web, local_path
from edl_torch.readers.storage.names import spelled

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
_NOT_DATA = (".", "_")
_INDEX = ".edl-index"
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_MOST_NAMES = 1_000_000  # of a range
_MAGIC = re.compile(r"[*?[]")
_MANIFEST = "@"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finder:
    """Finds files, in folders those whose names end in one of `suffixes`, or in one and `.gz`; without any,
    all. In a folder that is known by its files, others that end in one of `beside` may lie among them."""

    suffixes: tuple[str, ...] = ()
    deep: bool = False
    beside: tuple[str, ...] = ()

    def files(self, data: Paths, storage: Storage | None = None) -> list[str]:
        """Return the files; URLs are looked for in `storage`, without one by the drivers' own means.

        Raises DataFormatError for what is not there, for a folder or glob without a file, and for a file that
        is listed twice; InvalidArgument for no file at all; and what the storage raises.
        """
        store = Storage() if storage is None else storage
        entries = [data] if isinstance(data, str | os.PathLike) else data
        found: list[str] = []
        for name in (name for entry in entries for name in expanded(os.fspath(entry), store)):
            found += self._in_store(name, store) if is_elsewhere(name) else self._here(name)
        if not found:
            raise InvalidArgument("the list of data files is empty")
        where = list(map(_place_of, found))
        if len(set(where)) < len(where):
            twice, _ = Counter(where).most_common(1)[0]
            name, other = [name for name, place in zip(found, where, strict=True) if place == twice][:2]
            also = "" if name == other else f", as '{other}' too, which is the same file"
            raise DataFormatError(
                f"'{name}' is listed twice{also}: its records would be read twice; name it once"
            )
        return found

    def _here(self, name: str) -> list[str]:
        scheme, path = name[: -len(local_path(name))], local_path(name)
        if os.path.isdir(path):
            found = list(self.below(path))
        elif os.path.lexists(path):
            refuse_no_file(path)
            return [name]
        elif not is_glob(path):
            raise DataFormatError(f"the data file '{name}' does not exist; check the path")
        else:
            found = list({file for one in _globbed(path) for file in self._matched(one)})
        return self._checked([scheme + file for file in found], name)

    def _matched(self, path: str) -> Iterator[str]:
        """What a glob means by a name that matches it."""
        if not os.path.isdir(path):
            if _counts(path):
                refuse_no_file(path)
                yield path
        elif self.deep:
            yield from self.below(path)

    def _in_store(self, url: str, storage: Storage) -> list[str]:
        """The files of a URL. One that is named as a file is not looked at: whoever reads it is told. A web
        server has a page for a folder, which is no file."""
        if self.suffixes and self.is_named(url) and not is_glob(url):
            return [url]
        may_be_file = not self.suffixes or not is_web(url) or os.path.splitext(urlsplit(url).path)[1]
        if may_be_file and storage.look(url) is not None:
            return [url]
        folder = url.rstrip("/") + "/"
        listed = base_of(url) if is_glob(url) else folder
        names, below = self._listed(listed, storage), folder[len(listed) :]
        if not names and not is_glob(url):
            raise DataFormatError(
                f"'{url}' does not exist: no object has that name, and none lies below it; check the path "
                "and the bucket"
            )
        found = [name for name in names if name.startswith(below) and self._is_data(name[len(below) :])]
        if is_glob(url) and not any(name.startswith(below) for name in names):
            found = [name for name in names if self._is_matched(name, url[len(listed) :])]
        return self._checked([listed + name for name in found], url)

    @staticmethod
    def _listed(folder: str, storage: Storage) -> StringTable | tuple[str, ...]:
        """Names below a folder of a store, which are looked at no more: their listing says how they are."""
        from edl_torch.readers.storage.listing import Listing, NothingListed

        try:
            listing = Listing.below(storage, folder)
        except NothingListed:
            return ()
        storage.remember(listing)
        return listing.names

    def _is_matched(self, name: str, pattern: str) -> bool:
        """Whether a file matches a glob, or lies in a folder that does."""
        if _counts(name) and _matches(name, pattern):
            return True
        if not self.deep:
            return False
        folder = pattern.rstrip("/")
        ends = (at for at, letter in enumerate(name) if letter == "/")
        return any(self._is_data(name[at + 1 :]) and _matches(name[:at], folder) for at in ends)

    def _is_data(self, name: str) -> bool:
        """Whether a file in a folder, or below it, is meant by that."""
        *folders, file = name.split("/")
        if folders and not self.deep:
            return False
        return bool(file) and self.is_named(file) and _counts(file) and all(map(_counts_as_folder, folders))

    def _checked(self, found: list[str], data: str) -> list[str]:
        if not found:
            ending = f"that ends in {', '.join(self.suffixes)} (others can be named by a glob)"
            named = f"a name {ending if self.suffixes else 'that begins with neither . nor _'}"
            expected = "a file that matches it" if is_glob(data) else named
            raise DataFormatError(f"'{data}' has no data file: expected {expected}; check the path")
        return sorted(found)

    def below(self, top: str) -> Iterator[str]:
        """Yield the files in a folder of this machine, in no order. Raises DataFormatError."""
        base = os.path.join(top, "")
        yield from (base + name for name in names_below(top, deep=self.deep) if self._is_data(name))

    def is_named(self, name: str) -> bool:
        """Whether a file's name ends as it should."""
        return not self.suffixes or name.lower().removesuffix(".gz").endswith(self.suffixes)

    def is_all_of(self, data: str) -> bool:
        """Whether a path is a file that is named so, or a folder, glob or range of nothing else.

        A URL is judged by its name.
        """
        if is_elsewhere(data):
            return bool(self.suffixes) and self.is_named(data)
        path = local_path(data)
        if os.path.isdir(path):
            names = (name for name in os.listdir(path) if not name.lower().endswith(self.beside))
            named = [os.path.join(path, name) for name in names if _counts(name)]
        elif os.path.exists(path):
            named = [path]
        else:
            named = [one for name in expanded(path) for one in _globbed(name)]
        return bool(named) and all(os.path.isfile(path) and self.is_named(path) for path in named)


def names_below(top: str, *, deep: bool = True, hidden: tuple[str, ...] = _NOT_DATA) -> Iterator[str]:
    """Yield the names of files and, with a slash at their end, of folders below a folder of this machine.

    What begins as `hidden` says is left out, with all below it. Raises DataFormatError where a folder cannot
    be listed.
    """

    def fail(error: OSError) -> None:
        said = f"the folder '{error.filename}' cannot be listed: {error.strerror}; check the path"
        raise DataFormatError(said) from error

    for folder, subfolders, files in os.walk(top, onerror=fail, followlinks=True):
        inside = os.path.relpath(folder, top) + "/" if folder != top else ""
        mine = (name for name in subfolders if _counts_as_folder(name, hidden))
        subfolders[:] = sorted(name for name in mine if not is_loop(folder, name))
        yield from (f"{inside}{name}/" for name in subfolders)
        yield from (inside + name for name in files if not name.startswith(hidden))
        if not deep:
            return


def refuse_no_file(path: str) -> None:
    """Raise DataFormatError for a link that leads to no file, and for a pipe, a socket or a device."""
    try:
        mode = os.stat(path).st_mode
    except OSError as exc:
        if not os.path.islink(path):
            raise DataFormatError(f"'{path}' cannot be looked at: {exc.strerror}; check the path") from exc
        why = "leads back to itself" if exc.errno == errno.ELOOP else f"leads nowhere ({exc.strerror})"
        raise DataFormatError(
            f"'{path}' is a link to '{os.readlink(path)}', which {why}: restore the file, or remove the link"
        ) from exc
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise DataFormatError(
            f"'{path}' is no regular file, but a pipe, a socket or a device: copy its data to a file"
        )


def _place_of(name: str) -> Hashable:
    """What is the same for all names of one file: paths, links and hard links; spellings of one URL."""
    if is_elsewhere(name):
        return spelled(name)
    path = local_path(name)
    try:
        found = os.stat(path)
    except OSError:  # whoever reads it is told
        return os.path.abspath(path)
    return found.st_dev, found.st_ino


def expanded(entry: str, storage: Storage | None = None) -> Iterator[str]:
    """Yield each name that braces or a manifest stand for; of a file that is called so itself that one.

    Raises InvalidArgument for a range of more than a million names, DataFormatError for a manifest that
    cannot be read.
    """
    if not entry.startswith(_MANIFEST) or storage is None or os.path.lexists(entry):
        yield from _braced(entry, storage)
        return
    for line in _lines_of(entry[1:], storage):
        for name in _braced(line, storage):
            if not (is_url(name) or is_glob(name) or os.path.lexists(name)):
                raise DataFormatError(
                    f"the manifest '{entry[1:]}' names '{name}', which does not exist; check the path "
                    f"(@ is for a file that lists files: without it '{entry[1:]}' itself is read)"
                )
            yield name


def _braced(name: str, storage: Storage | None) -> Iterator[str]:
    """Yield what the braces of a name stand for, or the name where it is there as it stands."""
    if "{" not in name:
        is_there = True
    elif is_elsewhere(name):
        is_there = storage is not None and storage.look(name) is not None
    else:
        is_there = os.path.lexists(local_path(name))
    yield from [name] if is_there else _all_of(name)


def _all_of(name: str) -> Iterator[str]:
    found = _BRACES.search(name)
    if found is None:
        yield name
        return
    for one in _between(found[1], name):
        yield from _all_of(name[: found.start()] + one + name[found.end() :])


def first_of(data: str, storage: Storage) -> str:
    """The first name in a manifest; else the data themselves."""
    if not data.startswith(_MANIFEST) or os.path.lexists(data):
        return data
    with storage.apart() as apart:
        found = next(expanded(data, apart), None)
    if found is None:
        raise DataFormatError(f"the manifest '{data[1:]}' names no file")
    return found


def _between(braces: str, entry: str) -> list[str]:
    numbers = _RANGE.fullmatch(braces)
    if numbers is None:
        return braces.split(",")
    first, last, width = int(numbers[1]), int(numbers[2]), len(numbers[1])
    if not first <= last < first + _MOST_NAMES:
        raise InvalidArgument(f"'{entry}': a range goes up, to a million names at most, as {{000..099}}")
    return [f"{number:0{width}}" for number in range(first, last + 1)]


def _lines_of(manifest: str, storage: Storage) -> Iterator[str]:
    """Yield what a manifest names: UTF-8, a name a line; empty lines and those that begin with # are none."""
    one = storage.look(manifest)
    if one is None:
        raise DataFormatError(f"the manifest '{manifest}' does not exist; check the path")
    with readable(f"the manifest '{manifest}'"):
        text = storage.read(one).decode("utf-8-sig")
    folder = manifest[: manifest.rfind("/") + 1]
    for line in map(str.strip, text.split("\n")):
        if line and not line.startswith("#"):
            yield line if is_url(line) or line.startswith("/") else folder + line


def is_glob(name: str) -> bool:
    return _MAGIC.search(name) is not None


def base_of(pattern: str) -> str:
    """The folder that a glob looks through, with the slash at its end; '' for the current one."""
    magic = _MAGIC.search(pattern)
    return pattern[: pattern.rfind("/", 0, magic.start() if magic else None) + 1]


def _globbed(pattern: str) -> list[str]:
    """What there is of this machine by a name, or by a glob."""
    if not is_glob(pattern):
        return [pattern] * os.path.lexists(pattern)
    cut = len(base_of(pattern))
    return [path for path in glob.glob(pattern, recursive=True) if _matches(path[cut:], pattern[cut:])]


def _matches(name: str, pattern: str) -> bool:
    """As a glob of files does: `**` is any number of folders, nothing else crosses a slash, and what is
    hidden, or begins with _, is matched by what begins so itself."""
    return _match(name.split("/"), pattern.split("/"))


def _match(ours: list[str], theirs: list[str]) -> bool:
    for place, part in enumerate(theirs):
        if part == "**":
            rest, most = theirs[place + 1 :], len(ours)
            visible = next((at for at in range(place, most) if not _counts_as_folder(ours[at])), most)
            return any(_match(ours[at:], rest) for at in range(place, visible + 1))
        if place == len(ours) or not fnmatchcase(ours[place], part):
            return False
        if part[:1] != ours[place][:1] and not _counts_as_folder(ours[place]):
            return False
    return len(ours) == len(theirs)


def _counts(path: str) -> bool:
    return not os.path.basename(path).startswith(_NOT_DATA) and not path.endswith(_INDEX)


def _counts_as_folder(name: str, hidden: tuple[str, ...] = _NOT_DATA) -> bool:
    return not name.startswith(hidden) or (name.startswith("_") and "=" in name)
