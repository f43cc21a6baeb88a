"""The data files that are open, a bounded number of them.

It must not know what is in them.
"""

from __future__ import annotations

import os
from collections import OrderedDict

from edl_torch.errors import DataFormatError
from edl_torch.readers.recordio.scan import DataFile
from edl_torch.readers.shared.index_cache import FileStamp

_LIMIT = 64  # files: a process may have some 1,000 descriptors, and several readers


class OpenFiles:
    """Opens files on first use. One that is closed here stays open for whoever still reads from it."""

    def __init__(self, limit: int = _LIMIT) -> None:
        self._limit = limit
        self._open: OrderedDict[str, DataFile] = OrderedDict()

    def get(self, path: str, size: int, mtime_ns: int) -> DataFile:
        """The file, which must be as large and as old as when it was indexed. Raises SourceChanged."""
        file = self._open.get(path)
        if file is None:
            FileStamp(path=os.path.realpath(path), size=size, mtime_ns=mtime_ns).check()
            try:
                file = DataFile(path)
            except OSError as exc:
                raise DataFormatError(f"'{path}' cannot be opened: {exc.strerror}; check the path") from exc
            self._open[path] = file
            if len(self._open) > self._limit:
                self._open.popitem(last=False)
        return file
