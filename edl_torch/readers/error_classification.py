"""Classification of read errors: a bad record, or a source that cannot be read at this moment.

Only bad records may be put in quarantine: while a network is down its records are as good as ever.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator

from edl_torch.errors import (
    BadRecord,
    DataFormatError,
    EdlError,
    ReaderError,
    ReaderUnavailable,
    SourceChanged,
    SourceUnavailable,
)

# The network, a server behind a file system, a device, or this machine's own limits. Not EPIPE: a decoder in
# a process of its own hangs up on a record that it cannot read.
_OUTAGES = frozenset(
    getattr(errno, name)
    for name in (
        *("ECONNABORTED", "ECONNREFUSED", "ECONNRESET", "EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN"),
        *("ENETRESET", "ENETUNREACH", "ENOTCONN", "ETIMEDOUT", "ESTALE", "EREMOTEIO", "EIO"),
        *("EMFILE", "ENFILE", "ENOBUFS", "ENOMEM"),
    )
    if hasattr(errno, name)
)
_LONGEST_CHAIN = 16


def name_record(error: Exception, name: str, index: int) -> ReaderError:
    """Return the error with the record's name in front: a BadRecord where the record is bad, else another."""
    own = isinstance(error, BadRecord | ReaderUnavailable | SourceChanged)
    said = f"record {index} of {name!r}: {error if own else f'{type(error).__name__}: {error}'}"
    named: ReaderError
    if not is_source_error(error):
        named = BadRecord(said)
    elif isinstance(error, ReaderUnavailable | SourceChanged):
        named = type(error)(said)
    else:
        named = SourceUnavailable(f"{said}. The record is not to blame: its source cannot be read now")
    named.__cause__ = error
    return named


def is_source_error(error: Exception) -> bool:
    """Return whether any other record would have failed as well."""
    if isinstance(error, EdlError) and not isinstance(error, BadRecord | DataFormatError):
        return True
    # Who raises BadRecord has looked at it: then only the system's own word for an outage counts.
    judged = isinstance(error, BadRecord)
    return any(_is_outage(link) or (not judged and _is_cut(link)) for link in _chain(error))


def _is_outage(error: BaseException) -> bool:
    return isinstance(error, socket.gaierror) or (isinstance(error, OSError) and error.errno in _OUTAGES)


def _is_cut(error: BaseException) -> bool:
    return isinstance(error, ConnectionError | TimeoutError) and not isinstance(error, BrokenPipeError)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what led to it: drivers wrap the system's errors in some of their own."""
    for _ in range(_LONGEST_CHAIN):
        if error is None:
            return
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
