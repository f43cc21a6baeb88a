"""File systems that fsspec knows, and what their errors mean.

File systems are asked for anew at each use: fsspec keeps one per process,
and what a forked child inherits of a connection or an event loop is dead.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from edl_torch.errors import EdlError, ReaderError, ReaderUnavailable
from edl_torch.readers.base import required
from edl_torch.readers.storage.names import is_url, refuse_secrets

_REFUSED = re.compile(
    r"credential|forbidden|unauthori[sz]ed|access ?denied|(?:expired|invalid|security) ?token", re.IGNORECASE
)


class FileSystems:
    """Finds the file system of a URL; `options` are fsspec's storage options (endpoint, credentials)."""

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self._options = dict(options or {})

    def resolve(self, url: str) -> tuple[Any, str]:
        """This process' file system and the path in it. Raises ReaderError, InvalidArgument."""
        refuse_secrets(url)
        need = f"'{url}' needs fsspec: pip install 'edl-torch[parquet]' (or fsspec)"
        core = required("fsspec.core", need)
        with reaching(url):
            file_system, path = core.url_to_fs(url, **(self._options if is_url(url) else {}))
        return file_system, str(path)

    def __repr__(self) -> str:
        return f"<FileSystems options={sorted(self._options)}>"  # the names alone: values may be secret


@contextmanager
def reaching(url: str) -> Iterator[None]:
    """Turn what a file system raises into one error that names `url` and says what to do."""
    try:
        yield
    except EdlError:
        raise
    except Exception as exc:
        raise storage_error(exc, url) from exc


def storage_error(exc: Exception, url: str) -> ReaderError:
    """What a storage driver's error means. Each driver has a tree of its own, so names decide as well."""
    said = f"{type(exc).__name__}: {exc}"
    if isinstance(exc, FileNotFoundError | NotADirectoryError):
        return ReaderError(f"'{url}' does not exist; check the path{' and the bucket' * is_url(url)} ({exc})")
    if isinstance(exc, ImportError):
        return ReaderUnavailable(f"'{url}' needs a package that is not installed: {exc}")
    if isinstance(exc, PermissionError) or _REFUSED.search(said):
        where = "storage_options={…} or the environment" if is_url(url) else "the file's permissions"
        return ReaderError(f"access to '{url}' is refused ({said}); check the credentials in {where}")
    if isinstance(exc, ValueError) and "rotocol" in str(exc):
        return ReaderError(f"'{url}': fsspec knows no such protocol; check the part before '://' ({exc})")
    if isinstance(exc, TypeError):
        return ReaderError(f"'{url}': its file system does not take these storage_options ({exc})")
    return ReaderError(
        f"'{url}' cannot be reached ({said}); check the network, the endpoint and storage_options"
    )
