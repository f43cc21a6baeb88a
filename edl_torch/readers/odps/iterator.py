"""`ODPSReader`: batches of a table's rows without a master, under the interface that ElasticDL's users know.

Which worker reads which rows is fixed by numbers alone. Where workers come and go, `ODPSDataReader` with a
`DataShardService` is right.
"""

from __future__ import annotations

import inspect
import multiprocessing
import os
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from edl_torch import errors
from edl_torch.errors import EdlError, InvalidArgument, ReaderError
from edl_torch.readers.arrow import rows
from edl_torch.readers.odps.reader import ODPSDataReader
from edl_torch.readers.odps.table import OdpsTable

if TYPE_CHECKING:
    import pyarrow as pa

Row = tuple[Any, ...]
_SLICE_ROWS = 8192  # at least: what a request costs is spread over so many rows
_OLD_NAMES = {  # of options: as ElasticDL has them
    "odps.options.tunnel.endpoint": "tunnel_endpoint",
    "odps.options.read_timeout": "timeout_s",
    "odps.options.retry_times": "retries",
}
Range = tuple[str, int, int]  # partition, first row, number of rows
_AHEAD = 2  # ranges that each child has asked for or downloaded beyond the one being read
_END_S = 5.0


class ODPSReader:
    """Rows of a table, or of some of its partitions, as tuples in the order of the columns.

    Args:
        project, access_id, access_key, endpoint: None for the environment's.
        table: Its name.
        partition: None for all, one or several, patterns allowed.
        options: More arguments of `ODPSDataReader` (`tunnel_endpoint`, `fill_nulls`, …); ElasticDL's
            `odps.options.…` names are understood.
    """

    def __init__(
        self,
        project: str | None,
        access_id: str | None,
        access_key: str | None,
        endpoint: str | None,
        table: str,
        partition: str | Iterable[str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        more = {_OLD_NAMES.get(name, name): value for name, value in (options or {}).items()}
        more.pop("odps.options.connect_timeout", None)  # one timeout serves for both
        named: dict[str, Any] = {"project": project, "endpoint": endpoint}
        named |= {"access_id": access_id, "access_key": access_key}
        taken = {*inspect.signature(ODPSDataReader).parameters} - {*named, "table", "partition"}
        if not more.keys() <= taken:
            raise InvalidArgument(
                f"options has {', '.join(more.keys() - taken)}: expected {', '.join(sorted(taken))}"
            )
        self._reader = ODPSDataReader(table, partition, **named, **more)
        self._records: Iterator[Row] | None = None

    def to_iterator(
        self,
        num_workers: int,
        worker_index: int,
        batch_size: int,
        epochs: int = 1,
        shuffle: bool = False,
        columns: Sequence[str] | None = None,
        table_size_limit: int = -1,
        num_processes: int | None = None,
    ) -> Iterator[list[Row]]:
        """Yield this worker's batches: lists of at most `batch_size` rows.

        Every row is read by exactly one of the `num_workers` workers in each epoch; only the last batch of
        a partition can be short.

        Args:
            num_workers, worker_index: How many workers there are, and which one this is, from 0.
            batch_size: Rows in a batch.
            epochs: How often the data is repeated.
            shuffle: Read the worker's slices in another order in each epoch, and mix the rows of a slice.
            columns: Their names, in order; None for the reader's.
            table_size_limit: Rows that are read at most, over all workers; -1 for all.
            num_processes: Child processes that download; None for one a core, 0 for none (which is what None
                means inside a DataLoader's worker)

        Raises InvalidArgument, now and not at the first batch.
        """
        for name, value, least in (
            ("num_workers", num_workers, 1),
            ("worker_index", worker_index, 0),
            ("batch_size", batch_size, 1),
            ("epochs", epochs, 1),
            ("num_processes", num_processes or 0, 0),
        ):
            if type(value) is not int or value < least:
                raise InvalidArgument(f"{name}={value!r}: expected an integer of at least {least}")
        if worker_index >= num_workers:
            raise InvalidArgument(
                f"worker_index={worker_index}: there are num_workers={num_workers}, from 0 on"
            )
        table = self._reader.table
        if columns is not None:
            table = table.with_columns(columns)
        processes = _processes(num_processes)
        return self._batches(
            table, (num_workers, worker_index), batch_size, epochs, shuffle, table_size_limit, processes
        )

    def record(self) -> Row | None:
        """The next row of the table, from its beginning on; None after the last one."""
        if self._records is None:
            batches = self.to_iterator(1, 0, self._reader.block_rows, num_processes=0)
            self._records = (row for batch in batches for row in batch)
        return next(self._records, None)

    def __len__(self) -> int:
        return sum(self._reader.table.plan().values())

    def _batches(
        self,
        table: OdpsTable,
        share: tuple[int, int],
        batch_size: int,
        epochs: int,
        shuffle: bool,
        limit: int,
        processes: int,
    ) -> Iterator[list[Row]]:
        workers, worker = share
        ranges = list(_slices(table.plan(), batch_size, limit))[worker::workers]
        dice = random.Random()
        for _ in range(epochs):
            if shuffle:
                dice.shuffle(ranges)
            fetched: Iterator[Any] = (table.fetch(*asked) for asked in ranges)
            if processes and ranges:
                fetched = read_in_processes(table, ranges, processes)
            for rows_of_slice in fetched:
                found = [tuple(row.values()) for row in rows(rows_of_slice, self._reader.fill_nulls)]
                if shuffle:
                    dice.shuffle(found)
                for start in range(0, len(found), batch_size):
                    yield found[start : start + batch_size]

    def __repr__(self) -> str:
        return f"<ODPSReader {self._reader.table!r}>"


def _processes(asked: int | None) -> int:
    if not multiprocessing.current_process().daemon:
        return (os.cpu_count() or 1) if asked is None else asked
    if asked:
        raise InvalidArgument(
            f"num_processes={asked}: a daemonic process, such as a DataLoader worker, has no children; use 0"
        )
    return 0


def _slices(counts: Mapping[str, int], batch_size: int, limit: int) -> Iterator[Range]:
    """Whole batches of a partition, so many that a request is worth its while; the same for every worker."""
    step = batch_size * -(-_SLICE_ROWS // batch_size)
    left = limit if limit >= 0 else sum(counts.values())
    for partition, count in counts.items():
        count = min(count, left)
        left -= count
        for start in range(0, count, step):
            yield partition, start, min(step, count - start)


def read_in_processes(table: OdpsTable, ranges: Sequence[Range], processes: int) -> Iterator[pa.Table]:
    """Yield the rows of each range, in order, downloaded ahead by child processes, which end however it is
    left.

    The start method is that of `multiprocessing`. Raises what a child raised, and ReaderError for one that
    died.
    """
    import pyarrow as pa

    children = _start(table, min(processes, len(ranges)))
    try:
        for number in range(min(len(ranges), _AHEAD * len(children))):
            _ask(children, number, ranges)
        for number in range(len(ranges)):
            yield pa.ipc.open_stream(_hear(children[number % len(children)])).read_all()
            if number + _AHEAD * len(children) < len(ranges):
                _ask(children, number + _AHEAD * len(children), ranges)
    finally:
        _end(children)


Child = tuple[Any, Connection]  # process, the parent's end


def _start(table: OdpsTable, number: int) -> list[Child]:
    context = multiprocessing.get_context()
    forked = context.get_start_method() == "fork"
    children: list[Child] = []
    try:
        for _ in range(number):
            ours, theirs = context.Pipe()
            inherited = [*(own for _, own in children), ours] if forked else []
            process = context.Process(target=_serve, args=(table, theirs, inherited), daemon=True)
            process.start()
            theirs.close()
            children.append((process, ours))
    except OSError:
        _end(children)
        raise
    return children


def _ask(children: list[Child], number: int, ranges: Sequence[Range]) -> None:
    process, connection = children[number % len(children)]
    try:
        connection.send(ranges[number])
    except OSError as exc:
        raise _died(process) from exc


def _hear(child: Child) -> Any:
    process, connection = child
    try:
        kind, payload = connection.recv()
    except (EOFError, OSError) as exc:
        raise _died(process) from exc
    if kind == "rows":
        return payload
    name, message = payload
    raise getattr(errors, name, ReaderError)(message)


def _died(process: Any) -> ReaderError:
    process.join(_END_S)
    return ReaderError(
        f"a process that was downloading rows died (exit code {process.exitcode}); what it had is not "
        "delivered"
    )


def _end(children: list[Child]) -> None:
    for process, connection in children:
        connection.close()
        process.terminate()
    for process, _ in children:
        process.join(_END_S)
        if process.is_alive():
            process.kill()
            process.join()
        process.close()


def _serve(table: OdpsTable, connection: Connection, inherited: list[Connection]) -> None:
    """A child: ranges in, rows out, until the parent's end of the pipe is closed, by it or by its death."""
    for other in inherited:  # while a child holds the parent's ends, nobody sees that the parent died
        other.close()
    with suppress(EOFError, OSError, KeyboardInterrupt):
        while True:
            connection.send(_answer(table, connection.recv()))


def _answer(table: OdpsTable, asked: Range) -> tuple[str, Any]:
    import pyarrow as pa

    try:
        rows = table.fetch(*asked)
    except EdlError as exc:
        return "error", (type(exc).__name__, str(exc))
    except Exception as exc:  # noqa: BLE001  the top of a process: its parent must hear of it
        return "error", ("ReaderError", table.config.hide_in(f"{type(exc).__name__}: {exc}"))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)
    return "rows", sink.getvalue().to_pybytes()
