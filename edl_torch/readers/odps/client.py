"""pyodps, for one process and one table, with nothing shared: no connection pool, no option, no retry.

The only module that knows pyodps's insides. It must not retry, and it keeps no row. What it takes out of
pyodps's hands, and why, is in docs/decisions/0012.
"""

from __future__ import annotations

import copy
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar
from urllib.parse import urlsplit

from edl_torch.errors import ReaderUnavailable
from edl_torch.readers.odps.config import OdpsConfig, missing_keys, spec_of
from edl_torch.readers.odps.retries import StrangeAnswer, trouble

T = TypeVar("T")
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
        with self._own_options():
            return _understood(self._facts)

    def _facts(self) -> TableFacts:
        self._table.reload()
        schema = self._table.table_schema
        return TableFacts(
            tuple(column.name for column in schema.simple_columns),
            tuple(key.name for key in schema.partitions),
            str(self._table.last_data_modified_time),
        )

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
        """The checksum."""
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
