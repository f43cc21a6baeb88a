"""Kept indexes, and the index of rows: built once for one state of a file, never used for another."""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from readers_kit import write_recordio
from tar_files import samples_tar

from edl_torch.errors import DataFormatError, SourceChanged
from edl_torch.readers import CsvReader, RecordIODataReader, TarReader
from edl_torch.readers.shared import mapped
from edl_torch.readers.shared.files import FileStamp, OpenFile, file_lock
from edl_torch.readers.shared.mapped import Array, cached_index
from edl_torch.readers.shared.sources import index_of
from edl_torch.readers.storage import Storage
from edl_torch.readers.text.row_index import BLOCK, RowIndex, RowRules, build_row_index


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
    index = cached_index(
        FileStamp.of(data), "kind1", lambda: {"n": np.full(3, 99)}, storage=Storage(index_dir=folder)
    )
    return Path(index.path)


def test_the_folder_among_temporary_files_is_for_its_user_alone(data: Path, temporary: Path) -> None:
    build = Builder()
    for _ in range(2):
        index = cached_index(FileStamp.of(data), "kind1", build)
    assert build.built == 1
    folder = Path(index.path).parent
    assert folder == temporary / f"edl_torch-{os.getuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "whose", [pytest.param("another user's", marks=needs_root), "open to others", "behind a link"]
)
def test_an_index_in_a_folder_that_is_not_this_users_alone_is_not_read(
    whose: str, data: Path, temporary: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = temporary / f"edl_torch-{os.getuid()}"
    index = planted(data, tmp_path / "elsewhere" if whose == "behind a link" else folder)
    if whose == "behind a link":
        folder.symlink_to(index.parent)
    elif whose == "open to others":
        folder.chmod(0o770)
    else:
        os.chown(index, STRANGER, -1)
        os.chown(folder, STRANGER, -1)
    build = Builder()
    for _ in range(2):
        found = cached_index(FileStamp.of(data), "kind1", build)
        assert found["n"].tolist() == [1, 1, 1]
    assert build.built == 1
    own = Path(found.path).parent
    assert own != folder
    assert own.stat().st_mode & 0o777 == 0o700
    (told,) = [record.getMessage() for record in caplog.records if "EDL_INDEX_DIR" in record.getMessage()]
    assert f"'{folder}' is not this user's alone" in told
    assert str(own) in told


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


@pytest.mark.parametrize("change", ["size", "time", "kind", "options"])
def test_another_file_kind_or_option_builds_anew(data: Path, tmp_path: Path, change: str) -> None:
    build = Builder()
    cached_index(FileStamp.of(data), "kind1", build, storage=Storage(index_dir=tmp_path / "i"), options="a")
    if change == "size":
        data.write_bytes(b"123456")
    elif change == "time":
        os.utime(data, ns=(1, 1))
    kind = "kind2" if change == "kind" else "kind1"
    options = "b" if change == "options" else "a"
    index = cached_index(
        FileStamp.of(data), kind, build, storage=Storage(index_dir=tmp_path / "i"), options=options
    )
    assert index["n"].tolist() == [2, 2, 2]


def test_two_files_of_one_name_have_two_indexes(data: Path, tmp_path: Path) -> None:
    other = tmp_path / "x.bin"
    other.write_bytes(b"12345")
    build = Builder()
    indexes = [
        cached_index(FileStamp.of(p), "kind1", build, storage=Storage(index_dir=tmp_path / "i"))
        for p in (data, other)
    ]
    assert [index["n"][0] for index in indexes] == [1, 2]


def test_a_broken_index_is_built_again(data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build = Builder()
    index = cached_index(FileStamp.of(data), "kind1", build, storage=Storage(index_dir=tmp_path / "i"))
    Path(index.path).write_bytes(Path(index.path).read_bytes()[:-40])
    assert (
        cached_index(FileStamp.of(data), "kind1", build, storage=Storage(index_dir=tmp_path / "i"))["n"][0]
        == 2
    )
    assert "cut short" in caplog.text


def test_without_a_folder_to_write_in_the_index_is_temporary(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    with caplog.at_level(logging.WARNING):
        index = cached_index(
            FileStamp.of(data), "kind1", Builder(), storage=Storage(index_dir=tmp_path / "file" / "i")
        )
    assert index["n"].tolist() == [1, 1, 1]
    assert "EDL_INDEX_DIR" in caplog.text


@pytest.mark.parametrize("index", [cached_index, index_of], ids=["kept", "too small to be kept"])
def test_data_that_changes_while_it_is_indexed_is_refused(data: Path, tmp_path: Path, index: Any) -> None:
    def build() -> Mapping[str, Array]:
        data.write_bytes(b"changed under us")
        return {"n": np.zeros(1)}

    with pytest.raises(SourceChanged, match="has changed"):
        index(FileStamp.of(data), "kind1", build, storage=Storage(index_dir=tmp_path / "i"))
    assert not list(tmp_path.glob("i/*"))


def test_several_processes_that_start_at_once_build_once(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = multiprocessing.get_context("fork")
    came, folder = context.Semaphore(0), tmp_path / "i"

    @contextmanager
    def noted(place: Path) -> Iterator[None]:
        came.release()
        with file_lock(place):
            yield

    monkeypatch.setattr(mapped, "file_lock", noted)
    processes = [context.Process(target=_index_once, args=(data, folder, came)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    assert len(list(tmp_path.glob("built-by-*"))) == 1
    assert [path.suffix for path in folder.iterdir()] == [".edl-index"], "no lock is left"


def _index_once(data: Path, folder: Path, came: Any) -> None:
    def build() -> Mapping[str, Array]:
        (folder.parent / f"built-by-{os.getpid()}").touch()
        assert all(came.acquire(timeout=60) for _ in range(4)), "none takes the lock after this one has built"
        return {"n": np.full(3, 7)}

    index = cached_index(FileStamp.of(data), "kind1", build, storage=Storage(index_dir=folder))
    assert index["n"].tolist() == [7, 7, 7]


KEPT = {
    "rows": (
        lambda path: CsvReader(path, header=True, index_dir="beside"),
        "text.text_reader.build_row_index",
        "rows1",
    ),
    "recordio": (
        lambda path: RecordIODataReader(path, index_dir="beside"),
        "recordio.source.scan",
        "recordio2",
    ),
    "tar": (lambda path: TarReader(path, index_dir="beside"), "tar.index.pass_over", "tar1"),
}


@pytest.mark.parametrize("what", KEPT)
def test_readers_keep_their_indexes_and_take_those_of_the_same_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    make, builder, kind = KEPT[what]
    path = tmp_path / "x"

    def write(count: int) -> None:
        if what == "rows":
            path.write_text("n\n" + "1\n" * count)
        elif what == "recordio":
            write_recordio(path, [bytes(3000)] * count, form=("go", "none"))
        else:
            samples_tar(path, count)

    write(1000)
    assert make(str(path)).count == 1000
    (index,) = tmp_path.glob("x.*")
    assert (index.suffix, index.name.split(".")[1]) == (".edl-index", kind)
    with monkeypatch.context() as patch:
        patch.setattr(f"edl_torch.readers.{builder}", None)
        assert make(str(path)).count == 1000
    write(999)
    assert make(str(path)).count == 999


# The index of rows against a state machine that goes byte by byte -------------------------------------------


QUOTED = RowRules(quote=ord('"'), delimiter=ord(","))
LINES = RowRules(keeps_empty=True)
ADVERSARIAL = st.lists(
    st.sampled_from(['"', '""', '"""', ",", "\n", "\r", "\r\n", "a", " ", "é", ',"', '",', '"\n', "\n\n"]),
    max_size=60,
).map("".join)


def reference(data: bytes, rules: RowRules) -> tuple[list[tuple[int, int]], bool]:
    """Byte by byte: (start, line) of each record, and whether the end is inside quotes."""
    rows, state, start, line, begin_line, at = [], "field start", 0, 0, 0, 0
    while at < len(data):
        byte = data[at]
        is_end = byte == 10 or (byte == 13 and rules.cr_ends_line)
        width = 2 if rules.cr_ends_line and data[at : at + 2] == b"\r\n" else 1
        if is_end:
            line += 1
        if state == "inside":
            if byte == rules.quote:
                if data[at + 1 : at + 2] == bytes([rules.quote]):
                    width = 2
                else:
                    state = "field"
        elif is_end:
            if at > start or rules.keeps_empty:
                rows.append((start, begin_line))
            start, begin_line, state = at + width, line, "field start"
        elif byte == rules.quote and state == "field start":
            state = "inside"
        else:
            state = "field start" if byte == rules.delimiter else "field"
        at += width
    if start < len(data):
        rows.append((start, begin_line))
    return rows, state == "inside"


def scanned(path: str | Path, rules: RowRules, **how: int) -> dict[str, Any]:
    stamp = FileStamp.of(path)
    file = OpenFile(stamp, lambda _: False)
    return build_row_index(file.read, stamp.size, str(path), rules, **how)


def build(path: Path, data: bytes, rules: RowRules, chunk_bytes: int) -> RowIndex:
    path.write_bytes(data)
    return RowIndex(scanned(path, rules, chunk_bytes=chunk_bytes))


def rows_of(index: RowIndex, data: bytes) -> list[bytes]:
    starts, ends = index.spans(np.arange(index.count))
    assert [index.span(number, number + 1) for number in range(index.count)] == list(
        zip(starts.tolist(), ends.tolist(), strict=True)
    )
    return [data[start:end] for start, end in zip(starts, ends, strict=True)]


@pytest.mark.parametrize(
    "rules",
    [QUOTED, LINES, RowRules(), RowRules(cr_ends_line=False, keeps_empty=True), RowRules(cr_ends_line=False)],
    ids=["csv", "lines", "lines without empty", "only LF", "only LF without empty"],
)
def test_records_begin_where_one_byte_after_the_other_says(tmp_path, rules):
    path = tmp_path / "data"

    @given(text=ADVERSARIAL, chunk_bytes=st.integers(1, 24))
    @example(text='a,"\n""\n', chunk_bytes=3)
    @example(text="a\r\nb\rc", chunk_bytes=2)
    @example(text='"a"\n"b""\n', chunk_bytes=5)
    @example(text='5" disk,"a\nb"\n', chunk_bytes=7)
    def check(text: str, chunk_bytes: int) -> None:
        data = text.encode()
        expected, unclosed = reference(data, rules)
        if unclosed:
            with pytest.raises(DataFormatError, match=f"begins on line {expected[-1][1] + 1}:"):
                build(path, data, rules, chunk_bytes)
            return
        index = build(path, data, rules, chunk_bytes)
        starts, _ = index.spans(np.arange(index.count))
        lines = [index.line(number, lambda start, end: data[start:end]) - 1 for number in range(index.count)]
        assert list(zip(starts.tolist(), lines, strict=True)) == expected

    check()


def test_many_blocks_and_chunks_give_the_same_as_one(tmp_path):
    rng = np.random.default_rng(5)
    rows = [
        b'%d,"%s\n%s"\n' % (number, b"x" * int(rng.integers(9)), b'""' * int(rng.integers(3)))
        for number in range(20 * BLOCK + 3)
    ]
    data = b"".join(rows)
    for chunk_bytes in (97, 4096, len(data)):
        index = build(tmp_path / "data", data, QUOTED, chunk_bytes)
        assert rows_of(index, data) == rows
        assert index.line(1000, lambda start, end: data[start:end]) == 2001


def test_the_index_takes_four_bytes_a_record_and_a_bit(tmp_path):
    index = scanned(_write(tmp_path / "data", b"1,2\n" * 100_000), QUOTED)
    assert sum(array.nbytes for array in index.values()) < 4.3 * 100_000


def test_chunks_do_not_wait_in_memory(tmp_path):
    """What has been scanned is written out: at most a few chunks are held at any time."""
    import tracemalloc

    path = _write(tmp_path / "data", b"1,2\n" * 2_000_000)
    tracemalloc.start()
    scanned(path, QUOTED, chunk_bytes=1 << 16)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 6 << 20  # the index alone is 8.5 MB


def test_records_larger_than_the_offsets_can_say_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("edl_torch.readers.text.row_index.LARGEST_BLOCK", 100)
    with pytest.raises(DataFormatError, match="64 records take more than 4 GiB"):
        build(tmp_path / "data", b"x" * 60 + b"\n" + b"y" * 60 + b"\nz", LINES, 1000)


def test_an_empty_file_and_a_lone_mark_have_no_records(tmp_path):
    for data in (b"", b"\xef\xbb\xbf"):
        index = build(tmp_path / "data", data, LINES, 10)
        assert index.count == 0
        assert index.spans(np.arange(0))[0].size == 0


def _write(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    return str(path)
