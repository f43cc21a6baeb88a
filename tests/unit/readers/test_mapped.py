"""What an index is kept in: arrays and strings in files, shared by processes, locked, whole or not at all."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edl_torch.errors import DataFormatError, SourceChanged
from edl_torch.readers import ImageManifestReader
from edl_torch.readers.shared import files as module
from edl_torch.readers.shared.files import file_lock
from edl_torch.readers.shared.mapped import SPILL_BYTES, MappedArrays, StringTable, shared, write_arrays
from edl_torch.system.whole_files import whole_file
from edl_torch.testing import FakeClock

ARRAYS = {
    "offsets": np.arange(1000, dtype=np.int64),
    "empty": np.empty((0, 3), dtype=np.uint32),
    "table": np.arange(12, dtype=np.float32).reshape(3, 4),
    "scalar": np.array(7, dtype=np.uint8),
}


def test_arrays_are_aligned(tmp_path: Path) -> None:
    write_arrays(tmp_path / "a", {"odd": np.zeros(3, np.uint8), "next": np.zeros(5)}, {})
    assert MappedArrays(tmp_path / "a")["next"].ctypes.data % 64 == 0


def test_a_pickle_is_a_path(tmp_path: Path) -> None:
    write_arrays(tmp_path / "a", ARRAYS)
    mapped = MappedArrays(tmp_path / "a")
    assert mapped["offsets"][999] == 999
    data = pickle.dumps(mapped)
    assert len(data) < 300
    assert pickle.loads(data)["offsets"][999] == 999


def test_a_copy_refuses_the_index_of_other_data(tmp_path: Path) -> None:
    write_arrays(tmp_path / "a", ARRAYS, {"size": 1})
    copy = pickle.loads(pickle.dumps(MappedArrays(tmp_path / "a", {"size": 1})))
    write_arrays(tmp_path / "a", ARRAYS, {"size": 2})
    with pytest.raises(SourceChanged, match="other data"):
        copy["offsets"]


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b'{"what": "else"}\n', b"[1]\n"])
def test_a_foreign_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(DataFormatError, match="no index of this version"):
        MappedArrays(tmp_path / "a")["offsets"]


def _answer(mapped: MappedArrays, answers: Connection) -> None:
    answers.send((int(mapped["offsets"][-1]), _is_mapped("edl_torch-here-") or _is_mapped("(deleted)")))


def _is_mapped(part: str) -> bool:
    maps = Path("/proc/self/maps")
    return not maps.exists() or part in maps.read_text()


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_started_processes_map_a_spilled_file(method: str) -> None:
    mapped = MappedArrays.spill(ARRAYS, label="here")
    context = multiprocessing.get_context(method)
    for _ in range(2):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_answer, args=(mapped, sender))
        process.start()
        assert receiver.poll(60)
        assert receiver.recv() == (999, True)
        process.join(timeout=30)
        assert process.exitcode == 0
    assert mapped["offsets"][999] == 999, "the child's end took nothing from its parent"


def test_a_spilled_file_has_no_name_that_a_killed_process_could_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mapped = MappedArrays.spill(ARRAYS)
    assert os.listdir(tmp_path) == []
    assert mapped["offsets"][999] == 999


def test_a_pickle_for_elsewhere_holds_the_arrays() -> None:
    """A process that was not started by this one, on another machine perhaps."""
    mapped = MappedArrays.spill(ARRAYS)
    data = pickle.dumps(mapped)
    del mapped
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer)['offsets'][-1])"
    done = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, check=True)
    assert done.stdout.strip() == b"999"


def test_the_descriptor_goes_with_the_object() -> None:
    mapped = MappedArrays.spill(ARRAYS)
    descriptor = mapped._descriptor
    assert descriptor is not None
    os.fstat(descriptor)
    del mapped
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


# A large index is one file for all processes: small in a pickle, and no memory of a worker's own ------------


FILES = 150_000


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> ImageManifestReader:
    """A list of many files, none of which exists: names of 29 bytes, bounds and labels of 8."""
    path = tmp_path_factory.mktemp("many") / "list.csv"
    path.write_text("".join(f"folder-{n % 100:02}/image-{n:011}.jpg,{n % 7}\n" for n in range(FILES)))
    return ImageManifestReader(path, has_header=False)


def test_small_arrays_stay_in_memory_and_large_ones_are_mapped():
    small = {"a": np.zeros(SPILL_BYTES, np.uint8)}
    assert shared(small, "x") == small
    large = shared({**small, "b": np.arange(3)}, "x")
    assert isinstance(large, MappedArrays)
    assert large["b"].tolist() == [0, 1, 2]


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


def measure(reader: ImageManifestReader | None, answers: Connection) -> None:
    import edl_torch.readers.images.manifest  # noqa: F401  what a reader's pickle imports, for both

    if reader is not None:
        assert reader.image_files.names[FILES - 1].endswith(f"image-{FILES - 1:011}.jpg")
        assert sum(len(name) for name in reader.image_files.names) > FILES * 25, "every page is touched"
        assert int(reader._labels["labels"].sum()) > FILES
    answers.send(anonymous_bytes())


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux' account of memory")
@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_a_workers_own_memory_does_not_grow_with_the_index(manifest, method):
    context = multiprocessing.get_context(method)
    used = []
    for reader in (None, manifest):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=measure, args=(reader, sender))
        process.start()
        assert receiver.poll(60)
        used.append(receiver.recv())
        process.join(timeout=30)
    assert used[1] - used[0] < 3 << 20, f"{used} bytes, the index has {FILES * 45}"


def test_without_room_for_a_file_the_index_stays_in_memory(monkeypatch, caplog):
    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    with caplog.at_level(logging.WARNING):
        table = StringTable(str(n) for n in range(200_000))
    assert table[199_999] == "199999"
    assert "TMPDIR names another folder" in caplog.text


# String table -----------------------------------------------------------------------------------------------


anything = st.text(st.characters(exclude_categories=()))


@given(st.lists(anything))
def test_strings_come_back_as_they_were(strings):
    table = pickle.loads(pickle.dumps(StringTable(strings)))
    assert list(table) == strings
    assert [table[index] for index in range(len(table))] == strings


def test_pickle_costs_eight_bytes_an_entry_and_the_text():
    table = StringTable(f"{number:012d}.jpg" for number in range(100_000))
    assert len(pickle.dumps(table)) < 100_000 * (16 + 8) + 1000


# Files that appear whole or not at all ----------------------------------------------------------------------


def test_it_has_its_name_at_the_end_alone(tmp_path: Path) -> None:
    target = tmp_path / "x"
    target.write_bytes(b"old")
    with whole_file(target, mtime_ns=5 * 10**9) as file:
        file.write(b"new")
        assert target.read_bytes() == b"old"
        assert all(name == "x" or name.startswith(".") for name in os.listdir(tmp_path)), "no data yet"
    assert target.read_bytes() == b"new"
    assert target.stat().st_mtime_ns == 5 * 10**9
    assert os.listdir(tmp_path) == ["x"]


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), whole_file(tmp_path / "x") as file:
        file.write(b"half" * (1 // 0))
    assert os.listdir(tmp_path) == ["x"]
    assert (tmp_path / "x").read_bytes() == b"old"


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_others_may_read_it_as_they_may_any_new_file(tmp_path: Path, umask: int, mode: int) -> None:
    """Users who share a folder of indexes would else build each other's anew."""
    before = os.umask(umask)
    try:
        with whole_file(tmp_path / "x"):
            pass
    finally:
        os.umask(before)
    assert (tmp_path / "x").stat().st_mode & 0o777 == mode


