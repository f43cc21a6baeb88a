"""Which files of this machine a dataset has: of a path, a folder, a glob, or a list of these.

It lists names and must not open a file.
"""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from edl_torch.errors import DataFormatError, InvalidArgument

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
_NOT_DATA = (".", "_")  # hidden files; marks such as _SUCCESS
_INDEX = ".edl-index"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finder:
    """Finds files whose names end in one of `suffixes`, or in one and `.gz`; without any, all files.

    Names that begin with `.` or `_` do not count. A folder stands for its files, `deep` for those below too.
    """

    suffixes: tuple[str, ...] = ()
    deep: bool = False

    def files(self, data: Paths) -> list[str]:
        """Return the files: of a folder or glob sorted by name, of a list as they stand.

        Raises DataFormatError for what is not there, for a folder or glob without a file, and for a file that
        is listed twice.
        """
        entries = [data] if isinstance(data, str | os.PathLike) else data
        found = [file for entry in entries for file in self._of_entry(os.fspath(entry))]
        if not found:
            raise InvalidArgument("the list of data files is empty")
        if len(set(found)) < len(found):
            twice, _ = Counter(found).most_common(1)[0]
            raise DataFormatError(f"'{twice}' is listed twice: its records would be read twice")
        return found

    def _of_entry(self, path: str) -> list[str]:
        if os.path.isdir(path):
            found = sorted(self.below(path))
            ending = f"that ends in {', '.join(self.suffixes)} (others can be named by a glob)"
            expected = f"a name {ending if self.suffixes else 'that begins with neither . nor _'}"
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
        """Whether a path is a file that is named so, or a folder or glob of nothing else."""
        if os.path.isdir(data):
            named = [os.path.join(data, name) for name in os.listdir(data) if _counts(name)]
        else:
            named = [data] if os.path.exists(data) else glob.glob(data, recursive=True)
        return bool(named) and all(os.path.isfile(path) and self.is_named(path) for path in named)


def _counts(path: str) -> bool:
    return not os.path.basename(path).startswith(_NOT_DATA) and not path.endswith(_INDEX)
