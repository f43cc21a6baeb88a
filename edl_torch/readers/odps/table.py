"""A MaxCompute table as numbered rows by partition: download sessions, and row ranges that are whole.

Each process has a client of its own; what travels between them are session ids. It must not know records,
batches or shards.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edl_torch.errors import InvalidArgument, ReaderError, SourceChanged
from edl_torch.readers.odps.client import (
    Budget,
    ErrorKind,
    OdpsClient,
    Retries,
    ShortStream,
    expired,
    judge,
    require_packages,
    trouble,
)
from edl_torch.readers.odps.config import OdpsConfig, PartitionPattern, cause_without_secrets

if TYPE_CHECKING:
    import pyarrow as pa

_PARALLEL_SESSIONS = 8


@dataclass(frozen=True, slots=True)
class DownloadSession:
    """A session of the service: a snapshot of a partition's rows, readable for a day by its id."""

    id: str
    count: int
    modified: str  # when the partition was last changed, as far as was known when the session was made


class OdpsTable:
    """Row ranges of the partitions that `patterns` mean; of the table itself where it has none."""

    def __init__(
        self,
        config: OdpsConfig,
        patterns: Sequence[PartitionPattern] = (),
        columns: Sequence[str] | None = None,
        retries: Retries | None = None,
    ) -> None:
        require_packages()
        self.config = config
        self.patterns = tuple(patterns)
        self.columns = _names(columns)
        self.retries = retries or Retries()
        self._partitions: dict[str, str] | None = None  # specification to when it was last changed
        self._downloads: dict[str, DownloadSession] = {}
        self._columns_known = columns is None
        self._forget_process()

    def _forget_process(self) -> None:
        self._lock = threading.RLock()
        self._client: OdpsClient | None = None
        self._sessions: dict[str, Any] = {}  # pyodps's objects for self._downloads, of this process
        self._pid = os.getpid()  # last: a thread that sees it must find nothing of the parent's

    def __getstate__(self) -> dict[str, Any]:
        own = {"_lock", "_pid", "_client", "_sessions"}
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget_process()

    def with_columns(self, columns: Sequence[str]) -> OdpsTable:
        """The same rows through the same sessions, in other columns."""
        other = copy.copy(self)
        other.columns, other._columns_known = _names(columns), False
        return other

    def name(self, partition: str) -> str:
        """`project.table/ds=x`."""
        return f"{self.config.name}/{partition}" if partition else self.config.name

    def partition_of(self, name: str) -> str:
        """The partition of a name. Raises ReaderError for one that this table is not meant to read."""
        partition = name.removeprefix(self.config.name).removeprefix("/")
        known = partition in self._downloads or not self.patterns
        if self.name(partition) != name or not (
            known or any(pattern.matches(partition) for pattern in self.patterns if partition)
        ):
            own = self.name(", ".join(pattern.text for pattern in self.patterns))
            raise ReaderError(
                f"this reader reads {own}, not {name!r}: make it with the same table and partitions in every "
                "trainer as where the dataset was registered"
            )
        return partition

    def plan(self) -> dict[str, int]:
        """Rows by partition, in the order of their values. Makes what sessions are not there yet."""
        partitions = list(self._listed())
        with ThreadPoolExecutor(min(_PARALLEL_SESSIONS, max(1, len(partitions)))) as pool:
            downloads = list(pool.map(self.download, partitions))
        return {partition: download.count for partition, download in zip(partitions, downloads, strict=True)}

    def versions(self) -> dict[str, str]:
        """When each partition was last changed, by its name."""
        return {self.name(partition): modified for partition, modified in self._listed().items()}

    def download(self, partition: str) -> DownloadSession:
        """The session of a partition, made once."""
        known = self._downloads.get(partition)
        if known is None:
            modified = self._modified(partition)
            made = self._call(
                f"a download session of {self.name(partition)}",
                lambda: self._session_anew(partition, modified),
            )
            with self._lock:
                known = self._downloads.setdefault(partition, made)
        return known

    def fetch(self, partition: str, start: int, count: int) -> pa.Table:
        """The rows `start … start + count - 1`: exactly these, checked; resumed after what was received.

        Raises SourceChanged for a table that was written to since its session was made, and ReaderError when
        retries are used up or make no sense.
        """
        import pyarrow as pa

        if count == 0:
            return self._call(
                f"the columns of {self.name(partition)}",
                lambda: self._process().empty(self._session(partition), self.columns),
            )
        what = f"reading rows {start} to {start + count} of {self.name(partition)}"
        budget = Budget(self.retries, what, self.config.hide_in)
        got: list[Any] = []
        while (rows := sum(batch.num_rows for batch in got)) < count:
            try:
                self._receive(partition, start + rows, count - rows, got)
                continue
            except trouble() as exc:
                error = exc
            self._after_trouble(
                error, partition, budget, got, rows, count
            )  # outside of the handler, as there
        budget.succeed()
        return pa.Table.from_batches(got)

    def _receive(self, partition: str, start: int, count: int, got: list[Any]) -> None:
        before = len(got)
        self._process().read(self._session(partition), start, count, self.columns, got.append)
        rows = sum(batch.num_rows for batch in got[before:])
        if rows != count:
            raise ShortStream(f"the stream ended with {rows} rows, {count} were asked for")

    def _after_trouble(
        self, error: Exception, partition: str, budget: Budget, got: list[Any], before: int, count: int
    ) -> None:
        """Keep what is whole, and wait or raise."""
        rows = sum(batch.num_rows for batch in got)
        if rows > count:
            got.clear()  # whatever that was, it was not the rows asked for
        elif rows == count:
            while not got.pop().num_rows:  # a stream that has not ended well is not complete
                continue
        elif rows > before:
            budget.progress()
        verdict = judge(error)
        if verdict is ErrorKind.CHANGED:
            hide = self.config.hide_in
            raise self._changed(partition, hide(str(error))) from cause_without_secrets(error, hide)
        budget.spend(error, verdict)
        with self._lock:
            if verdict is ErrorKind.EXPIRED:
                self._renew(partition)
            elif verdict is ErrorKind.RETRY:  # the way to the service may be another one now
                self._client = None
                self._sessions.clear()

    def _call(self, what: str, call: Any) -> Any:
        return self.retries.run(what, call, self.config.hide_in)

    def _process(self) -> OdpsClient:
        """This process's client. A forked child drops the parent's, with its sockets, unused."""
        if self._pid != os.getpid():
            self._forget_process()
        with self._lock:
            if self._client is None:
                self._client = OdpsClient(self.config)
                if not self._columns_known:
                    self._check_columns(self._client)
            return self._client

    def _session(self, partition: str) -> Any:
        client, download = self._process(), self.download(partition)
        with self._lock:
            session = self._sessions.get(partition)
        if session is None:
            session = client.download(partition, download.id)
            if session.status is not session.Status.Normal:
                raise expired(download.id, session.status.name)
            if session.count != download.count:
                raise self._changed(partition, f"{session.count} rows instead of {download.count}")
            with self._lock:
                self._sessions[partition] = session
        return session

    def _session_anew(self, partition: str, modified: str) -> DownloadSession:
        session = self._process().download(partition)
        with self._lock:
            self._sessions[partition] = session
        return DownloadSession(session.id, session.count, modified)

    def _renew(self, partition: str) -> None:
        """A new session in the place of one that is a day old, if the rows are those of before."""
        old = self._downloads[partition]
        new = self._call(
            f"a new download session of {self.name(partition)}",
            lambda: self._session_anew(partition, old.modified),
        )
        self._partitions = None  # asked for after the session was made: what it holds was not written between
        modified = self._modified(partition)
        if modified != old.modified:
            raise self._changed(partition, f"last changed at {modified}, not at {old.modified}")
        if new.count != old.count:
            raise self._changed(partition, f"{new.count} rows instead of {old.count}")
        self._downloads[partition] = new

    def _modified(self, partition: str) -> str:
        listed = self._listed()
        if partition not in listed:
            raise ReaderError(f"{self.name(partition)}: the table has no such partition")
        return listed[partition]

    def _listed(self) -> dict[str, str]:
        """The partitions that are meant and when each was last changed; `{"": when}` without partitions."""
        if self._partitions is None:
            self._partitions = self._call(f"the partitions of {self.config.name}", self._list)
        return self._partitions

    def _list(self) -> dict[str, str]:
        client = self._process()
        facts = client.facts()
        if not facts.partition_keys:
            if self.patterns:
                raise InvalidArgument(f"{self.config.name} has no partitions: leave partition= out")
            return {"": facts.modified}
        keys = facts.partition_keys
        for pattern in self.patterns:
            if unknown := sorted(set(pattern.values) - set(keys)):
                raise InvalidArgument(
                    f"{self.config.name} has the partition keys {', '.join(keys)}, not {', '.join(unknown)}"
                )
        found: dict[str, str] = {}
        if not self.patterns:
            found.update(client.partitions(""))
        for pattern in self.patterns:
            new = [item for item in client.partitions(pattern.prefix(keys)) if pattern.matches(item[0])]
            if not new:
                raise ReaderError(f"{self.config.name} has no partition {pattern.text!r}")
            found.update(new)
        return dict(sorted(found.items()))

    def _check_columns(self, client: OdpsClient) -> None:
        facts = client.facts()
        known = (*facts.columns, *facts.partition_keys)
        unknown = [name for name in self.columns or () if name not in known]
        if unknown:
            raise InvalidArgument(
                f"{self.config.name} has no column {', '.join(unknown)}; it has {', '.join(known)}"
            )
        self._columns_known = True

    def _changed(self, partition: str, why: str) -> SourceChanged:
        return SourceChanged(
            f"the table {self.name(partition)} was written to since the dataset was registered ({why}): what "
            "is left of it cannot be told from what was read. Register the dataset anew, or read a copy"
        )

    def __repr__(self) -> str:
        patterns = ", ".join(pattern.text for pattern in self.patterns) or "all partitions"
        return f"<OdpsTable {self.config.name} {patterns} sessions={len(self._downloads)}>"


def _names(columns: Sequence[str] | None) -> tuple[str, ...] | None:
    if columns is None:
        return None
    names = (columns,) if isinstance(columns, str) else tuple(columns)
    if not names or len(set(names)) < len(names):
        raise InvalidArgument(f"columns={columns!r}: expected names, at least one, each once")
    return names
