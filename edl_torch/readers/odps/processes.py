"""Child processes that download row ranges ahead of the one who reads them, in the order asked for.

It must not know what the ranges mean.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from edl_torch import errors
from edl_torch.errors import EdlError, ReaderError
from edl_torch.readers.odps.table import OdpsTable

if TYPE_CHECKING:
    import pyarrow as pa

Range = tuple[str, int, int]  # partition, first row, number of rows
_AHEAD = 2  # ranges that each child has asked for or downloaded beyond the one being read
_END_S = 5.0


def read_in_processes(table: OdpsTable, ranges: Sequence[Range], processes: int) -> Iterator[pa.Table]:
    """Yield the rows of each range, in order. Ends its processes however it is left.

    The start method is that of `multiprocessing`. Raises what a child raised, and ReaderError for one that
    died.
    """
    children = _start(table, min(processes, len(ranges)))
    try:
        for number in range(min(len(ranges), _AHEAD * len(children))):
            _ask(children, number, ranges)
        for number in range(len(ranges)):
            yield _rows(_hear(children[number % len(children)]))
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


def _hear(child: Child) -> bytes:
    process, connection = child
    try:
        kind, payload = connection.recv()
    except (EOFError, OSError) as exc:
        raise _died(process) from exc
    if kind == "rows":
        data: bytes = payload
        return data
    name, message = payload
    cls = getattr(errors, name, ReaderError)
    raise cls(message)


def _died(process: Any) -> ReaderError:
    process.join(_END_S)
    return ReaderError(
        f"a process that was downloading rows died (exit code {process.exitcode}); what it had is not "
        "delivered"
    )


def _rows(data: bytes) -> pa.Table:
    import pyarrow as pa

    return pa.ipc.open_stream(data).read_all()


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
