"""The files of a `CsvReader`: which ones, in which state, opened how often, indexed once."""

from __future__ import annotations

import logging
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from csv_kit import ROWS, records, same, task, write

from edl_torch.errors import DataFormatError, InvalidArgument, SourceChanged
from edl_torch.readers import CsvReader
from edl_torch.testing import check_reader

pytest.importorskip("pyarrow", reason="batches need pyarrow")


def test_files_folders_globs_and_lists(tmp_path):
    for name in ("b.csv", "a.csv", ".hidden.csv", "_part.csv", "c.txt"):
        write(tmp_path, f"n\n{len(name)}\n", name)
    a, b, c = (str(tmp_path / name) for name in ("a.csv", "b.csv", "c.txt"))
    assert list(CsvReader(tmp_path).create_shards()) == [a, b]
    assert list(CsvReader(str(tmp_path / "?.*")).create_shards()) == [a, b, c]
    assert list(CsvReader([Path(b), a]).create_shards()) == [b, a]
    with pytest.raises(DataFormatError, match=r"is listed twice"):
        CsvReader([a, str(tmp_path)])


def test_files_without_records_are_sources_of_none(tmp_path):
    a, b, c = (
        write(tmp_path, text, name) for name, text in (("a.csv", ""), ("b.csv", "n\n"), ("c.csv", "n\n5\n"))
    )
    reader = CsvReader(tmp_path, header=True)
    assert reader.create_shards() == {a: 0, b: 0, c: 1}
    check_reader(lambda: reader)
    for path in (a, b):
        with pytest.raises(DataFormatError, match=r"no record"):
            CsvReader(path, header=True)


def test_files_with_other_headings_are_refused(tmp_path):
    write(tmp_path, "a,b\n1,2\n", "a.csv")
    write(tmp_path, "b,a\n1,2\n", "b.csv")
    with pytest.raises(
        DataFormatError, match=r"b.csv' begins with \['b', 'a'\] and .*a.csv' with \['a', 'b'\]"
    ):
        CsvReader(tmp_path)
    write(tmp_path, "n,n\n1,2\n", "a.csv")
    with pytest.raises(DataFormatError, match=r"two columns called 'n'"):
        CsvReader(tmp_path / "a.csv", header=True)


def test_a_quote_that_is_never_closed_is_an_error_at_once(tmp_path):
    with pytest.raises(
        DataFormatError, match=r"table.csv' ends inside a quoted field of the record that begins on line 3:"
    ):
        CsvReader(write(tmp_path, 'a,b\n1,x\n2,"y\n3,z\n'))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04rest", "is a zip archive"),
        (b"\xff\xfea\0", "is UTF-16"),
        (b"a,b\n\0\1\2", "is no text: it has a NUL byte at byte 4"),
    ],
)
def test_files_that_are_no_text_are_refused(tmp_path, content, message):
    with pytest.raises(DataFormatError, match=f"table.csv' {message}"):
        CsvReader(write(tmp_path, content))


def test_paths_that_cannot_be_read(tmp_path):
    with pytest.raises(DataFormatError, match=r"data file '.*nothing.csv' does not exist"):
        CsvReader(tmp_path / "nothing.csv")
    with pytest.raises(DataFormatError, match=r"has no data file: expected a name that ends in .csv, .tsv"):
        CsvReader(tmp_path)
    with pytest.raises(DataFormatError, match=r"has no data file: expected a file that matches it"):
        CsvReader(str(tmp_path / "*.csv"))
    with pytest.raises(InvalidArgument, match=r"list of data files is empty"):
        CsvReader([])
    os.mkfifo(tmp_path / "pipe.csv")
    with pytest.raises(DataFormatError, match=r"is no regular file"):
        CsvReader(tmp_path / "pipe.csv")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_without_permission(tmp_path):
    path = write(tmp_path)
    os.chmod(path, 0)
    with pytest.raises(DataFormatError, match=r"cannot be read: Permission denied"):
        CsvReader(path)


def test_a_file_that_changes_is_noticed(tmp_path):
    path = write(tmp_path)
    reader, unused = CsvReader(path), CsvReader(path)
    assert reader.read_record(path, 0)["id"] == 1
    with open(path, "a") as file:
        file.write("5,x,1,true\n")
    for use in (
        lambda: reader.read_record(path, 0),
        lambda: reader.read_batch(path, np.arange(1)),
        lambda: list(reader.read_records(task(path, 0, 1))),
        lambda: unused.read_record(path, 0),
        lambda: pickle.loads(pickle.dumps(reader)).read_record(path, 0),
    ):
        with pytest.raises(SourceChanged, match=r"has changed since its index was made"):
            use()
    assert CsvReader(path).create_shards() == {path: 5 - 1}  # the line without an end became longer


def test_a_file_that_goes_away_is_noticed(tmp_path):
    path = write(tmp_path)
    reader = CsvReader(path, dtypes={"id": int, "word": str, "size": float, "ok": bool}, header=True)
    copy = pickle.loads(pickle.dumps(reader))
    os.remove(path)
    with pytest.raises(SourceChanged, match=r"was there and is gone"):
        copy.read_record(path, 0)


def test_many_files_do_not_stay_open(tmp_path):
    for number in range(150):
        write(tmp_path, f"n\n{number}\n", f"{number:03}.csv")
    reader = CsvReader(tmp_path, header=True)
    before = len(os.listdir("/proc/self/fd"))
    assert [row["n"] for row in records(reader)] == list(range(150))
    assert len(os.listdir("/proc/self/fd")) - before <= 64


def test_the_index_is_made_once(tmp_path, monkeypatch):
    path = write(tmp_path)
    first = CsvReader(path, index_dir="beside")
    assert sorted(file.name.split(".")[2] for file in tmp_path.iterdir() if "edl-index" in file.name) == [
        "rows1"
    ]
    monkeypatch.setattr("edl_torch.readers.text.text_reader.build_row_index", None)
    assert same(records(CsvReader(path, index_dir="beside")), records(first))


def test_an_index_that_cannot_be_kept_is_used(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, "edl_torch.readers"):
        reader = CsvReader(write(tmp_path), index_dir=tmp_path / "file")
    assert same(records(reader), ROWS)
    assert "cannot be kept" in caplog.text
