"""What an error of pyodps or of the network means for a read, and how often a call is made again.

Retries are bounded, jittered, counted and logged. It must not know what is called; pyodps is imported on
first use.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from enum import Enum
from functools import cache
from typing import Any, TypeVar

from edl_torch.errors import InvalidArgument, ReaderError
from edl_torch.readers.odps.config import cause_without_secrets

T = TypeVar("T")
_logger = logging.getLogger(__name__)

_THROTTLE_PATIENCE = 4  # times `limit`: a full quota empties by waiting
_dice = random.SystemRandom()  # forked children must not share a seed: they would come back together
_CHANGED = frozenset({"TableModified", "SchemaModified", "DataVersionConflict", "ObjectModified"})
_EXPIRED = frozenset({"NoSuchDownload", "StatusConflict"})
_THROTTLED = frozenset({"FlowExceeded", "QPSExceeded", "SlotExceeded", "QuotaExceeded"})
_PASSING = frozenset({"CorruptedDataStream", "DataUnderReplication", "RequestTimeOut"})
_THROTTLED_STATUS = frozenset({308, 429})


class Retries:
    """The retries of a reader in one process.

    `limit` retries without progress end a call, after some `first_s · 2^limit` seconds; from then on calls
    are made once, until one succeeds: a service that is away fails a job once, not record by record.
    """

    def __init__(
        self,
        limit: int = 8,
        first_s: float = 0.2,
        most_s: float = 15.0,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        if type(limit) is not int or limit < 0:
            raise InvalidArgument(f"retries={limit!r}: expected how often a call is made again, 0 or more")
        self.limit, self.first_s, self.most_s, self.sleep = limit, first_s, most_s, sleep
        self.count = 0
        self.away = False

    def __reduce__(self) -> tuple[object, ...]:
        return Retries, (self.limit, self.first_s, self.most_s, self.sleep)

    def run(self, what: str, call: Callable[[], T], hide: Callable[[str], str] = str) -> T:
        """`call()`, again where its error may pass. Raises ReaderError, from the last error."""
        budget = Budget(self, what, hide)
        results: list[T] = []
        while (error := troubled(lambda: results.append(call()))) is not None:
            budget.spend(error)
        budget.succeed()
        return results[0]


def troubled(call: Callable[[], object]) -> Exception | None:
    """The error of `call()`, where it may be the service's. Who goes on from it is outside its handler: what
    is raised then has this error in its chain only where it says so."""
    try:
        call()
    except trouble() as exc:
        return exc
    return None


class Budget:
    """Retries that one operation has left. `what` names it in logs and errors, `hide` takes secrets out."""

    def __init__(self, retries: Retries, what: str, hide: Callable[[str], str]) -> None:
        self._retries, self._what, self._hide = retries, what, hide
        self._made = 0

    def progress(self) -> None:
        """Something was received: the next failure is a first one."""
        self._made = 0
        self._retries.away = False

    def succeed(self) -> None:
        """The operation is complete."""
        self._retries.away = False

    def spend(self, error: Exception, verdict: ErrorKind | None = None) -> None:
        """Sleep before the next try, or raise ReaderError from `error` where there is none left."""
        retries, verdict = self._retries, verdict or judge(error)
        allowed = 0 if retries.away else retries.limit
        if verdict is ErrorKind.THROTTLED:
            allowed *= _THROTTLE_PATIENCE
        passing = verdict in (ErrorKind.RETRY, ErrorKind.THROTTLED, ErrorKind.EXPIRED)
        if not passing or self._made >= allowed:
            retries.away = retries.away or passing
            raise self._failure(error) from cause_without_secrets(error, self._hide)
        pause = min(retries.most_s, retries.first_s * 2**self._made) * _dice.uniform(0.5, 1.0)
        self._made += 1
        retries.count += 1
        _logger.warning(
            "%s: retry %d of %d in %.1f s: %s", self._what, self._made, allowed, pause, self._text(error)
        )
        retries.sleep(pause)

    def _failure(self, error: Exception) -> ReaderError:
        tried = f" after {self._made} retries" if self._made else ""
        return ReaderError(f"{self._what} failed{tried}: {self._text(error)}")

    def _text(self, error: Exception) -> str:
        return self._hide(f"{type(error).__name__}: {' '.join(str(error).split())}")


class ErrorKind(Enum):
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


def judge(error: Exception) -> ErrorKind:
    """What one of these errors means."""
    from odps.errors import BaseODPSError
    from requests.exceptions import InvalidSchema, InvalidURL, MissingSchema

    if isinstance(error, InvalidSchema | InvalidURL | MissingSchema):
        return ErrorKind.FATAL
    if not isinstance(error, BaseODPSError):
        return ErrorKind.RETRY
    code = str(error.code or "").partition(":")[0]
    if code in _CHANGED:
        return ErrorKind.CHANGED
    if code in _EXPIRED:
        return ErrorKind.EXPIRED
    if code in _THROTTLED or error.status_code in _THROTTLED_STATUS:
        return ErrorKind.THROTTLED
    return ErrorKind.RETRY if _passes(code, error.status_code) else ErrorKind.FATAL


def _passes(code: str, status: Any) -> bool:
    """An error without a status is the client's own: a checksum, a cut stream, no connection."""
    return code in _PASSING or status is None or status == 408 or status >= 500
