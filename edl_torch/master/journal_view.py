"""View of a journal that a master may keep open: no lock is taken, nothing is written.

The view is the state of one moment, as a dispatcher.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from edl_torch.core.dispatcher import Dispatcher
from edl_torch.core.persistence import VERSION, Rows, load
from edl_torch.errors import EdlError, JournalError
from edl_torch.master.journal import APPLICATION, FILE, LOG, rows_of

BUSY_S = 10.0  # patience with a master that is just starting


def view(folder: Path) -> Dispatcher:
    """Return the state in the journal of `folder`. Raises JournalError where none can be read.

    A master may go on meanwhile: its transactions are seen whole or not at all.
    """
    path = folder / FILE
    if not path.is_file():
        raise JournalError(
            f"there is no journal ({FILE}) in {str(folder)!r}: give the --state folder of the job's master"
        )
    try:
        ledger_id, rows = _read(path)
        return load(rows, ledger_id=ledger_id, now=0.0)
    except sqlite3.Error as exc:
        raise JournalError(
            f"cannot read the journal in {str(folder)!r}: {exc}. It must be on a local disk, and while "
            f"{LOG} is there, this user must be allowed to write there; or copy the folder once the master "
            f"has ended"
        ) from exc
    except JournalError:
        raise
    except (LookupError, TypeError, ValueError, EdlError) as exc:
        raise JournalError(f"the journal in {str(folder)!r} is damaged ({exc!r})") from exc


def _read(path: Path) -> tuple[str, Rows]:
    """Return the ledger's id and all rows."""
    if not path.with_name(LOG).exists():
        # No log: no master has it open. Then SQLite may leave everything as it is, on read-only disks too.
        found = _read_with(path, "mode=ro&immutable=1")
        if not path.with_name(LOG).exists():
            return found
    return _read_with(path, "mode=ro")  # a master has it open, or was killed


def _read_with(path: Path, how: str) -> tuple[str, Rows]:
    uri = f"file:{quote(str(path.absolute()))}?{how}"
    with closing(sqlite3.connect(uri, uri=True, timeout=BUSY_S, isolation_level=None)) as connection:
        run = connection.execute
        run("BEGIN")  # all of it from one moment
        _check(connection, path.parent)
        (ledger_id,) = run("SELECT value FROM meta WHERE name = 'ledger'").fetchone()
        return str(ledger_id), rows_of(connection)


def _check(connection: sqlite3.Connection, folder: Path) -> None:
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION:
        raise JournalError(f"{str(folder / FILE)!r} is a database of something else, and no journal")
    if version > VERSION:
        raise JournalError(
            f"the journal in {str(folder)!r} has version {version}, this edl-torch knows {VERSION}: "
            f"use the newer edl-torch that wrote it"
        )
