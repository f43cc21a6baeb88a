"""A file that is written to while a job reads it has changed, whatever its times say; nothing else has."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from readers_kit import scan
from readers_kit import write_recordio as write_records
from tar_files import write_tar
from torch.utils.data import Subset

from edl_torch.errors import ReaderError, SourceChanged
from edl_torch.readers import ParquetReader, RecordIODataReader, TarReader
from edl_torch.readers.base import AbstractDataReader
from edl_torch.readers.map_dataset import MapDatasetReader
from edl_torch.readers.shared.files import FileStamp
from edl_torch.readers.text.csv_reader import CsvReader
from edl_torch.readers.text.text_reader import TextReader

COUNT = 200
Make = Callable[[Path, range], AbstractDataReader]


def lines(file: Path, numbers: range) -> AbstractDataReader:
    file.write_text("".join(f"line {n:03}\n" for n in numbers))
    return TextReader(file, index_dir=file.parent / "index")


def rows(file: Path, numbers: range) -> AbstractDataReader:
    file.write_text("x,y\n" + "".join(f"{n:03},{-n:04}\n" for n in numbers))
    return CsvReader(file, index_dir=file.parent / "index")


def chunks(file: Path, numbers: range) -> AbstractDataReader:
    write_records(file, [b"%03d" % n for n in numbers], form=("python", "none"), chunk=30)
    return RecordIODataReader(file, cache_bytes=0)


def groups(file: Path, numbers: range) -> AbstractDataReader:
    table = pa.table({"x": np.array(numbers), "y": np.array(numbers) % 7})
    pq.write_table(table, file, row_group_size=20, use_dictionary=False, compression="none")
    return ParquetReader(file, cache_bytes=1)


def samples(file: Path, numbers: range) -> AbstractDataReader:
    return TarReader(write_tar(file, {f"{n:03}.txt": b"%03d" % n for n in numbers}), "txt")


EACH = pytest.mark.parametrize("make", [lines, rows, chunks, groups, samples])


def another(make: Make, file: Path) -> bytes:
    """The bytes of a file of as many records, in another order, and as large."""
    other = file.with_name("other")
    make(other, range(COUNT)[::-1])
    return other.read_bytes()


@pytest.mark.parametrize("put_back", [False, True], ids=["with its time", "with the old time"])
@pytest.mark.parametrize("replaces", [False, True], ids=["in place", "by another file"])
@pytest.mark.parametrize("is_open", [False, True], ids=["not open yet", "open"])
@EACH
def test_a_file_that_is_written_over_by_as_many_records_has_changed(
    tmp_path: Path, make: Make, is_open: bool, replaces: bool, put_back: bool
) -> None:
    file = tmp_path / "data"
    reader, content, times = make(file, range(COUNT)), another(make, file), os.stat(file)
    before = scan(reader, file, 0, 5) if is_open else []
    if replaces:
        (tmp_path / "new").write_bytes(content)
        os.replace(tmp_path / "new", file)
    else:
        file.write_bytes(content)
    assert file.stat().st_size == times.st_size
    if put_back:
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    try:
        before += scan(reader, file, len(before), COUNT)
    except SourceChanged:
        with pytest.raises(SourceChanged, match="has changed since"):  # it stays so
            scan(reader, file, 100, COUNT)
        return
    assert replaces, "what is open is no more the file that was indexed"
    indexed = make(tmp_path / "again", range(COUNT))
    assert before == scan(indexed, tmp_path / "again", 0, COUNT)


@EACH
def test_a_file_that_is_cut_or_goes_away_has_changed(tmp_path: Path, make: Make) -> None:
    file = tmp_path / "data"
    reader = make(file, range(COUNT))
    copy = pickle.loads(pickle.dumps(reader))
    seen = scan(reader, file, 0, 5)
    os.truncate(file, file.stat().st_size // 2)
    for one in (reader, copy):
        with pytest.raises(SourceChanged, match=r"has changed since|then, .* now"):
            scan(one, file, COUNT - 5, COUNT)
    gone = make(file, range(COUNT))
    file.unlink()
    with pytest.raises(ReaderError, match=r"is gone|does not exist"):
        scan(gone, file, 0, 5)
    assert len(seen) == 5


def values_written_over(file: Path) -> None:
    """Other rows in plain pages, each as long as before: neither size nor footer shows it."""
    data = np.frombuffer(file.read_bytes(), np.uint8).copy()
    footer = pq.ParquetFile(file).metadata
    for group in range(footer.num_row_groups):
        column = footer.row_group(group).column(0)
        end = column.data_page_offset + column.total_compressed_size
        data[end - 8 * footer.row_group(group).num_rows : end : 8] ^= 1
    with open(file, "r+b") as written:
        written.write(data.tobytes())


@pytest.mark.parametrize("is_open", [False, True], ids=["not open yet", "open"])
def test_a_parquet_file_that_is_written_to_in_place_has_changed(tmp_path: Path, is_open: bool) -> None:
    """No page is looked at in most of many files."""
    for number in range(40):
        table = pa.table({"x": np.arange(400) + 400 * number})
        pq.write_table(
            table, tmp_path / f"{number:02}.parquet", 100, use_dictionary=False, write_statistics=False
        )
    reader = ParquetReader(tmp_path, cache_bytes=1)
    files = sorted(tmp_path.iterdir())
    for file in files:
        if is_open:
            assert scan(reader, file, 0, 1) == [{"x": 400 * files.index(file)}]
        values_written_over(file)
        with pytest.raises(SourceChanged, match="has changed since"):
            scan(reader, file, 100, 400)


def test_a_large_parquet_file_that_is_written_to_between_the_pages_looked_at_has_changed(
    tmp_path: Path,
) -> None:
    file = tmp_path / "data.parquet"
    values = np.arange(200_000)
    pq.write_table(pa.table({"x": values}), file, 100_000, use_dictionary=False, write_statistics=False)
    reader = ParquetReader(file, cache_bytes=1)
    assert scan(reader, file, 0, 1) == [{"x": 0}]
    with open(file, "r+b") as written:
        written.seek(8 * 7_000)
        written.write(bytes(8))
    with pytest.raises(SourceChanged, match="has changed since"):
        scan(reader, file, 100_000, 100_001)


@pytest.mark.parametrize("at_once", [True, False])
def test_recordio_payloads_that_are_written_over_with_the_old_time_have_changed(
    tmp_path: Path, at_once: bool
) -> None:
    """Their headers are as they were, and nothing is wrong with the records."""
    file = tmp_path / "data"
    reader, times = chunks(file, range(COUNT)), os.stat(file)
    seen = scan(reader, file, 0, 50)
    with open(file, "r+b") as written:
        written.seek(-20, os.SEEK_END)
        written.write(b"x" * 20)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert len(seen) == 50
    with pytest.raises(SourceChanged, match="has changed since"):
        scan(reader, file, 50 if at_once else COUNT - 1, COUNT)


class Held:
    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return np.size(self.data)

    def __getitem__(self, index: int) -> Any:
        return int(np.ravel(self.data)[index])


class Named(NamedTuple):
    data: Any


class Together(Held):
    def __getitems__(self, numbers: list[int]) -> list[Any]:
        return [self[number] for number in numbers]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda data: data,
        Held,
        lambda data: Held((data,)),
        lambda data: Held(Named(data)),
        lambda data: Held(Held(data).data[:]),
        lambda data: Held(np.asarray(data)),
        lambda data: Held(np.lib.stride_tricks.sliding_window_view(data, 1)),
        lambda data: Subset(Held(np.asarray(data)), range(COUNT)),
        Together,
    ],
    ids=[
        "itself",
        "held",
        "in a tuple",
        "in a named tuple",
        "a slice",
        "as an array",
        "windows",
        "a part of it",
        "many at once",
    ],
)
def test_an_array_whose_file_is_written_over_has_changed(tmp_path: Path, wrap: Callable[[Any], Any]) -> None:
    file = tmp_path / "data.npy"
    np.save(file, np.arange(COUNT))
    reader = MapDatasetReader(wrap(np.load(file, mmap_mode="r")))
    scan(reader, reader.name, 0, 1)
    np.save(file, np.arange(COUNT)[::-1])
    with pytest.raises(SourceChanged, match="has changed since"):
        scan(reader, reader.name, 0, 1)
    np.save(file, np.arange(COUNT))
    written = np.load(file, mmap_mode="r+")  # a job's own: it may write to it
    reader = MapDatasetReader(written)
    written[7] = 3
    assert scan(reader, reader.name, 7, 8) == [3]


@EACH
def test_a_file_whose_rights_or_links_are_changed_has_not(tmp_path: Path, make: Make) -> None:
    file = tmp_path / "data"
    reader = make(file, range(COUNT))
    seen = scan(reader, file, 0, 50)
    file.chmod(0o600)
    seen += scan(reader, file, 50, 100)
    os.link(file, tmp_path / "backup")
    seen += scan(reader, file, 100, 150)
    os.rename(file, tmp_path / "moved")
    os.rename(tmp_path / "moved", file)
    assert seen + scan(reader, file, 150, COUNT) == scan(make(file, range(COUNT)), file, 0, COUNT)


def test_an_index_is_not_taken_for_a_file_that_was_rewritten_with_the_old_time(tmp_path: Path) -> None:
    file = tmp_path / "data"
    words = ["a", "bb", "ccc", "dddd"] * 50
    file.write_text("\n".join(words) + "\n")
    times = os.stat(file)
    reader = TextReader(file, index_dir=tmp_path / "index")
    assert scan(reader, file, 0, COUNT) == words
    file.write_text("\n".join(words[::-1]) + "\n")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert scan(TextReader(file, index_dir=tmp_path / "index"), file, 0, COUNT) == words[::-1]


def test_a_file_that_was_written_just_now_is_looked_at_when_the_clock_has_gone_on(tmp_path: Path) -> None:
    """Else a write that comes at once would leave it with the same times."""
    file = tmp_path / "data"
    for number in range(20):
        file.write_text(f"one {number:02}")
        stamp = FileStamp.of(file)
        file.write_text(f"two {number:02}")
        with pytest.raises(SourceChanged):
            stamp.check()
