"""Samples are those of the `webdataset` package, whoever made the tar; the index is what `tarfile` says."""

from __future__ import annotations

import io
import random
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
from cases import cases
from hypothesis import given
from hypothesis import strategies as st
from readers_kit import (
    BSD_FORMATS,
    GNU_FORMATS,
    PYTHON_FORMATS,
    by_program,
    by_python,
    odd_content,
    of_reader,
    of_webdataset,
)
from tar_files import add

from edl_torch.errors import DataFormatError
from edl_torch.readers import TarReader
from edl_torch.readers.tar.index import BrokenTar, Windowed, members, pass_over
from edl_torch.shard import Shard, Task

MAKERS = {"python": tuple(PYTHON_FORMATS), "tar": GNU_FORMATS, "bsdtar": BSD_FORMATS}


def make(path: Path, maker: str, number: int) -> None:
    chance = random.Random(number)
    content, form = odd_content(chance), chance.choice(MAKERS[maker])
    if maker == "python":
        by_python(path, content, form, chance)
    else:
        by_program(path, content, [maker, f"--format={form}"], chance)


@cases(
    "maker,count", [(maker, 120) for maker in MAKERS], [(maker, n) for maker in MAKERS for n in (120, 600)]
)
def test_samples_are_those_of_webdataset(tmp_path: Path, maker: str, count: int) -> None:
    if maker != "python" and shutil.which(maker) is None:
        pytest.skip(f"no {maker} here")
    path, seen, bad = tmp_path / "a.tar", 0, 0
    for number in range(count):
        make(path, maker, number)
        expected, ended = of_webdataset(path)
        if not expected and not ended:
            with pytest.raises(DataFormatError, match="there is no sample"):
                TarReader(path, decode=False)
            continue
        reader = TarReader(path, decode=False)
        found = of_reader(reader, path)
        assert found[: len(expected)] == expected, number
        assert [list(sample or ()) for sample in found[: len(expected)]] == [*map(list, expected)], number
        if ended:
            assert found[len(expected)] is None, number
        else:
            assert len(found) == len(expected), number
            shard = Shard(name=str(path), start=0, end=len(found))
            assert list(reader.read_records(Task(shard=shard))) == expected, number
        seen, bad = seen + len(expected), bad + ended
    assert seen > 2 * count
    assert bad > count / 200, "names that are there twice"


# The index, against `tarfile` -----------------------------------------------------------------------------

NAMES = st.text(st.sampled_from("ab./_é \n\udcff"), min_size=1, max_size=12) | st.text(
    st.sampled_from("ab./"), min_size=90, max_size=300
)
KINDS = st.sampled_from(
    [tarfile.REGTYPE] * 6 + [tarfile.AREGTYPE, tarfile.CONTTYPE, b"V", b"Z"]
) | st.sampled_from([tarfile.DIRTYPE, tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
MEMBERS = st.lists(st.tuples(NAMES, KINDS, st.sampled_from([0, 1, 511, 512, 513, 20_000])), max_size=8)


def packed(content: list[tuple[str, bytes, int]], form: int) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as tar:
        for name, kind, size in content:
            # The first tars had no type for folders, but a slash at the end of what a header has of the name.
            is_folder = kind == tarfile.AREGTYPE and "/" in name
            data = b"" if is_folder or kind in b"123456" else bytes(size)
            try:
                add(tar, name, data, type=kind, linkname="b", mtime=1.5 if form == tarfile.PAX_FORMAT else 1)
            except ValueError:  # too long for the format
                continue
    return file.getvalue()


def by_tarfile(data: bytes) -> list[tuple[Any, ...]]:
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
        return [(m.name, m.isreg(), m.offset, m.offset_data, m.size) for m in tar]


def by_us(data: bytes) -> list[tuple[Any, ...]]:
    fetch = Windowed(lambda start, end: data[start:end], len(data))
    found = members(fetch, 0, len(data))
    return [(m.name.rstrip("/"), m.is_file, m.start, m.data, m.size) for m in found]


def stripped(found: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """`tarfile` takes slashes off the end of some names."""
    return [(name.rstrip("/"), *rest) for name, *rest in found]


@given(MEMBERS, st.sampled_from(sorted(PYTHON_FORMATS.values())))
def test_members_are_those_of_tarfile(content: list[tuple[str, bytes, int]], form: int) -> None:
    data = packed(content, form)
    assert by_us(data) == stripped(by_tarfile(data))


@given(MEMBERS, st.sampled_from(sorted(PYTHON_FORMATS.values())), st.data())
def test_a_damaged_tar_is_refused_or_is_what_tarfile_says(
    content: list[tuple[str, bytes, int]], form: int, draw: st.DataObject
) -> None:
    """`tarfile` ends without a word at a damaged header; a pass that does not raise has seen all."""
    data = bytearray(packed(content, form))
    for _ in range(draw.draw(st.integers(1, 3))):
        place = draw.draw(st.integers(0, len(data) - 1))
        data[place] = draw.draw(st.integers(0, 255))
    try:
        pass_over(Windowed(lambda a, b: bytes(data[a:b]), len(data)), len(data))
    except BrokenTar:
        return
    try:
        expected = by_tarfile(bytes(data))
    except UnicodeDecodeError:  # of `tarfile` itself: the name of a charset is damaged
        return
    assert by_us(bytes(data)) == stripped(expected)


@given(MEMBERS.filter(bool), st.sampled_from(sorted(PYTHON_FORMATS.values())), st.data())
def test_a_tar_that_is_cut_is_refused(
    content: list[tuple[str, bytes, int]], form: int, draw: st.DataObject
) -> None:
    data = packed(content, form)
    end = max([0, *(start for _, _, start, _, _ in by_us(data))])
    short = data[: draw.draw(st.integers(0, end + 511))]
    with pytest.raises(BrokenTar, match="cut short"):
        pass_over(Windowed(lambda a, b: short[a:b], len(short)), len(short))


def test_times_of_gnu_tars_incremental_headers_are_no_part_of_a_name(tmp_path: Path) -> None:
    """They stand where POSIX has a prefix; `tarfile`, and so `webdataset`, takes them for one."""
    if shutil.which("tar") is None:
        pytest.skip("no tar here")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.txt").write_text("x")
    path = tmp_path / "a.tar"
    command = [
        "tar",
        "--incremental",
        "--format=gnu",
        "-C",
        str(tmp_path / "files"),
        "-cf",
        str(path),
        "a.txt",
    ]
    made = subprocess.run(command, capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"this tar has no --incremental: {made.stderr!r}")
    (record,) = of_reader(TarReader(path), path)
    assert record is not None
    assert record["__key__"] == "a"