def test_it_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda number: (done.append("sync"), fsync(number)))
    monkeypatch.setattr(os, "replace", lambda *names: (done.append("name"), replace(*names)))
    with whole_file(tmp_path / "x") as file:
        file.write(b"data")
    assert done == ["sync", "name"]


# Locks of what a machine makes once: they end with their holder, and never stop anybody for good ------------


def lock_of(place: Path) -> Path:
    return place.with_name(f".{place.name}.lock")


def test_nothing_is_left_whether_the_block_ends_well_or_not(tmp_path: Path) -> None:
    with file_lock(tmp_path / "x"):
        assert lock_of(tmp_path / "x").exists()
    with pytest.raises(ZeroDivisionError), file_lock(tmp_path / "x"):
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == []


def test_two_places_do_not_wait_for_each_other(tmp_path: Path) -> None:
    with file_lock(tmp_path / "x"), file_lock(tmp_path / "y", sleep=_must_not_wait):
        pass


def _must_not_wait(seconds: float) -> None:
    raise AssertionError("waited")


def test_threads_are_inside_one_at_a_time(tmp_path: Path) -> None:
    inside, most = 0, 0

    def enter() -> None:
        nonlocal inside, most
        for _ in range(20):
            with file_lock(tmp_path / "x", sleep=lambda seconds: None):
                inside += 1
                most = max(most, inside)
                time.sleep(0.001)
                inside -= 1

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (inside, most) == (0, 1)


def test_a_holder_that_is_killed_lets_go(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    held = context.Event()
    process = context.Process(target=_hold_for_ever, args=(tmp_path / "x", held), daemon=True)
    process.start()
    assert held.wait(60)
    pauses: list[float] = []

    def kill(seconds: float) -> None:
        pauses.append(seconds)
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join(60)

    with file_lock(tmp_path / "x", sleep=kill):
        assert len(pauses) == 1, "it was held"


def _hold_for_ever(place: Path, held: Any) -> None:
    with file_lock(place):
        held.set()
        signal.pause()


def test_a_child_that_was_forked_meanwhile_does_not_hold_it(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    end = context.Event()
    with file_lock(tmp_path / "x"):
        child = context.Process(target=end.wait, daemon=True)
        child.start()
    with file_lock(tmp_path / "x", sleep=_must_not_wait):
        pass
    end.set()
    child.join(60)


def test_patience_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    with caplog.at_level(logging.INFO), file_lock(tmp_path / "x"):
        with file_lock(tmp_path / "x", patience_s=30, clock=clock, sleep=clock.advance):
            assert 30 < clock() - 1000 < 31
        assert lock_of(tmp_path / "x").exists(), "it is the other's"
    said = [record.levelname for record in caplog.records]
    assert said == ["INFO", "WARNING"]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(descriptor: int, how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(module.fcntl, "flock", refuse)
    before = len(os.listdir("/proc/self/fd"))
    with file_lock(tmp_path / "x", sleep=_must_not_wait):
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_folder_that_is_not_there_stops_nobody(tmp_path: Path) -> None:
    with file_lock(tmp_path / "nowhere" / "x", sleep=_must_not_wait):
        assert os.listdir(tmp_path) == []
