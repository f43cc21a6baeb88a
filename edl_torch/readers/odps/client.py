"""pyodps, for one process and one table, with nothing shared: calls, what their errors mean, and retries.

The only module that knows pyodps's insides: it takes connections, options and retries out of pyodps's hands;
docs/decisions/0012 says why. It keeps no row. Retries are bounded, jittered, counted and logged. pyodps is
imported on first use.
"""

from __future__ import annotations

import copy
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any, TypeVar
from urllib.parse import urlsplit

from edl_torch.errors import InvalidArgument, ReaderError, ReaderUnavailable
from edl_torch.readers.odps.config import OdpsConfig, cause_without_secrets, missing_keys, spec_of
from edl_torch.system.backoff import backoff

T = TypeVar("T")
_logger = logging.getLogger(__name__)

_THROTTLE_PATIENCE = 4  # times `limit`: a full quota empties by waiting
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
        while True:
            try:
                result = call()
            except trouble() as exc:
                error = exc
            else:
                budget.succeed()
                return result
            # Outside of the handler: what is raised has the error in its chain only where it says so.
            budget.spend(error)


class Budget:
    """Retries that one operation has left. `what` names it in logs and errors, `hide` takes secrets out."""

    def __init__(self, retries: Retries, what: str, hide: Callable[[str], str]) -> None:
        self._retries, self._what, self._hide = retries, what, hide
        self._begin()

    def _begin(self) -> None:
        self._made, self._pauses = 0, backoff(self._retries.first_s, self._retries.most_s)

    def progress(self) -> None:
        """Something was received: the next failure is a first one."""
        if self._made:
            self._begin()
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
            tried = f" after {self._made} retries" if self._made else ""
            failure = ReaderError(f"{self._what} failed{tried}: {self._text(error)}")
            raise failure from cause_without_secrets(error, self._hide)
        self._made += 1
        pause = next(self._pauses)
        retries.count += 1
        _logger.warning(
            "%s: retry %d of %d in %.1f s: %s", self._what, self._made, allowed, pause, self._text(error)
        )
        retries.sleep(pause)

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
    # An error without a status is the client's own: a checksum, a cut stream, no connection.
    status = error.status_code
    passes = code in _PASSING or status is None or status == 408 or status >= 500
    return ErrorKind.RETRY if passes else ErrorKind.FATAL


_ADDRESS = re.compile(r"[\w.-]+(?::\d+)?|\[[0-9A-Fa-f:.]+\](?::\d+)?")


@dataclass(frozen=True, slots=True)
class TableFacts:
    """What the service says about a table."""

    columns: tuple[str, ...]
    partition_keys: tuple[str, ...]
    modified: str


class OdpsClient:
    """Calls of the service and of its tunnel. Made where it is used: never across a fork."""

    def __init__(self, config: OdpsConfig) -> None:
        from odps.config import Config, get_global_options

        self.pid = os.getpid()
        self._config = config
        self._rest_class = _rest_class(config.timeout_s)
        self._options = Config(copy.deepcopy(get_global_options()._config))
        # Times in UTC on every machine; whole streams; retries are counted in one place, which is not pyodps.
        self._options.local_timezone = False
        self._options.table_read_limit = None
        self._options.retry_times = 0
        self._options.retry_delay = 0
        with self._own_options():
            self._odps = self._connect()
            self._table = self._odps.get_table(config.table, project=config.project, schema=config.schema)
            self._tunnel = _tunnel_class()(self._odps, self._rest_class, config)

    def facts(self) -> TableFacts:
        """Columns, partition keys and when the table was last changed."""

        def ask() -> TableFacts:
            self._table.reload()
            schema = self._table.table_schema
            return TableFacts(
                tuple(column.name for column in schema.simple_columns),
                tuple(key.name for key in schema.partitions),
                str(self._table.last_data_modified_time),
            )

        with self._own_options():
            return _understood(ask)

    def partitions(self, prefix: str) -> list[tuple[str, str]]:
        """`(ds=x,hh=y, when it was last changed)` of the partitions whose first keys are `prefix`."""
        with self._own_options():
            return _understood(
                lambda: [
                    (spec_of(partition.partition_spec.kv.items()), str(partition.last_data_modified_time))
                    for partition in self._table.iterate_partitions(prefix or None)
                ]
            )

    def download(self, partition: str, download_id: str | None = None) -> Any:
        """pyodps's download session: a new one, or that of an id."""
        with self._own_options():
            return _understood(lambda: self._tunnel.download(partition, download_id))

    def read(
        self,
        download: Any,
        start: int,
        count: int,
        columns: Sequence[str] | None,
        take: Callable[[Any], object],
    ) -> None:
        """Give the Arrow batches of a row range to `take`, each one after its checksums were right."""
        names = None if columns is None else list(columns)
        with self._own_options():
            reader = download.open_arrow_reader(start, count, columns=names)
            _speed_up(reader)
            try:
                for batch in reader:
                    take(batch)
            finally:
                reader.close()

    def empty(self, download: Any, columns: Sequence[str] | None) -> Any:
        """An Arrow table without rows."""
        from odps.tunnel.io.types import odps_schema_to_arrow_schema

        schema = odps_schema_to_arrow_schema(download.schema)
        names = schema.names if columns is None else [name for name in columns if name in schema.names]
        return schema.empty_table().select(names)

    def _connect(self) -> Any:
        from odps import ODPS

        config, account = self._config, _account(self._config)
        try:
            return ODPS(
                account=account,
                project=config.project,
                endpoint=config.endpoint,
                logview_host="http://127.0.0.1",  # else it asks for one, and nobody wants it
                overwrite_global=False,
                rest_client_cls=self._rest_class,
                rest_client_kwargs={"retry_enabled": False},
            )
        except TypeError as exc:
            raise missing_keys() from exc

    @contextmanager
    def _own_options(self) -> Iterator[None]:
        """pyodps's options are of the calling context: the user's own come back afterwards."""
        from odps.config import get_global_options, set_global_options

        users = get_global_options()
        set_global_options(self._options)
        try:
            yield
        finally:
            set_global_options(users)

    def __repr__(self) -> str:
        return f"<OdpsClient {self._config.name} pid={self.pid}>"


