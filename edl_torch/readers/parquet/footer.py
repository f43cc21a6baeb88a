"""One Parquet file, opened: its footer, or an error that says what is wrong with the file.

Format: https://parquet.apache.org/docs/file-format/. It must not know of other files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edl_torch.errors import DataFormatError, ReaderError, ReaderUnavailable
from edl_torch.readers.storage import Opened, Storage, storage_error

if TYPE_CHECKING:
    import pyarrow.parquet as pq

_MAGIC = b"PAR1"
_ENCRYPTED = b"PARE"


def require_pyarrow() -> Any:
    """`pyarrow`, or ReaderUnavailable that says how to get it."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as exc:
        raise ReaderUnavailable("reader 'parquet' needs pyarrow: pip install 'edl-torch[parquet]'") from exc
    return pyarrow


class ParquetFile:
    """An open file and its footer; to be used in the process that opened it, and closed."""

    def __init__(self, storage: Storage, name: str) -> None:
        self.name = name
        self._opened = storage.open(name)
        try:
            self._file = _parse(self._opened, name)
        except ReaderError:
            self._opened.close()
            raise

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._opened.size

    @property
    def remote(self) -> bool:
        """Whether reading it may fail on the way."""
        return self._opened.remote

    @property
    def schema(self) -> Any:
        """The Arrow schema of all columns."""
        return self._file.schema_arrow

    def rows_of_groups(self) -> list[int]:
        """The number of rows in each row group."""
        footer = self._file.metadata
        return [footer.row_group(group).num_rows for group in range(footer.num_row_groups)]

    def read_group(self, group: int, columns: list[str], *, use_threads: bool) -> Any:
        """A row group as a table with these columns, and with columns nested in them."""
        return self._file.read_row_group(group, columns=columns, use_threads=use_threads)

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()
        self._opened.close()


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
