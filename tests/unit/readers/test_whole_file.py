"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edl_torch.readers.shared.files import whole_file


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
