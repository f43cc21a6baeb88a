"""Whether a bare path or URL means Parquet files: judged by names, without a look into any file.

It must be quick for what is something else, such as a folder of a million images.
"""

from __future__ import annotations

import os
import posixpath
import re

from edl_torch.readers.parquet.files import SUFFIXES
from edl_torch.readers.storage import is_url

_OTHER_SCHEMES = ("odps://",)


def claims(data: str) -> bool:
    """Whether `data` is a Parquet file, a glob of them, a folder that holds some, or a URL of either.

    A URL without an ending in its last part is taken for a folder of Parquet files: to list it would cost a
    request, and no other reader reads remote folders.
    """
    if is_url(data):
        ending = posixpath.splitext(re.split(r"[*?\[]", data.rstrip("/"))[-1])[1].lower()
        named = data.lower().rstrip("/").endswith(SUFFIXES)
        return not data.startswith(_OTHER_SCHEMES) and (named or not ending)
    if os.path.isdir(data):
        return _holds_parquet(data)
    is_there = os.path.isfile(data) or re.search(r"[*?\[]", data) is not None
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
