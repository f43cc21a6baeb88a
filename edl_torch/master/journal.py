"""The journal: rows by key in a folder of one master, safe against kill -9 and power loss once written.

SQLite in WAL mode with `synchronous=FULL`. It holds what is, so it is as large as what is in flight. It must
not know what rows mean; `core.persistence` does.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import sqlite3
import uuid
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import IO

from edl_torch.core.changes import Key
from edl_torch.core.persistence import VERSION, Rows, Update
from edl_torch.errors import JournalError, MasterStartError

FILE = "journal.sqlite3"
LOCK = "lock"
APPLICATION = 0x65646C74  # "edlt", in the header of the file
BUSY_S = 10.0  # patience with somebody who looks into the file
WAL_PAGES = 1000  # before they are carried over into the main file
WAL_BYTES = 8 << 20  # of the file between two uses
FREE_PAGES = 256  # that may lie unused in the file
LOOK_EVERY = 32  # writes, for free pages
KEYS_KNOWN = 4096  # whose text is kept: those of trainers come again with every call

_SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE state (key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
CREATE TRIGGER gone AFTER INSERT ON state WHEN NEW.value IS NULL
BEGIN DELETE FROM state WHERE key = NEW.key; END;
"""

_WRITE = "INSERT OR REPLACE INTO state SELECT key, value FROM json_each(?)"

Connect = Callable[[Path], sqlite3.Connection]

# ASCII with escapes: whatever a string holds, no NUL and no lone surrogate reaches SQLite.
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


def encoded(update: Update) -> str:
    """The transaction that writes `update`: an object of rows by key, null for those that are no more."""
    return _encode({_key_text(key): row for key, row in update.items()})


@functools.lru_cache(KEYS_KNOWN)
def _key_text(key: Key) -> str:
    return _encode(key)


def connect(path: Path) -> sqlite3.Connection:
    """A connection that commits only when told to, for whichever thread writes."""
    return sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)


class Journal:
    """The journal in `folder`, which is made if missing; no other process can open it until `close()`.

    One thread at a time may use it. Raises MasterStartError when it cannot be used.
    """

    def __init__(self, folder: Path, *, connect: Connect = connect) -> None:
        self.folder = folder
        self._until_look = 0
        with ExitStack() as opened:
            self._lock = opened.enter_context(_locked(folder))
            try:
                self._connection = opened.enter_context(closing(connect(folder / FILE)))
                self._prepare()
                self.ledger_id = self._ledger_id()
                _sync(folder)
            except (sqlite3.Error, OSError) as exc:
                raise MasterStartError(
                    f"cannot use the journal in {folder}: {exc}. It needs a folder on a local disk, with "
                    f"room, that this user may write to; a damaged one can only be replaced by another "
                    f"--state folder"
                ) from exc
            opened.pop_all()  # they stay open until `close()`

    # Opening --------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        run = self._connection.execute
        (found,) = run("PRAGMA user_version").fetchone()
        self._check_version(found)
        run("PRAGMA auto_vacuum = INCREMENTAL")
        (mode,) = run("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise OSError("this file system cannot keep a write-ahead log")
        run("PRAGMA synchronous = FULL")
        run("PRAGMA fullfsync = ON")  # macOS: else the disk may still hold it back
        run(f"PRAGMA wal_autocheckpoint = {WAL_PAGES}")
        run(f"PRAGMA journal_size_limit = {WAL_BYTES}")
        if not found:
            self._create()
        elif found < VERSION:
            run(f"PRAGMA user_version = {VERSION}")  # what is written from now on
        (verdict,) = run("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise OSError(f"the file is damaged: {verdict}")
        run("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def _check_version(self, found: int) -> None:
        run = self._connection.execute
        (application,) = run("PRAGMA application_id").fetchone()
        (tables,) = run("SELECT count(*) FROM sqlite_master").fetchone()
        if application != APPLICATION and (found or tables):
            raise MasterStartError(
                f"{self.folder / FILE} is a database of something else: give another --state folder"
            )
        if found > VERSION:
            raise MasterStartError(
                f"the journal in {self.folder} has version {found}, this edl-torch knows {VERSION}: "
                f"start the master with the newer edl-torch that wrote it, or give another --state folder"
            )

    def _create(self) -> None:
        self._connection.executescript(
            f"BEGIN IMMEDIATE; {_SCHEMA}"
            f"INSERT INTO meta VALUES ('ledger', '{uuid.uuid4().hex}');"
            f"PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {VERSION}; COMMIT;"
        )

    def _ledger_id(self) -> str:
        (found,) = self._connection.execute("SELECT value FROM meta WHERE name = 'ledger'").fetchone()
        return str(found)

    # Use ------------------------------------------------------------------------------------------------

    def read(self) -> Rows:
        """All rows."""
        return rows_of(self._connection)

    def write(self, batch: str) -> None:
        """Write what `encoded` made, in one transaction. It is safe once this returns.

        Raises JournalError, with nothing written. The transaction is one statement: each gives the
        interpreter's lock away and asks for it again.
        """
        try:
            self._shrink()
            self._connection.execute(_WRITE, (batch,))
        except sqlite3.Error as exc:
            raise self._failure(exc) from exc

    def _failure(self, error: sqlite3.Error) -> JournalError:
        return JournalError(
            f"cannot write the journal in {self.folder}: {error}. The master stops; nothing that it answered "
            f"is lost. Make the folder writable, with room, and start it again with the same --state"
        )

    def _shrink(self) -> None:
        """Now and then give free pages back to the disk, some at a time."""
        self._until_look -= 1
        if self._until_look > 0:
            return
        (free,) = self._connection.execute("PRAGMA freelist_count").fetchone()
        if free <= FREE_PAGES:
            self._until_look = LOOK_EVERY
            return
        # As a script: `execute` takes one step, and every step frees one page.
        self._connection.executescript(f"PRAGMA incremental_vacuum({FREE_PAGES})")

    def close(self) -> None:
        """Carry the log over into the main file, and let others have the folder."""
        with closing(self._lock), closing(self._connection):
            try:
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            except sqlite3.Error:
                return  # the log stays, and is read at the next start

    def __repr__(self) -> str:
        return f"<Journal {self.folder} ledger={self.ledger_id}>"


def rows_of(connection: sqlite3.Connection) -> Rows:
    """All rows of a journal that is open."""
    found = connection.execute("SELECT key, value FROM state")
    return {tuple(json.loads(key)): tuple(json.loads(value)) for key, value in found}


def _locked(folder: Path) -> IO[str]:
    """The open lock file: the system unlocks it when its process ends, however that happens."""
    try:
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        for path in missing:
            _sync(path.parent)
        file = (folder / LOCK).open("a+")
    except OSError as exc:
        raise MasterStartError(f"cannot keep a journal in {folder}: {exc.strerror}") from exc
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _sign(file)
    except BlockingIOError:
        holder = _holder(file)
        file.close()
        raise MasterStartError(
            f"another master{holder} uses the journal in {folder}: stop it, or give another --state folder"
        ) from None
    except OSError as exc:
        with suppress(OSError):  # of a full disk it would say the same again
            file.close()
        raise MasterStartError(f"cannot lock {folder / LOCK}: {exc.strerror}") from exc
    return file


def _sign(file: IO[str]) -> None:
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()


def _holder(file: IO[str]) -> str:
    file.seek(0)
    return f" (process {pid})" if (pid := file.read(20)) else ""


def _sync(folder: Path) -> None:
    """Make the names in a folder safe."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