def _understood(call: Callable[[], T]) -> T:
    """`call()`; what pyodps raises while it parses an answer of somebody else becomes StrangeAnswer."""
    try:
        return call()
    except (ValueError, LookupError, TypeError, AttributeError, SyntaxError, RecursionError) as exc:
        if isinstance(exc, trouble()):
            raise
        strange = type(exc).__name__
    raise StrangeAnswer(
        strange
    )  # not above: the parser's error quotes the answer, and stays out of the chain


def require_packages() -> None:
    """Raise ReaderUnavailable where pyodps or pyarrow is missing."""
    try:
        import odps  # noqa: F401
        import pyarrow  # noqa: F401
    except ImportError as exc:
        raise ReaderUnavailable(
            f"reader 'odps' needs pyodps and pyarrow ({exc}): pip install 'edl-torch[odps]'"
        ) from exc


def _speed_up(reader: Any) -> None:
    """Checksums by google-crc32c, where it is there: pyodps's take longer than all the rest of reading."""
    try:
        import google_crc32c  # noqa: F401
    except ImportError:
        return
    stream = reader._reader
    stream._crc, stream._crccrc = Crc32c(), Crc32c()


class Crc32c:
    """CRC-32C of all bytes since the last `reset`; what pyodps asks of its `Checksum`."""

    def __init__(self) -> None:
        from google_crc32c import extend

        self._extend = extend
        self._value = 0

    def update(self, data: bytes) -> None:
        """Some more bytes."""
        self._value = self._extend(self._value, data)

    def getvalue(self) -> int:
        return self._value

    def reset(self) -> None:
        """Begin anew."""
        self._value = 0


def _account(config: OdpsConfig) -> Any:
    """None leaves it to pyodps, which knows token files and bearer tokens."""
    from odps.accounts import CloudAccount, StsAccount

    credentials = config.credentials()
    if credentials is None:
        return None
    key, token = credentials.access_key.reveal(), credentials.sts_token.reveal()
    if token is None:
        return CloudAccount(credentials.access_id, key)
    return StsAccount(credentials.access_id, key, token, expired_hours=None)


def _rest_class(timeout_s: float) -> type[Any]:
    """A class a client: pyodps keeps its HTTP sessions, and their sockets, at the class, by thread."""
    from odps.rest import RestClient

    class Rest(RestClient):  # type: ignore[misc]
        _session_local = threading.local()
        _endpoints_without_v4_sign: set[str] = set()  # noqa: RUF012
        _endpoint_sign_lock = threading.RLock()

        def request(self, url: str, method: str, stream: bool = False, **kwargs: Any) -> Any:
            kwargs["timeout"] = kwargs.get("timeout") or timeout_s
            return super().request(url, method, stream=stream, **kwargs)

    return Rest


@cache
def _download_class() -> type[Any]:
    """A download session that leaves retries to others."""
    from odps.tunnel.retry import NoRetryPolicy, TunnelRetryHandler
    from odps.tunnel.tabletunnel import TableDownloadSession

    class Once(TunnelRetryHandler):  # type: ignore[misc]
        def get_retry_policy(self, status_code: Any) -> Any:
            return NoRetryPolicy()

    class Download(TableDownloadSession):  # type: ignore[misc]
        __slots__ = ()

        @property
        def retry_handler(self) -> Any:
            return Once()

    return Download


@cache
def _tunnel_class() -> type[Any]:
    """A tunnel whose connections are those of the class that it is given."""
    from odps import options
    from odps.tunnel import TableTunnel

    class Tunnel(TableTunnel):  # type: ignore[misc]
        def __init__(self, odps: Any, rest_class: type[Any], config: OdpsConfig) -> None:
            super().__init__(odps, endpoint=config.tunnel_endpoint, quota_name=config.quota_name)
            self._own = (odps, rest_class, config)
            self._rest: Any = None

        @property
        def tunnel_rest(self) -> Any:
            if self._rest is None:
                odps, rest_class, config = self._own
                self._rest = rest_class(
                    odps.account,
                    config.tunnel_endpoint or self._discover(),
                    odps.project,
                    namespace=odps.namespace,
                    proxy=options.data_proxy,
                    retry_enabled=False,
                    tag="TUNNEL",
                )
            return self._rest

        def _discover(self) -> str:
            """Asked for anew by each client: pyodps would remember an address that moved."""
            odps, _, config = self._own
            params = {"quotaName": config.quota_name} if config.quota_name else {}
            url = f"{odps.get_project(config.project).resource()}/tunnel"
            address = odps.rest.get(url, action="service", params=params).text.strip()
            if not _ADDRESS.fullmatch(address):
                raise StrangeAnswer("no address of a tunnel")
            return f"{urlsplit(odps.endpoint).scheme}://{address}"

        def download(self, partition: str, download_id: str | None) -> Any:
            config: OdpsConfig = self._own[2]
            return _download_class()(
                self.tunnel_rest,
                self._get_tunnel_table(config.table, config.schema),
                partition or None,
                download_id=download_id,
                timeout=config.timeout_s,
                quota_name=config.quota_name,
            )

    return Tunnel
