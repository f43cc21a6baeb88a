"""Journal: rows by key in a folder of one master, safe against kill -9 and power loss once written.

SQLite in WAL mode with `synchronous=FULL`. It holds the state, not its history, so it is as large
as what is in flight. `core.persistence` knows what the rows mean.

SQLite forgets without a word what a lost or damaged log held, and does not know whether a page says what was
written there. So each transaction writes its number and the sum of all rows' checksums as a row of its own,
the number goes into the lock file after it, and the main file says whether it is complete without its log.
"""

from __future__ import annotations

import fcntl
import functools
import itertools
import json
import os
import sqlite3
import uuid
import zlib
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

from edl_torch.core.changes import Key
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.core.persistence import VERSION, Rows, Update, load
from edl_torch.errors import EdlError, JournalError, MasterStartError
from edl_torch.system.whole_files import sync

FILE = "journal.sqlite3"
LOG = FILE + "-wal"
LOCK = "lock"
APPLICATION = 0x65646C74  # "edlt", in the header of the file
BUSY_S = 10.0  # patience with somebody who looks into the file
WAL_PAGES = 1000  # before they are carried over into the main file
WAL_BYTES = 8 << 20  # of the file between two uses
FREE_PAGES = 256  # that may lie unused in the file
LOOK_EVERY = 32  # writes, for free pages
KEYS_KNOWN = 8192  # whose text is kept: those of trainers come again with every call

_SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE state (key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
CREATE TRIGGER gone AFTER INSERT ON state WHEN NEW.value IS NULL
BEGIN DELETE FROM state WHERE key = NEW.key; END;
"""

_COMMIT = '["commit"]'  # key of the row of the last transaction: its number, and the sum of all others
_GONE = "null"

_WRITE = "INSERT OR REPLACE INTO state SELECT key, value FROM json_each(?)"

Connect = Callable[[Path], sqlite3.Connection]

# ASCII with escapes: whatever a string holds, no NUL and no lone surrogate reaches SQLite.
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


@functools.lru_cache(KEYS_KNOWN)
def _known(key: Key | str) -> str:
    """Return a key, or the text of one, as text."""
    return _encode(key)


def encoded(update: Update) -> dict[str, str]:
    """Return the rows of `update` by key, as text; null for those that are no more."""
    return {_known(key): _encode(row) for key, row in update.items()}


def _checksum(key: str, value: str) -> int:
    """Never 0 but for a row that is gone."""
    return 0 if value == _GONE else 1 + zlib.crc32(f"{key} {value}".encode())


def connect(path: Path) -> sqlite3.Connection:
    """Return a connection that commits only when told to, for whichever thread writes."""
    return sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)


class Journal:
    """The journal in `folder`, which is made if missing; no other process can open it until `close()`.

    One thread at a time may use it. Raises MasterStartError when it cannot be used. `is_new` says that it was
    made just now; `lost` says what it is known to have forgotten, '' where nothing is known of that.
    """

    def __init__(self, folder: Path, *, connect: Connect = connect) -> None:
        self.folder = folder
        self.lost = ""
        self._until_look = 0
        with ExitStack() as opened:
            self._lock = opened.enter_context(_locked(folder))
            try:
                # Open as long as the connection is: to close it would end SQLite's own locks on the file.
                self._file = opened.enter_context(_locked_file(folder))
                has_log = _size(folder / LOG) > 0
                self._check_is_there(has_log)  # first: SQLite would delete the log of an empty file
                self._connection = opened.enter_context(closing(connect(folder / FILE)))
                self._prepare()
                self.ledger_id = self._meta("ledger")
                self._take_up()
                self._check_log(has_log)
                # From now on the main file says that there is a log, which is never empty once it does.
                self._set_log("open")
                self._connection.execute("PRAGMA wal_checkpoint(FULL)").fetchall()
                self._placed = self._places()
                sync(folder)
            except JournalError as exc:
                raise MasterStartError(f"{exc}, or give another --state folder") from exc
            except (sqlite3.Error, OSError) as exc:
                raise MasterStartError(
                    f"cannot use the journal in {folder}: {exc}. It needs a folder on a local disk, with "
                    f"room, that this user may write to; a damaged one can only be replaced by another "
                    f"--state folder"
                ) from exc
            opened.pop_all()  # they stay open until `close()`

    # Opening --------------------------------------------------------------------------------------------

    def _check_is_there(self, has_log: bool) -> None:
        """Raise MasterStartError where a new journal would take the place of one that is gone.

        A master that dies while it makes one may leave it empty, but then has written no transaction.
        """
        if not _size(self.folder / FILE) and (has_log or _told_commits(self._lock)):
            raise MasterStartError(
                f"{FILE} in {self.folder} is missing or empty, and the state of a master was in it. Put back "
                f"a copy of the folder; or, to begin anew, remove the folder or give another --state"
            )

    def _prepare(self) -> None:
        run = self._connection.execute
        found = _version_of(self._connection, self.folder, may_be_new=True)
        run("PRAGMA auto_vacuum = INCREMENTAL")
        (mode,) = run("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise OSError("this file system cannot keep a write-ahead log")
        run("PRAGMA synchronous = FULL")
        run("PRAGMA fullfsync = ON")  # macOS: else the disk may still hold it back
        run(f"PRAGMA wal_autocheckpoint = {WAL_PAGES}")
        run(f"PRAGMA journal_size_limit = {WAL_BYTES}")
        self.is_new = not found
        if not found:
            self._connection.executescript(
                f"BEGIN IMMEDIATE; {_SCHEMA}"
                f"INSERT INTO meta VALUES ('ledger', '{uuid.uuid4().hex}');"
                f"PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {VERSION}; COMMIT;"
            )
        (verdict,) = run("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise OSError(f"the file is damaged: {verdict}")

    def _take_up(self) -> None:
        """The last transaction's number and sum. Raises MasterStartError if they are of other rows."""
        found = dict(self._connection.execute("SELECT key, value FROM state"))
        self._commits, said = json.loads(found.pop(_COMMIT, "[0,0]"))
        self._sums = {key: _checksum(key, value) for key, value in found.items()}
        self._sum = sum(self._sums.values())
        if said != self._sum:
            raise MasterStartError(
                f"the journal in {self.folder} is damaged: its rows are not what was written. Put back "
                f"a copy of the folder, or give another --state folder, and go on from a checkpoint"
            )

    def _check_log(self, has_log: bool) -> None:
        """Note in `lost` what can be known: of a log that is gone, and of transactions that are."""
        if self.is_new:  # whatever was here before
            _tell_commits(self._lock, 0)
        told = _told_commits(self._lock)
        if told > self._commits:
            self.lost = f"it has {self._commits} transactions, and {told} were written"
        elif self._meta("log") and not has_log and self._commits > told + 1:  # else it is known to be whole
            self.lost = f"its log ({LOG}) is missing or empty, and it was not closed"

    def _set_log(self, state: str) -> None:
        self._connection.execute("INSERT OR REPLACE INTO meta VALUES ('log', ?)", (state,))

    def _meta(self, name: str) -> str:
        found = self._connection.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return "" if found is None else str(found[0])

    # Use ------------------------------------------------------------------------------------------------

    def read(self) -> Rows:
        return rows_of(self._connection)

    def write(self, batch: dict[str, str]) -> None:
        """Write what `encoded` made, in one transaction. It is safe once this returns.

        Raises JournalError: then it is not, and nothing may be written any more. The transaction is one
        statement: each gives the interpreter's lock away and asks for it again.
        """
        try:
            self._shrink()
            sums = {key: _checksum(key, value) for key, value in batch.items()}
            total = self._sum + sum(sums.values()) - sum(map(self._sums.get, sums, itertools.repeat(0)))
            parts = [f"{_known(key)}:{value}" for key, value in batch.items()]
            parts.append(f"{_known(_COMMIT)}:[{self._commits + 1},{total}]")
            self._connection.execute(_WRITE, (f"{{{','.join(parts)}}}",))
            self._commits, self._sum = self._commits + 1, total
            self._sums |= sums
            for key in [key for key, number in sums.items() if not number]:
                del self._sums[key]
            self._check_place()
            _tell_commits(self._lock, self._commits)
        except (sqlite3.Error, OSError) as exc:
            raise JournalError(
                f"cannot write the journal in {self.folder}: {exc}. The master stops; nothing that it "
                f"answered is lost. Make the folder writable, with room, and start it again with the same "
                f"--state"
            ) from exc

    def _check_place(self) -> None:
        """Raise JournalError if the files are not those any more that others see under their names."""
        if self._places() != self._placed:
            raise JournalError(
                f"{FILE} or {LOG} in {self.folder} was removed or replaced while the master ran. The master "
                f"stops: put them back as they were, or start it again and go on from a checkpoint"
            )

    def _places(self) -> list[tuple[int, int]]:
        try:
            found = [os.stat(self.folder / name) for name in (FILE, LOG)]
        except FileNotFoundError:
            return []
        return [(file.st_dev, file.st_ino) for file in found]

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
        with closing(self._lock), closing(self._file), closing(self._connection):
            try:
                self._check_place()
                self._set_log("")
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            except (sqlite3.Error, OSError, JournalError):
                return  # the log stays, and is read at the next start

    def __repr__(self) -> str:
        return f"<Journal {self.folder} ledger={self.ledger_id}>"


def _version_of(connection: sqlite3.Connection, folder: Path, *, may_be_new: bool) -> int:
    """Return the version of a journal; 0 of one that is new. Raises JournalError where it is another's."""
    pragmas = ("PRAGMA application_id", "PRAGMA user_version", "SELECT count(*) FROM sqlite_master")
    application, version, tables = (connection.execute(text).fetchone()[0] for text in pragmas)
    if may_be_new and not (version or tables):
        return 0
    if application != APPLICATION:
        raise JournalError(f"{str(folder / FILE)!r} is a database of something else, and no journal")
    if version != VERSION:
        raise JournalError(
            f"the journal in {str(folder)!r} has version {version}, this edl-torch knows {VERSION}: use the "
            f"edl-torch that wrote it"
        )
    return int(version)


def rows_of(connection: sqlite3.Connection) -> Rows:
    """Return all rows of a journal that is open."""
    found = connection.execute("SELECT key, value FROM state WHERE key != ?", (_COMMIT,))
    return {tuple(json.loads(key)): tuple(json.loads(value)) for key, value in found}


def _locked(folder: Path) -> BinaryIO:
    """Return the open lock file: the system unlocks it when its process ends, however that happens."""
    try:
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(0o700, parents=True, exist_ok=True)
        for path in missing:
            sync(path.parent)
        file = _opened(folder / LOCK)
    except OSError as exc:
        raise MasterStartError(f"cannot keep a journal in {folder}: {exc.strerror}") from exc
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.pwrite(file.fileno(), f"{os.getpid():<{_PLACES}}".encode(), 0)
    except BlockingIOError:
        pid = os.pread(file.fileno(), _PLACES, 0).decode().strip()
        file.close()
        raise MasterStartError(
            f"another master{f' (process {pid})' * bool(pid)} uses the journal in {folder}: stop it, or give "
            f"another --state folder"
        ) from None
    except OSError as exc:
        with suppress(OSError):  # of a full disk it would say the same again
            file.close()
        raise MasterStartError(f"cannot lock {folder / LOCK}: {exc.strerror}") from exc
    return file


def _locked_file(folder: Path) -> BinaryIO:
    """The journal itself, locked: no second master has it, though `lock` was removed.

    The lock is not of the kind that SQLite takes, which would not see this one.
    """
    file = _opened(folder / FILE)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise MasterStartError(
            f"another master uses the journal in {folder}, though its file {LOCK!r} was removed: stop it, or "
            f"give another --state folder"
        ) from None
    return file


def _opened(path: Path) -> BinaryIO:
    """For reading and writing in place; made if missing, for this user alone. SQLite's log is as it."""
    return open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b", buffering=0)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


# The lock file: the process that holds it, and the number of the last transaction that it wrote.
_PLACES = 20  # of each


def _tell_commits(file: BinaryIO, number: int) -> None:
    """Not synced: after a power loss it may be too small, and then it proves nothing."""
    os.pwrite(file.fileno(), f"{number:<{_PLACES}}".encode(), _PLACES)


def _told_commits(file: BinaryIO) -> int:
    number = os.pread(file.fileno(), _PLACES, _PLACES).decode("ascii", "replace").strip()
    return int(number) if number.isdecimal() else 0


def view(folder: Path) -> Dispatcher:
    """Return the state in the journal of `folder`. Raises JournalError where none can be read.

    It is that of one moment, as a dispatcher. A master may go on meanwhile: no lock is taken, nothing is
    written, and its transactions are seen whole or not at all.
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
        _version_of(connection, path.parent, may_be_new=False)
        (ledger_id,) = run("SELECT value FROM meta WHERE name = 'ledger'").fetchone()
        return str(ledger_id), rows_of(connection)
