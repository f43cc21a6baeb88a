"""The file: what it keeps, what it refuses, how large it gets, what it says when the disk does not play."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sqlite3

import pytest

from edl_torch.core.persistence import VERSION
from edl_torch.errors import JournalError, MasterStartError
from edl_torch.master.durable import DurableState
from edl_torch.master.journal import FILE, LOCK, LOG, LOOK_EVERY, WAL_BYTES, Journal, connect, encoded


def rows(count, first=0):
    return {("lease", "d", first + n): (1, "session", n, "x" * 100) for n in range(count)}


def gone(count, first=0):
    return dict.fromkeys(rows(count, first))


@pytest.fixture
def journal(tmp_path):
    journal = Journal(tmp_path / "state")
    yield journal
    journal.close()


def test_what_was_written_is_there_after_the_next_start(tmp_path):
    first = Journal(tmp_path / "a" / "b")
    name = 'nul \0, lone \ud800, quote ", back\\slash, é 𝄞'
    first.write(encoded({("bad", name, 1): (name, 2**62), ("head", "d"): (1,), ("head", "e"): (2,)}))
    first.write(encoded({("head", "d"): (3,), ("head", "e"): None, ("head", "never"): None}))
    first.close()
    second = Journal(tmp_path / "a" / "b")
    assert second.read() == {("bad", name, 1): (name, 2**62), ("head", "d"): (3,)}
    assert second.ledger_id == first.ledger_id
    second.close()


def test_its_folder_and_files_are_for_this_user_alone(tmp_path):
    before = os.umask(0)
    try:
        journal = Journal(tmp_path / "state")
        journal.write(encoded(rows(1)))
        modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "state").iterdir()}
        journal.close()
    finally:
        os.umask(before)
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    assert set(modes) >= {FILE, LOCK, LOG}
    assert set(modes.values()) == {0o600}


def test_a_log_that_nobody_closed_is_read(tmp_path):
    def die(folder):
        Journal(folder).write(encoded(rows(10)))
        os._exit(9)

    process = multiprocessing.get_context("fork").Process(target=die, args=(tmp_path,))
    process.start()
    process.join(20)
    assert (tmp_path / f"{FILE}-wal").stat().st_size > 0
    again = Journal(tmp_path)
    assert len(again.read()) == 10
    assert not again.lost
    again.close()


def test_two_masters_cannot_share_a_journal(tmp_path):
    holder = Journal(tmp_path)
    with pytest.raises(MasterStartError, match=rf"process {os.getpid()}.*{tmp_path}.*--state"):
        Journal(tmp_path)
    holder.close()
    Journal(tmp_path).close()


def test_a_newer_journal_is_refused_and_left_alone(tmp_path):
    Journal(tmp_path).close()
    with sqlite3.connect(tmp_path / FILE) as connection:
        connection.execute(f"PRAGMA user_version = {VERSION + 1}")
    connection.close()
    before = (tmp_path / FILE).read_bytes()
    with pytest.raises(MasterStartError, match=f"has version {VERSION + 1}, this edl-torch knows {VERSION}"):
        Journal(tmp_path)
    assert (tmp_path / FILE).read_bytes() == before


def test_a_database_of_something_else_is_refused(tmp_path):
    with sqlite3.connect(tmp_path / FILE) as connection:
        connection.execute("CREATE TABLE recipes (name)")
    connection.close()
    with pytest.raises(MasterStartError, match="something else"):
        Journal(tmp_path)


@pytest.mark.parametrize("content", [b"rubbish" * 1000, b"SQLite format 3\0" + b"\1" * 5000])
def test_a_damaged_file_is_refused(tmp_path, content):
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(MasterStartError, match="cannot use the journal"):
        Journal(tmp_path)
    (tmp_path / FILE).unlink()
    Journal(tmp_path).close()  # the lock was let go


def cut(path):
    os.truncate(path, 0)


@pytest.mark.parametrize("lose", [cut, os.unlink])
@pytest.mark.parametrize("left", [[LOCK], [LOG], [LOCK, LOG]])
def test_no_new_journal_takes_the_place_of_one_that_is_gone(tmp_path, lose, left):
    before = Journal(tmp_path / "state")
    before.write(encoded(rows(10)))
    shutil.copytree(tmp_path / "state", tmp_path / "killed")  # as one that nobody closed leaves it
    before.close()
    lose(tmp_path / "killed" / FILE)
    for name in {LOCK, LOG} - set(left):
        (tmp_path / "killed" / name).unlink()
    log = [(tmp_path / "killed" / name).read_bytes() for name in left if name == LOG]
    for _ in range(2):
        with pytest.raises(MasterStartError, match="is missing or empty, and the state of a master"):
            Journal(tmp_path / "killed")
    assert [(tmp_path / "killed" / name).read_bytes() for name in left if name == LOG] == log


def test_an_empty_file_that_nothing_was_written_to_becomes_a_journal(tmp_path):
    """So a master leaves it that dies while it makes one."""
    Journal(tmp_path).close()
    cut(tmp_path / FILE)
    journal = Journal(tmp_path)
    assert journal.is_new
    journal.close()


def test_rows_that_make_no_sense_are_refused(tmp_path):
    journal = Journal(tmp_path)
    journal.write(encoded({("surprise",): (1,)}))
    journal.close()
    with pytest.raises(MasterStartError, match="damaged"):
        DurableState(tmp_path, now=0.0)
    with pytest.raises(MasterStartError, match="damaged"):
        DurableState(tmp_path, now=0.0)  # not: used by another master


def test_a_file_in_the_folders_place(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MasterStartError, match="cannot keep a journal"):
        Journal(tmp_path / "file")


# Size -----------------------------------------------------------------------------------------------------


def size_of(folder):
    return sum(path.stat().st_size for path in folder.iterdir() if not path.name.endswith("-shm"))


def test_the_file_is_as_large_as_what_is_in_flight(journal):
    """A hundred thousand leases come and go; then there are few."""
    for number in range(100):
        journal.write(encoded(rows(1000, number * 1000) | gone(1000, (number - 1) * 1000)))
    assert size_of(journal.folder) < 2 * WAL_BYTES
    journal.write(encoded(gone(1000, 99_000)))
    for number in range(20):
        journal.write(encoded(rows(1, number)))
    journal.close()
    assert size_of(journal.folder) < 2 << 20


def test_a_large_burst_is_given_back_to_the_disk(journal):
    journal.write(encoded(rows(50_000)))
    for number in range(0, 50_000, 1000):
        journal.write(encoded(gone(1000, number)))
    for number in range(50):
        journal.write(encoded(rows(1, number)))
    journal.close()
    assert size_of(journal.folder) < 3 << 20


# Failures -------------------------------------------------------------------------------------------------


def test_a_full_disk_loses_nothing_written_and_says_so(tmp_path):
    def small(path):
        connection = connect(path)
        connection.execute("PRAGMA max_page_count = 20")
        return connection

    journal = Journal(tmp_path, connect=small)
    journal.write(encoded(rows(10)))
    with pytest.raises(JournalError, match=rf"cannot write the journal in {tmp_path}: .*full.*--state"):
        journal.write(encoded(rows(10_000, 10)))
    journal.write(encoded(gone(1)))
    journal.close()
    again = Journal(tmp_path)
    assert len(again.read()) == 9
    again.close()


class FaultyConnection(sqlite3.Connection):
    """Fails at one kind of statement."""

    fail_at = ""

    def execute(self, statement, *parameters):
        if self.fail_at and statement.startswith(self.fail_at):
            raise sqlite3.OperationalError("disk I/O error")
        return super().execute(statement, *parameters)


@pytest.mark.parametrize("statement", ["INSERT", "PRAGMA freelist_count"])
def test_a_failure_at_any_statement_writes_nothing(tmp_path, statement):
    made = []

    def faulty(path):
        made.append(
            sqlite3.connect(path, isolation_level=None, check_same_thread=False, factory=FaultyConnection)
        )
        return made[0]

    journal = Journal(tmp_path, connect=faulty)
    for _ in range(LOOK_EVERY):  # so that the next one looks for free pages
        journal.write(encoded(rows(3)))
    made[0].fail_at = statement
    with pytest.raises(JournalError, match="disk I/O error"):
        journal.write(encoded(rows(3, 3) | gone(1)))
    made[0].fail_at = ""
    assert len(journal.read()) == 3
    journal.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_refused(tmp_path):
    tmp_path.chmod(0o555)
    with pytest.raises(MasterStartError, match="Permission denied"):
        Journal(tmp_path)
    tmp_path.chmod(0o755)
