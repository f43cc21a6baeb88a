"""The folder that the image files of a dataset lie in: whether it is one, and whether it is still there.

It must not know what the files are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from edl_torch.errors import BadRecord, DataFormatError, SourceUnavailable


@contextmanager
def within(folder: str) -> Iterator[None]:
    """Around the reading of a record from files in `folder`, the dataset's.

    Raises SourceUnavailable where a file is missing because the folder is gone or empty, as one is whose
    volume is not mounted.
    """
    try:
        yield
    except BadRecord as exc:
        if isinstance(exc.__cause__, FileNotFoundError) and _is_gone(folder):
            raise SourceUnavailable(
                f"the folder '{folder}' is gone or empty ({exc}): is its volume still mounted?"
            ) from exc
        raise


def require_folder(folder: str) -> None:
    """Raise DataFormatError for an image folder that is none, before each of its records is missed."""
    if not os.path.isdir(folder or os.curdir):
        why = "is no folder" if os.path.lexists(folder) else "does not exist"
        raise DataFormatError(f"the image folder '{folder}' {why}; check the path")


def _is_gone(folder: str) -> bool:
    try:
        with os.scandir(folder or os.curdir) as entries:
            return next(entries, None) is None
    except OSError:
        return True
