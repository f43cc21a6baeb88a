"""One way to say which files are meant: paths, URLs, folders, globs, ranges, lists."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from edl_torch.errors import DataFormatError, InvalidArgument
from edl_torch.readers import CsvReader, RecordIODataReader, TextReader, open_reader
from edl_torch.readers.shared.finder import Finder
from edl_torch.readers.shared.sources import FilesReader
from edl_torch.readers.storage import Storage

TOP = ["a-00.tar", "a-01.tar", "b-2.TAR", "c.txt", "x1.tar", "x[1].tar", "{y}.tar"]
BELOW = ["_k=1/l.tar", "deep/d.tar", "g1/m.tar", "g[1]/n.tar"]
NAMES = [*TOP, *BELOW, "deep/.e/f.tar", ".g.tar", "_h.tar", "_i/j.tar", ".k/l.tar"]
TARS_OF_TOP = "a-00.tar a-01.tar b-2.TAR x1.tar x[1].tar {y}.tar"
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
        (".", TARS_OF_TOP),
        ("a-*.tar", "a-00.tar a-01.tar"),
        ("*.[tT]*[rR]", TARS_OF_TOP),
        ("*/*.tar", " ".join(BELOW)),
        ("**/[!a-c]*.tar", " ".join(sorted([*BELOW, "x1.tar", "x[1].tar", "{y}.tar"]))),
        ("**/[dj].*", "deep/d.tar"),
        ("_i/*.tar", "_i/j.tar"),
        ("_*/?.tar", "_i/j.tar _k=1/l.tar"),
        ("x[1].tar", "x[1].tar"),
        ("x[12].tar", "x1.tar"),
        ("g[1]", "g[1]/n.tar"),
        ("g[1]/*", "g1/m.tar"),
        ("{y}.tar", "{y}.tar"),
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
    assert found == [f"{base}/{name}" for name in sorted([*TOP, *BELOW]) if name != "c.txt"]
    for pattern, names in {
        "de*": ["deep/d.tar"],
        "*/": BELOW,
        "**/?*[1p]": BELOW[:3],
        "d*/**": ["deep/d.tar"],
        "g[1]": ["g[1]/n.tar"],
    }.items():
        found = Finder(suffixes=(".tar",), deep=True).files(f"{base}/{pattern}", Storage())
        assert found == [f"{base}/{name}" for name in names], pattern


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


def test_no_file_at_all_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="the list of data files is empty"):
        TARS.files([])


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (CsvReader, "a.csv a.tsv b.csv.gz"),
        (TextReader, "a.jsonl a.ndjson a.txt"),
        (RecordIODataReader, "a.csv a.jsonl a.ndjson a.recordio a.tsv a.txt b.csv.gz deep/c.recordio"),
    ],
)
def test_each_reader_knows_its_files_in_a_folder(
    tmp_path: Path, kind: type[FilesReader[Any]], found: str
) -> None:
    for name in (
        "a.csv",
        "a.tsv",
        "b.csv.gz",
        "a.txt",
        "a.jsonl",
        "a.ndjson",
        "a.recordio",
        "deep/c.recordio",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    for name in ("_SUCCESS", ".hidden.csv", "a.csv.rows1.edl-index"):
        (tmp_path / name).write_bytes(b"x")
    assert kind.finder.files(tmp_path) == [f"{tmp_path}/{name}" for name in found.split()]


def test_a_file_that_is_called_as_a_range_or_a_glob_is_that_file(tmp_path: Path) -> None:
    for name in ("{0..1}.tar", "a[1]*.tar", "a1b.tar"):
        (tmp_path / name).write_bytes(b"x")
        assert TARS.files(tmp_path / name) == [str(tmp_path / name)]


def test_a_manifest_names_files_below_its_folder(base: str, tmp_path: Path) -> None:
    text = "\ufeff# shards\r\n\r\n  b-2.TAR \r\na-{00..01}.tar\r\ndeep\r\n"
    manifest = f"{base}/files.list"
    Storage().put(manifest, text.encode())
    names = ["b-2.TAR", "a-00.tar", "a-01.tar", "deep/d.tar"]
    assert TARS.files(f"@{manifest}", Storage()) == [f"{base}/{name}" for name in names]
    Storage().put(manifest, b"\xff\xfe")
    with pytest.raises(DataFormatError, match=r"files.list' is not UTF-8"):
        TARS.files(f"@{manifest}", Storage())
    with pytest.raises(DataFormatError, match=r"the manifest '.*none.list' does not exist; check the path"):
        TARS.files(f"@{base}/none.list", Storage())
    (tmp_path / "@a.tar").write_bytes(b"x")
    assert TARS.files(tmp_path / "@a.tar") == [str(tmp_path / "@a.tar")], "a file that is called so is it"


def test_folders_of_partitions_count_and_loops_of_links_end(tmp_path: Path) -> None:
    for name in ("_day=1/a.tar", "_gone/b.tar", "x/c.tar"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "x" / "again").symlink_to(tmp_path)
    (tmp_path / "x" / "other").symlink_to(tmp_path / "_gone")
    found = Finder(suffixes=(".tar",), deep=True).files(tmp_path)
    assert found == [f"{tmp_path}/{name}" for name in ("_day=1/a.tar", "x/c.tar", "x/other/b.tar")]


def test_a_file_that_is_listed_twice_is_seen_however_its_path_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.tar").write_bytes(b"x")
    (tmp_path / "soft.tar").symlink_to("a.tar")
    (tmp_path / "hard.tar").hardlink_to(tmp_path / "a.tar")
    monkeypatch.chdir(tmp_path)
    for other in (
        "./a.tar",
        "soft.tar",
        "hard.tar",
        str(tmp_path / "a.tar"),
        f"file://{tmp_path}/a.tar",
        f"../{tmp_path.name}/a.tar",
    ):
        with pytest.raises(DataFormatError, match=r"'a\.tar' is listed twice"):
            TARS.files(["a.tar", other], Storage())
    with pytest.raises(
        DataFormatError, match=r"a\.tar' is listed twice, as '.*hard\.tar' too, which is the same"
    ):
        TARS.files(tmp_path)


@pytest.mark.parametrize(
    ("url", "other"),
    [
        ("http://store.net/a b.tar", "HTTP://Store.net//a%20b.tar"),
        ("s3://bucket/a.tar", "S3a://bucket//a.tar"),
        ("memory://a.tar", "memory:///a.tar"),
    ],
)
def test_an_object_that_is_listed_twice_is_seen_however_its_url_is_written(url: str, other: str) -> None:
    with pytest.raises(DataFormatError, match=r"is listed twice, as"):
        TARS.files([url, other], Storage())
    assert len(TARS.files([url, url.replace(".tar", "2.tar")], Storage())) == 2


def test_links_to_nothing_and_pipes_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, target in {"gone.tar": "nowhere", "one.tar": "two.tar", "two.tar": "one.tar"}.items():
        (tmp_path / name).symlink_to(target)
    os.mkfifo(tmp_path / "pipe.tar")
    for name, said in {
        "gone.tar": "'gone.tar' is a link to 'nowhere', which leads nowhere",
        "one.tar": "'one.tar' is a link to 'two.tar', which leads back to itself",
        "pipe.tar": "'pipe.tar' is no regular file, but a pipe",
        "g*.tar": "'gone.tar' is a link to 'nowhere'",
    }.items():
        with pytest.raises(DataFormatError, match=re.escape(said)):
            TARS.files(name)
        with pytest.raises(DataFormatError, match=re.escape(said)):
            open_reader(name)
