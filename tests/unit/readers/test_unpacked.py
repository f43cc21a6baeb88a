"""Packed text: unpacked once, whole or not at all, whoever comes first."""

from __future__ import annotations

import errno
import gzip
import multiprocessing
import os
from pathlib import Path

import pytest
from readers_kit import everything

from edl_torch.errors import DataFormatError, ReaderError, SourceChanged
from edl_torch.readers import TextReader
from edl_torch.readers.shared.files import FileStamp
from edl_torch.readers.storage import Storage
from edl_torch.readers.text import text_reader as module
from edl_torch.readers.text.text_reader import unpacked_copy

LINES = [f"line {number}" for number in range(3000)]
TEXT = "\n".join(LINES).encode()


def write(folder: Path, *members: bytes, name: str = "lines.txt.gz") -> str:
    path = folder / name
    path.write_bytes(b"".join(gzip.compress(member) for member in members))
    return str(path)


def test_a_packed_file_by_another_name_is_known_by_its_bytes(tmp_path):
    assert everything(TextReader(write(tmp_path, TEXT, name="lines.txt"))) == LINES


@pytest.mark.parametrize("damage", ["cut", "gone", "newer", "no note"])
def test_a_copy_that_is_not_as_it_was_left_is_made_again(tmp_path, damage):
    path = write(tmp_path, TEXT)
    first = unpacked_copy(FileStamp.of(path), Storage(index_dir=tmp_path / "index"))
    if damage == "cut":
        os.truncate(first.path, 100)
        os.utime(first.path, ns=(first.mtime_ns, first.mtime_ns))
    elif damage == "gone":
        os.remove(first.path)
    elif damage == "newer":
        Path(first.path).write_bytes(TEXT[::-1])
    else:
        Path(first.path).with_suffix(".note").unlink()
    assert unpacked_copy(FileStamp.of(path), Storage(index_dir=tmp_path / "index")) == first
    assert Path(first.path).read_bytes() == TEXT


def test_the_copy_of_a_newer_file_takes_the_place_of_the_old_one(tmp_path):
    path = write(tmp_path, TEXT)
    reader = TextReader(path, index_dir=tmp_path / "index")
    write(tmp_path, TEXT + b"\nmore")
    assert everything(TextReader(path, index_dir=tmp_path / "index")) == [*LINES, "more"]
    assert len(list((tmp_path / "index").glob("*.data"))) == 1
    with pytest.raises(SourceChanged, match=r"has changed since it was looked at"):
        everything(reader)


def test_another_file_with_the_old_ones_time_is_unpacked(tmp_path):
    path = write(tmp_path, TEXT)
    old = FileStamp.of(path)
    assert everything(TextReader(path, index_dir=tmp_path / "index")) == LINES
    write(tmp_path, TEXT + b"\n" + TEXT[::-1])
    os.utime(path, ns=(old.mtime_ns, old.mtime_ns))
    assert len(everything(TextReader(path, index_dir=tmp_path / "index"))) == 2 * len(LINES)


def test_a_file_system_that_rounds_times_unpacks_once(tmp_path, monkeypatch):
    path = write(tmp_path, TEXT)
    utime = os.utime
    monkeypatch.setattr(os, "utime", lambda path, ns: utime(path, ns=tuple(n - n % 10**9 for n in ns)))
    first = unpacked_copy(FileStamp.of(path), Storage(index_dir=tmp_path / "index"))
    assert first.mtime_ns % 10**9 == 0
    made = os.stat(first.path).st_ino
    assert unpacked_copy(FileStamp.of(path), Storage(index_dir=tmp_path / "index")) == first
    assert os.stat(first.path).st_ino == made


DAMAGES = {
    **{f"cut at {keep}": lambda data, keep=keep: data[:keep] for keep in (12, 200, -4)},
    "another CRC": lambda data: data[:-6] + bytes([data[-6] ^ 1]) + data[-5:],
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_packed_file_that_is_damaged_is_never_taken_for_whole(tmp_path, how):
    path = write(tmp_path, TEXT)
    Path(path).write_bytes(DAMAGES[how](Path(path).read_bytes()))
    with pytest.raises(DataFormatError, match=r"lines.txt.gz' is no whole gzip file: .*; copy it again"):
        TextReader(path, index_dir=tmp_path / "index")
    assert not list((tmp_path / "index").iterdir())


def test_a_full_disk_leaves_nothing_and_says_where_to_go(tmp_path, monkeypatch):
    path = write(tmp_path, TEXT)

    def full(source, target, length):
        target.write(source.read(100))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module.shutil, "copyfileobj", full)
    with pytest.raises(
        ReaderError, match=r"cannot be unpacked into .*: No space left on device; .* EDL_INDEX_DIR"
    ):
        TextReader(path, index_dir=tmp_path / "index")
    assert not list((tmp_path / "index").iterdir())


def test_several_processes_that_start_at_once_unpack_once(tmp_path):
    path = write(tmp_path, TEXT * 50)
    context = multiprocessing.get_context("fork")
    with context.Pool(4) as pool:
        found = pool.starmap(_count_unpacking, [(path, str(tmp_path / "index"))] * 4, chunksize=1)
    assert len({stamp for stamp, _ in found}) == 1
    assert sum(unpacked for _, unpacked in found) == 1


def _count_unpacking(path: str, index_dir: str) -> tuple[FileStamp, int]:
    unpack, calls = module._unpack, []

    def counted(packed: FileStamp, place: Path, storage: Storage) -> None:
        calls.append(place)
        unpack(packed, place, storage)

    module._unpack = counted
    try:
        return unpacked_copy(FileStamp.of(path), Storage(index_dir=index_dir)), len(calls)
    finally:
        module._unpack = unpack
