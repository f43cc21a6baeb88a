"""What an error of pyodps or of the network means for a read: try again, begin anew, or give up.

It must not retry. pyodps is imported on first use.
"""

from __future__ import annotations

from enum import Enum
from functools import cache
from typing import Any

_CHANGED = frozenset({"TableModified", "SchemaModified", "DataVersionConflict", "ObjectModified"})
_EXPIRED = frozenset({"NoSuchDownload", "StatusConflict"})
_THROTTLED = frozenset({"FlowExceeded", "QPSExceeded", "SlotExceeded", "QuotaExceeded"})
_PASSING = frozenset({"CorruptedDataStream", "DataUnderReplication", "RequestTimeOut"})
_THROTTLED_STATUS = frozenset({308, 429})


class Verdict(Enum):
    """What to do about an error."""

    RETRY = "it may pass"
    THROTTLED = "it will pass: the service asks for patience"
    EXPIRED = "the download session is gone"
    CHANGED = "the table is not what it was"
    FATAL = "asking again gives the same answer"


class ShortStream(OSError):
    """A stream that ended without an error and without all its rows, or that went on beyond them."""


class StrangeAnswer(OSError):
    """An answer that is none of MaxCompute's, such as the page of a proxy that wants a login."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"the answer is not one of MaxCompute ({what}): is the endpoint right, or is there a proxy?"
        )


@cache
def trouble() -> tuple[type[Exception], ...]:
    """All that a call of pyodps may raise because of the service or of the way to it."""
    import pyarrow as pa
    import requests
    import urllib3
    from odps.errors import BaseODPSError
    from odps.tunnel.pb.errors import DecodeError

    foreign = (requests.RequestException, urllib3.exceptions.HTTPError, DecodeError, pa.ArrowInvalid)
    return (BaseODPSError, *foreign, EOFError, OSError)


def expired(download_id: str, status: str) -> Any:
    """The error for a session that the service still describes, but not as one to read from."""
    from odps.errors import ODPSError

    message = f"the download session {download_id} is {status.lower()}"
    return ODPSError(message, code="StatusConflict", status_code=409)


def judge(error: Exception) -> Verdict:
    """What one of these errors means."""
    from odps.errors import BaseODPSError
    from requests.exceptions import InvalidSchema, InvalidURL, MissingSchema

    if isinstance(error, InvalidSchema | InvalidURL | MissingSchema):
        return Verdict.FATAL
    if not isinstance(error, BaseODPSError):
        return Verdict.RETRY
    code = str(error.code or "").partition(":")[0]
    if code in _CHANGED:
        return Verdict.CHANGED
    if code in _EXPIRED:
        return Verdict.EXPIRED
    if code in _THROTTLED or error.status_code in _THROTTLED_STATUS:
        return Verdict.THROTTLED
    return Verdict.RETRY if _passes(code, error.status_code) else Verdict.FATAL


def _passes(code: str, status: Any) -> bool:
    """An error without a status is the client's own: a checksum, a cut stream, no connection."""
    return code in _PASSING or status is None or status == 408 or status >= 500
