"""What is wrong with the data or the arguments is said once, with the file, the place and what to do."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from readers_kit import table, write_parquet

from edl_torch.errors import (
    BadRecord,
    DataFormatError,
    InvalidArgument,
    ReaderError,
    ReaderUnavailable,
    SourceChanged,
)
from edl_torch.readers import ParquetReader
from edl_torch.readers.storage import storage_error


def refusal(kind, *arguments, **options):
    with pytest.raises(kind) as caught:
        ParquetReader(*arguments, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty: it is no Parquet file"),
        (b"hello, I am text and no columns", "is no Parquet file: it does not begin as one"),
        (b"PAR1", "damaged Parquet file"),
        (b"PAR1" + bytes(60) + b"\x10\0\0\0PAR1", "damaged Parquet file"),
        (b"PAR1" + bytes(100), "is a truncated Parquet file: its footer is missing"),
        (b"PARE" + bytes(100) + b"PARE", "is an encrypted Parquet file"),
    ],
)
def test_files_that_are_not_whole_parquet(tmp_path, content, said):
    (tmp_path / "a.parquet").write_bytes(content)
    message = refusal(DataFormatError, tmp_path / "a.parquet")
    assert f"'{tmp_path}/a.parquet' " in message
    assert said in message


def test_every_truncation_is_refused(tmp_path):
    whole = Path(write_parquet(tmp_path / "a.parquet", (0, 30))).read_bytes()
    for length in range(0, len(whole), 97):
        (tmp_path / "a.parquet").write_bytes(whole[:length])
        refusal(DataFormatError, tmp_path / "a.parquet")


def test_columns_that_are_not_there(tmp_path):
    path = write_parquet(tmp_path / "a.parquet")
    said = refusal(InvalidArgument, path, ["id", "colour"])
    assert said == f"'{path}' has no column 'colour'; it has id, half, text, vector, many"
    for columns in ("id", [], ["id", "id"]):
        assert "list of different column names" in refusal(InvalidArgument, path, columns)


def test_schemas_that_differ_name_the_file_and_the_column(tmp_path):
    first = write_parquet(tmp_path / "1.parquet")
    other = write_parquet(tmp_path / "2.parquet", table(0, 5).set_column(1, "half", pa.array(range(5))))
    said = refusal(DataFormatError, tmp_path)
    assert f"column 'half' is int64 in '{other}', but float in '{first}'" in said
    assert "columns=[…]" in said
    assert ParquetReader(tmp_path, ["id", "text"]).create_shards() == {first: 20, other: 5}
    less = write_parquet(tmp_path / "2.parquet", table(0, 5).drop_columns(["text"]))
    assert f"'{less}' has no column 'text', which '{first}' has" in refusal(DataFormatError, tmp_path)
    more = write_parquet(tmp_path / "2.parquet", table(0, 5).append_column("new", pa.array(range(5))))
    assert f"'{more}' has the column 'new', which '{first}' has not" in refusal(DataFormatError, tmp_path)
    write_parquet(tmp_path / "2.parquet", table(0, 5).set_column(4, "many", pa.array([[0.5]] * 5)))
    assert "column 'many' is list<element: double> in" in refusal(DataFormatError, tmp_path)


def test_files_without_rows_may_have_any_schema(tmp_path):
    write_parquet(tmp_path / "0.parquet", pa.table({"other": pa.array([], pa.null())}))
    full = write_parquet(tmp_path / "1.parquet")
    assert ParquetReader(tmp_path).create_shards() == {full: 20}
    os.remove(full)
    assert "no row in" in refusal(DataFormatError, tmp_path)


def test_two_columns_of_one_name(tmp_path):
    double = pa.Table.from_arrays([pa.array([1]), pa.array([2]), pa.array([3])], names=["a", "a", "b"])
    path = write_parquet(tmp_path / "a.parquet", double)
    assert "several columns 'a'" in refusal(DataFormatError, path)
    assert ParquetReader(path, ["b"]).read_record(path, 0) == {"b": 3}


def test_folders_with_other_keys(tmp_path):
    write_parquet(tmp_path / "a=1" / "b=1" / "x.parquet")
    other = write_parquet(tmp_path / "a=2" / "x.parquet")
    said = refusal(DataFormatError, tmp_path)
    assert f"'{other}' is in a folder with the keys ['a'], but" in said
    assert "partitions=False" in said
    assert len(ParquetReader(tmp_path, partitions=False).create_shards()) == 2


def test_fills_are_checked_before_anything_is_read(tmp_path):
    path = write_parquet(tmp_path / "a.parquet")
    assert "fill_nulls names 'colour'" in refusal(InvalidArgument, path, fill_nulls={"colour": 0})
    assert "is no value of type int64" in refusal(InvalidArgument, path, fill_nulls={"id": "none"})


def damage(path: Path, group: int) -> None:
    """Overwrite the pages of one row group."""
    chunk = pq.read_metadata(path).row_group(group).column(0)
    content = bytearray(path.read_bytes())
    for place in range(chunk.dictionary_page_offset or chunk.data_page_offset, chunk.data_page_offset + 20):
        content[place] ^= 0xFF
    path.write_bytes(content)


def test_a_damaged_row_group_is_named_and_the_others_are_read(tmp_path):
    path = tmp_path / "a.parquet"
    write_parquet(path, (0, 30), 10)
    damage(path, 1)
    reader = ParquetReader(path)
    for _ in range(2):
        with pytest.raises(BadRecord, match=rf"'{path}' row group 1 is damaged \(.+\); copy or write"):
            reader.read_batch(str(path), np.array([12]))
    assert reader.read_record(str(path), 9)["id"] == 9
    assert reader.read_record(str(path), 20)["id"] == 20


def test_a_damaged_row_group_is_decoded_once_for_all_its_records(tmp_path):
    path = tmp_path / "a.parquet"
    write_parquet(path, (0, 30), 10)
    whole = path.read_bytes()
    damage(path, 1)
    reader = ParquetReader(path)
    with pytest.raises(BadRecord, match="row group 1"):
        reader.read_record(str(path), 10)
    path.write_bytes(whole)  # so that another look at it would find nothing wrong
    for number in range(11, 20):
        with pytest.raises(BadRecord, match="row group 1"):
            reader.read_record(str(path), number)


def test_a_flipped_bit_is_found_where_the_writer_left_checksums(tmp_path):
    path = tmp_path / "a.parquet"
    write_parquet(path, (0, 1000), 1000, compression="none", use_dictionary=False, write_page_checksum=True)
    chunk = pq.read_metadata(path).row_group(0).column(0)
    content = bytearray(path.read_bytes())
    content[chunk.data_page_offset + chunk.total_compressed_size - 5] ^= 1
    path.write_bytes(content)
    with pytest.raises(BadRecord, match="row group 0 is damaged"):
        ParquetReader(path).read_record(str(path), 0)


def test_unknown_protocols_packages_and_passwords(monkeypatch):
    assert "does not exist; check the path" in refusal(ReaderError, "memory://nowhere/a.parquet")
    assert "fsspec knows no such protocol" in refusal(ReaderError, "nosuch://a/b.parquet")
    said = refusal(InvalidArgument, "ftp://me:hunter2@host/a.parquet")
    assert "storage_options" in said
    assert "hunter2" not in said


def test_who_is_refused_is_told_apart_from_what_is_unreadable():
    refused = [
        PermissionError("x"),
        OSError("ExpiredToken: …"),
        OSError("403 Forbidden"),
        OSError("InvalidToken"),
    ]
    for error in refused:
        assert "check the credentials" in str(storage_error(error, "s3://b/x"))
    assert "check the network" in str(storage_error(OSError("JSON: unexpected token"), "s3://b/x"))


@pytest.mark.parametrize(
    ("package", "url"),
    [("pyarrow", "gs"), ("obstore", "gs"), ("fsspec.core", "memory"), ("paramiko", "sftp")],
)
def test_missing_packages_say_what_to_install(monkeypatch, package, url):
    for name in {package, *(name for name in sys.modules if name.startswith(f"{package}."))}:
        monkeypatch.setitem(sys.modules, name, None)
    said = refusal(ReaderUnavailable, f"{url}://bucket/a.parquet")
    assert ("install" in said) or package in said


# What is written while a reader is in use -------------------------------------------------------------------

OVERWRITTEN = {
    "garbage": lambda data: b"\xab" * len(data),
    "truncated": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "cut by a byte": lambda data: data[:-1],
    "another footer": lambda data: data.replace(b"half", b"hulf"),
}


@pytest.mark.parametrize("replaces", [False, True], ids=["in place", "by another file"])
@pytest.mark.parametrize("is_open", [False, True], ids=["not open yet", "open"])
@pytest.mark.parametrize("how", OVERWRITTEN)
def test_a_file_that_is_overwritten_while_it_is_read_has_changed(tmp_path, how, is_open, replaces):
    path = Path(write_parquet(tmp_path / "a.parquet", (0, 500), group=10))
    reader = ParquetReader(path, cache_bytes=1)
    if is_open:
        assert reader.read_record(str(path), 0)["id"] == 0
    content = OVERWRITTEN[how](path.read_bytes())
    if replaces:
        (tmp_path / "new").write_bytes(content)
        os.replace(tmp_path / "new", path)
    else:
        path.write_bytes(content)
    for _ in range(2):  # it stays so
        with pytest.raises(SourceChanged, match="has changed since the reader was made"):
            reader.read_record(str(path), 499)


def test_a_file_that_was_touched_is_the_same(tmp_path):
    path = Path(write_parquet(tmp_path / "a.parquet", (0, 50), group=10))
    reader = ParquetReader(path, cache_bytes=1)
    assert reader.read_record(str(path), 0)["id"] == 0
    os.utime(path, (1, 1))
    assert reader.read_record(str(path), 49)["id"] == 49
