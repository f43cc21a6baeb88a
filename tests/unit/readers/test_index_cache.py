"""Kept indexes: built once for one state of a file, and never used for another."""

import logging
import multiprocessing
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl_torch.errors import SourceChanged
from edl_torch.readers.shared.mapped import BESIDE, Array, FileStamp, cached_index


class Builder:
    """Counts how often an index was built."""

    def __init__(self) -> None:
        self.built = 0

    def __call__(self) -> Mapping[str, Array]:
        self.built += 1
        return {"n": np.full(3, self.built)}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data" / "x.bin"
    path.parent.mkdir()
    path.write_bytes(b"12345")
    return path


def test_an_index_is_built_once(data: Path, tmp_path: Path) -> None:
    build = Builder()
    for _ in range(2):
        index = cached_index(FileStamp.of(data), "kind1", build, index_dir=tmp_path / "away" / "deep")
        assert index["n"].tolist() == [1, 1, 1]
    assert build.built == 1
    assert os.listdir(data.parent) == ["x.bin"]


def test_the_environment_names_the_folder(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDL_INDEX_DIR", str(tmp_path / "env"))
    index = cached_index(FileStamp.of(data), "kind1", Builder())
    assert Path(index.path).parent == tmp_path / "env"
    monkeypatch.delenv("EDL_INDEX_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    index = cached_index(FileStamp.of(data), "kind1", Builder())
    assert Path(index.path).parent == tmp_path / "cache" / "edl_torch"


def test_a_user_without_a_home_has_a_folder_all_the_same(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("EDL_INDEX_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    index = cached_index(FileStamp.of(data), "kind1", Builder())
    assert Path(index.path).parent == tmp_path / f"edl_torch-{os.getuid()}"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, like `/tmp`, of a user without a home."""

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("EDL_INDEX_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


STRANGER = 4711
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's files")


def planted(data: Path, folder: Path) -> Path:
    """An index of the data that says 99, where the index of a user without a home lies."""
    folder.mkdir(mode=0o700)
    index = cached_index(FileStamp.of(data), "kind1", lambda: {"n": np.full(3, 99)}, index_dir=folder)
    return Path(index.path)


def assert_not_read(data: Path, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    build = Builder()
    for _ in range(2):
        index = cached_index(FileStamp.of(data), "kind1", build)
        assert index["n"].tolist() == [1, 1, 1]
    assert build.built == 1
    own = Path(index.path).parent
    assert own != folder
    assert own.stat().st_mode & 0o777 == 0o700
    told = [record.getMessage() for record in caplog.records if "EDL_INDEX_DIR" in record.getMessage()]
    assert len(told) == 1
    assert f"'{folder}' is not this user's alone" in told[0]
    assert str(own) in told[0]


def test_the_folder_among_temporary_files_is_for_its_user_alone(data: Path, temporary: Path) -> None:
    build = Builder()
    for _ in range(2):
        index = cached_index(FileStamp.of(data), "kind1", build)
    assert build.built == 1
    folder = Path(index.path).parent
    assert folder == temporary / f"edl_torch-{os.getuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700


@needs_root
def test_an_index_that_another_user_has_planted_is_not_read(
    data: Path, temporary: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = temporary / f"edl_torch-{os.getuid()}"
    os.chown(planted(data, folder), STRANGER, -1)
    os.chown(folder, STRANGER, -1)
    assert_not_read(data, folder, caplog)


def test_a_folder_that_others_can_write_to_is_not_used(
    data: Path, temporary: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = temporary / f"edl_torch-{os.getuid()}"
    planted(data, folder)
    folder.chmod(0o770)
    assert_not_read(data, folder, caplog)


def test_a_link_instead_of_the_folder_is_not_followed(
    data: Path, temporary: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    planted(data, tmp_path / "elsewhere")
    folder = temporary / f"edl_torch-{os.getuid()}"
    folder.symlink_to(tmp_path / "elsewhere")
    assert_not_read(data, folder, caplog)


@needs_root
def test_a_folder_that_is_named_may_be_another_users(
    data: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index that an administrator has made for all: the one who names the folder trusts it."""
    folder = temporary / "indexes"
    os.chown(planted(data, folder), STRANGER, -1)
    os.chown(folder, STRANGER, -1)
    monkeypatch.setenv("EDL_INDEX_DIR", str(folder))
    assert cached_index(FileStamp.of(data), "kind1", Builder())["n"].tolist() == [99, 99, 99]


def test_an_index_may_lie_beside_its_data(data: Path) -> None:
    index = cached_index(FileStamp.of(data), "kind1", Builder(), index_dir=BESIDE)
    assert index.path == f"{data}.kind1.edl-index"


@pytest.mark.parametrize("change", ["size", "time", "kind", "options"])
def test_another_file_kind_or_option_builds_anew(data: Path, tmp_path: Path, change: str) -> None:
    build = Builder()
    cached_index(FileStamp.of(data), "kind1", build, index_dir=tmp_path / "i", options="a")
    if change == "size":
        data.write_bytes(b"123456")
    elif change == "time":
        os.utime(data, ns=(1, 1))
    kind = "kind2" if change == "kind" else "kind1"
    options = "b" if change == "options" else "a"
    index = cached_index(FileStamp.of(data), kind, build, index_dir=tmp_path / "i", options=options)
    assert index["n"].tolist() == [2, 2, 2]


def test_two_files_of_one_name_have_two_indexes(data: Path, tmp_path: Path) -> None:
    other = tmp_path / "x.bin"
    other.write_bytes(b"12345")
    build = Builder()
    indexes = [cached_index(FileStamp.of(p), "kind1", build, index_dir=tmp_path / "i") for p in (data, other)]
    assert [index["n"][0] for index in indexes] == [1, 2]


def test_a_broken_index_is_built_again(data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build = Builder()
    index = cached_index(FileStamp.of(data), "kind1", build, index_dir=tmp_path / "i")
    Path(index.path).write_bytes(Path(index.path).read_bytes()[:-40])
    assert cached_index(FileStamp.of(data), "kind1", build, index_dir=tmp_path / "i")["n"][0] == 2
    assert "cut short" in caplog.text


def test_without_a_folder_to_write_in_the_index_is_temporary(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    with caplog.at_level(logging.WARNING):
        index = cached_index(FileStamp.of(data), "kind1", Builder(), index_dir=tmp_path / "file" / "i")
    assert index["n"].tolist() == [1, 1, 1]
    assert "EDL_INDEX_DIR" in caplog.text


def test_data_that_changes_while_it_is_indexed_is_refused(data: Path, tmp_path: Path) -> None:
    def build() -> Mapping[str, Array]:
        data.write_bytes(b"changed under us")
        return {"n": np.zeros(1)}

    with pytest.raises(SourceChanged, match="has changed"):
        cached_index(FileStamp.of(data), "kind1", build, index_dir=tmp_path / "i")
    assert not list((tmp_path / "i").iterdir())


def test_a_stamp_tells_that_its_file_is_gone(data: Path) -> None:
    stamp = FileStamp.of(data)
    stamp.check()
    data.unlink()
    with pytest.raises(SourceChanged, match="is gone"):
        stamp.check()


def test_several_processes_that_start_at_once_build_once(data: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, folder = context.Barrier(4), tmp_path / "i"
    processes = [context.Process(target=_index_once, args=(data, folder, barrier)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    assert len(list(tmp_path.glob("built-by-*"))) == 1
    assert [path.suffix for path in folder.iterdir()] == [".edl-index"], "no lock is left"


def _index_once(data: Path, folder: Path, barrier: Any) -> None:
    def build() -> Mapping[str, Array]:
        (folder.parent / f"built-by-{os.getpid()}").touch()
        time.sleep(0.2)  # without a lock the others come meanwhile
        return {"n": np.full(3, 7)}

    barrier.wait(60)
    assert cached_index(FileStamp.of(data), "kind1", build, index_dir=folder)["n"].tolist() == [7, 7, 7]
