"""Download sessions: a snapshot of a partition's rows under an id, and bodies of row ranges.

It must not know HTTP.
"""

from __future__ import annotations

import itertools
import re
import threading
from dataclasses import dataclass

import pyarrow as pa

from maxcompute.faults import Fault, Rows
from maxcompute.framing import arrow_body, cut_at_a_border, record_body
from maxcompute.tables import Part, Table

_RANGE = re.compile(r"\((\d+),(\d+)\)")


class Refusal(Exception):
    """An error that the client is told: HTTP status, code, message."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass
class Session:
    """One open download."""

    id: str
    table: Table
    partition: str
    part: Part
    polls_left: int
    expired: bool = False

    @property
    def status(self) -> str:
        """As the tunnel words it; one poll is used up."""
        if self.expired:
            return "expired"
        self.polls_left -= 1
        return "initiating" if self.polls_left >= 0 else "normal"


class Sessions:
    """All download sessions of a server."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._open: dict[str, Session] = {}

    def create(self, table: Table, partition: str, polls: int) -> Session:
        """A snapshot of the rows as they are now; `polls` answers say that it is being made."""
        part = part_of(table, partition)
        with self._lock:
            session = Session(f"2026{next(self._numbers):028x}", table, partition, part, polls)
            self._open[session.id] = session
        return session

    def find(self, session_id: str, table: Table, partition: str) -> Session:
        """The session of this id, which must be of this table and partition."""
        session = self._open.get(session_id)
        if session is None or session.table is not table or session.partition != partition:
            raise Refusal(404, "NoSuchDownload", "The specified download id does not exist.")
        return session

    def expire(self) -> None:
        """As after 24 hours: none of the sessions can be read any more."""
        with self._lock:
            for session in self._open.values():
                session.expired = True

    def forget(self) -> None:
        """As long after that: none of the ids is known any more."""
        with self._lock:
            self._open.clear()


def part_of(table: Table, partition: str) -> Part:
    """The rows of a partition. Refuses what the tunnel refuses."""
    if table.partition_keys and not partition:
        raise Refusal(
            400, "MissingPartitionSpec", "You need to specify a partitionspec along with the table."
        )
    try:
        return table.parts[table.normal(partition)]
    except ValueError as exc:
        raise Refusal(400, "InvalidPartitionSpec", str(exc)) from exc
    except KeyError as exc:
        raise Refusal(404, "NoSuchPartition", "The specified partition does not exist.") from exc


def body_of(
    session: Session, rowrange: str, columns: str, *, arrow: bool, batch_rows: int, fault: Fault | None
) -> bytes:
    """The body of a row range, in the columns asked for; `fault` may change the number of rows."""
    rows = _rows(session, rowrange)
    if isinstance(fault, Rows):
        start = int(_RANGE.fullmatch(rowrange).group(1))  # type: ignore[union-attr]
        rows = _repeated(session.part.rows, start, fault.count)
    names = _names(session.table, columns, in_table_order=arrow)
    rows = rows.select(names)
    if not arrow:
        return record_body(rows, {name: session.table.columns[name] for name in names})
    if isinstance(fault, Rows):
        return cut_at_a_border(rows, batch_rows)
    return arrow_body(rows, batch_rows)


def _rows(session: Session, rowrange: str) -> pa.Table:
    if session.expired:
        raise Refusal(409, "StatusConflict", "The download session is expired.")
    if session.table.parts[session.partition].version != session.part.version:
        message = "The specified table has been modified since the download initiated."
        raise Refusal(412, "TableModified", message)
    match = _RANGE.fullmatch(rowrange)
    start, count = (int(number) for number in match.groups()) if match else (-1, -1)
    if start < 0 or start + count > session.part.rows.num_rows:
        raise Refusal(400, "InvalidRowRange", "The specified row range is not valid.")
    return session.part.rows.slice(start, count)


def _repeated(rows: pa.Table, start: int, count: int) -> pa.Table:
    """`count` rows from `start` on, and from the beginning again where they end."""
    return pa.concat_tables([rows.slice(start), rows, rows]).slice(0, count).combine_chunks()


def _names(table: Table, columns: str, *, in_table_order: bool) -> list[str]:
    asked = columns.split(",") if columns else list(table.columns)
    unknown = [name for name in asked if name not in table.columns]
    if unknown:
        raise Refusal(400, "InvalidColumnSpec", f"no column {unknown[0]}")
    return [name for name in table.columns if name in asked] if in_table_order else asked
