"""One way to say which files are meant: paths, URLs, folders, globs, ranges, lists."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from edl_torch.errors import DataFormatError, InvalidArgument
from edl_torch.readers.shared.finder import Finder, expanded
from edl_torch.readers.storage import Storage

TOP = ["a-00.tar", "a-01.tar", "b-2.TAR", "c.txt", "x[1].tar"]
NAMES = [*TOP, "deep/d.tar", "deep/.e/f.tar", ".g.tar", "_h.tar"]
TARS = Finder(suffixes=(".tar",))


@pytest.fixture(params=["here", "memory", "file"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "memory":
        store = fsspec.filesystem("memory")
        store.pipe({f"/found/{name}": b"x" for name in NAMES})
        yield "memory://found"
        store.rm("/found", recursive=True)
        return
    for name in NAMES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    yield f"file://{tmp_path}" if request.param == "file" else str(tmp_path)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (".", "a-00.tar a-01.tar b-2.TAR x[1].tar"),
        ("a-*.tar", "a-00.tar a-01.tar"),
        ("*.tar", "a-00.tar a-01.tar x[1].tar"),
        ("*/*.tar", "deep/d.tar"),
        ("a-{00..01}.tar", "a-00.tar a-01.tar"),
        ("{b-2.TAR,a-01.tar}", "b-2.TAR a-01.tar"),
        ("b-{2..2}.TAR", "b-2.TAR"),
    ],
)
def test_the_same_files_are_meant_here_and_in_a_store(base: str, data: str, expected: str) -> None:
    name = base if data == "." else f"{base}/{data}"
    assert TARS.files(name, Storage()) == [f"{base}/{one}" for one in expected.split()]


def test_folders_below_count_where_they_are_asked_for(base: str) -> None:
    found = Finder(suffixes=(".tar",), deep=True).files(base, Storage())
    assert found == [f"{base}/{name}" for name in sorted([*TOP, "deep/d.tar"]) if name != "c.txt"]


def test_without_suffixes_all_files_are_meant(base: str) -> None:
    assert Finder().files(base, Storage()) == [f"{base}/{name}" for name in TOP]
    assert Finder().files(f"{base}/c.txt", Storage()) == [f"{base}/c.txt"]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("none-*.tar", "has no data file: expected a"),
        ("deep", None),
        ("empty", "'.*empty'"),
        ("a-{05..03}.tar", "a range goes up"),
        ("a-{0..9999999}.tar", "a million names"),
        (["a-00.tar", "a-0{0..1}.tar"], "is listed twice"),
    ],
)
def test_what_is_not_there_is_said(base: str, data: str | list[str], said: str | None) -> None:
    names = [f"{base}/{one}" for one in ([data] if isinstance(data, str) else data)]
    if said is None:
        assert TARS.files(names, Storage()) == [f"{base}/deep/d.tar"]
        return
    with pytest.raises((DataFormatError, InvalidArgument), match=said):
        TARS.files(names, Storage())


def test_a_file_that_is_called_as_a_range_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "{0..1}.tar").write_bytes(b"x")
    assert TARS.files(tmp_path / "{0..1}.tar") == [str(tmp_path / "{0..1}.tar")]


def test_a_url_for_a_reader_of_files_is_refused() -> None:
    with pytest.raises(DataFormatError, match="is a URL, and this reader reads none"):
        TARS.files("s3://bucket/a.tar")


def test_several_braces_are_all_taken_together() -> None:
    assert list(expanded("{a,d}{-0,}{0..1}")) == ["a-00", "a-01", "a0", "a1", "d-00", "d-01", "d0", "d1"]
