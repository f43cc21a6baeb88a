"""CSV records and batches: one table by row and by column, in any order, with its bad records."""

from __future__ import annotations

import csv
import subprocess
import sys
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from csv_kit import ROWS, records, same, task, write
from hypothesis import given, settings
from hypothesis import strategies as st
from test_row_index import ADVERSARIAL, QUOTED, reference

from edl_torch.errors import BadRecord, ReaderError, ReaderUnavailable
from edl_torch.readers import CsvReader
from edl_torch.testing import check_reader

pytest.importorskip("pyarrow", reason="batches need pyarrow")


@pytest.mark.parametrize("chunk_bytes", [1, 7, 1 << 20])
@pytest.mark.parametrize(
    "options", [{}, {"as_tuples": True}, {"columns": ["size", "id"]}, {"encoding": "cp1252"}]
)
def test_the_contract_is_kept(tmp_path, options, chunk_bytes):
    path = write(tmp_path)
    check_reader(lambda: CsvReader(path, chunk_bytes=chunk_bytes, index_dir=tmp_path / "index", **options))


def test_the_contract_is_kept_with_several_files_and_many_rows(tmp_path):
    body = "".join(f'{number},"{number}\n",{number / 7}\n' for number in range(10_000))
    for name in ("a.csv", "b.csv"):
        write(tmp_path, "n,text,part\n" + body, name)
    check_reader(lambda: CsvReader(tmp_path))
    reader = CsvReader(tmp_path, chunk_bytes=1000, index_dir=tmp_path / "other")
    assert [row["n"] for row in records(reader)] == [*range(10_000)] * 2


def test_rows_and_columns_of_a_table_with_all_that_csv_allows(tmp_path):
    path = write(tmp_path)
    reader = CsvReader(path)
    assert reader.dtypes == {"id": "int64", "word": "str", "size": "float64", "ok": "bool"}
    assert reader.columns == ("id", "word", "size", "ok")
    assert same(records(reader), ROWS)
    batch = reader.read_batch(path, np.array([3, 0, 3, 1]))
    assert [column.dtype.kind for column in batch.values()] == ["i", "O", "f", "b"]
    assert batch["id"].tolist() == [4, 1, 4, 2]
    assert same(batch["size"].tolist(), [ROWS[number]["size"] for number in (3, 0, 3, 1)])
    assert batch["word"].tolist() == [ROWS[number]["word"] for number in (3, 0, 3, 1)]


def test_an_empty_batch_has_its_types(tmp_path):
    path = write(tmp_path)
    batch = CsvReader(path).read_batch(path, np.array([], dtype=np.int64))
    assert [column.dtype.kind for column in batch.values()] == ["i", "O", "f", "b"]
    assert not any(map(len, batch.values()))


@pytest.mark.parametrize("start_of_file", [b"", b"\xef\xbb\xbf"])
def test_adversarial_files_read_as_pythons_csv_reads_them(tmp_path, start_of_file):
    number_of_file = (
        count()
    )  # files of one size, written within one tick of the clock, look the same to the cache

    @settings(max_examples=150)
    @given(text=ADVERSARIAL, chunk_bytes=st.integers(1, 24), seed=st.integers(0, 99))
    def check(text: str, chunk_bytes: int, seed: int) -> None:
        starts, unclosed = reference(text.encode(), QUOTED)
        if unclosed or not starts:
            return
        path = write(tmp_path, start_of_file + text.encode(), f"{next(number_of_file)}.csv")
        with open(path, newline="", encoding="utf-8-sig") as file:
            expected = [row for row in csv.reader(file) if row]
        width = len(expected[0])
        reader = CsvReader(
            path, header=False, chunk_bytes=chunk_bytes, dtypes={f"f{n}": "str" for n in range(width)}
        )
        assert reader.create_shards() == {path: len(expected)}
        right = [number for number, row in enumerate(expected) if len(row) == width]
        for number, row in enumerate(expected):
            if number in right:
                assert list(reader.read_record(path, number).values()) == row
            else:
                with pytest.raises(BadRecord, match=f"line {starts[number][1] + 1} has {len(row)} fields"):
                    reader.read_record(path, number)
        numbers = np.random.default_rng(seed).permutation(right)
        batch = reader.read_batch(path, numbers)
        assert list(map(list, zip(*batch.values(), strict=True))) == [expected[number] for number in numbers]

    check()


def test_scattered_rows_are_read_in_ranges_not_one_by_one(tmp_path, monkeypatch):
    path = write(tmp_path, "n,x\n" + "".join(f"{number},{'7' * 40}.5\n" for number in range(20_000)))
    reader = CsvReader(path)
    numbers = np.concatenate((np.arange(5000, 5100), [3, 19_999, 3], np.arange(5099, 4999, -1)))
    calls = []
    read = reader._files.read
    monkeypatch.setattr(reader._files, "read", lambda *args: calls.append(args) or read(*args))
    assert reader.read_batch(path, numbers)["n"].tolist() == numbers.tolist()
    assert len(calls) == 3


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("a,b\n1,2\n\n3\n4,5\n", 4, "has 1 fields, expected 2"),
        ("a,b\n1,2\n3,4,5\n4,5\n", 3, "has 3 fields, expected 2"),
        ('a,b\n1,"x\n\ny"\nthree,x\n4,z\n', 5, "has 'three' in column 'a', which is no int64"),
        ("a,b\n1,2\n,3\n", 3, r"has nothing in column 'a' \(int64\): .* fill_nulls=\{'a': …\}"),
    ],
)
def test_a_bad_record_is_named_by_line_and_the_others_are_read(tmp_path, text, line, reason):
    path = write(tmp_path, text)
    reader = CsvReader(path, dtypes={"a": int, "b": str}, header=True)
    with pytest.raises(BadRecord, match=rf"table.csv' line {line} {reason}"):
        reader.read_record(path, 1)
    with pytest.raises(BadRecord, match=rf"line {line} {reason}"):
        reader.read_batch(path, np.array([0, 1]))
    reading = reader.read_records(task(path, 0, 2))
    assert next(reading)["a"] == 1
    with pytest.raises(BadRecord, match=rf"line {line} {reason}"):
        next(reading)
    good = [0, *range(2, reader.create_shards()[path])]
    assert len(reader.read_batch(path, np.array(good))["a"]) == len(good)


def test_bytes_that_are_no_text_are_named(tmp_path):
    path = write(tmp_path, b"a,b\n1,x\n2,\xe9t\xe9\n")
    reader = CsvReader(path, dtypes={"b": str}, header=True)
    with pytest.raises(
        BadRecord, match=r"line 3 is not utf-8 in column 'b': .* byte 2 of the record; name the file's own"
    ):
        reader.read_record(path, 1)
    with pytest.raises(BadRecord, match=r"line 3 is not utf-8"):
        reader.read_batch(path, np.array([1]))
    assert CsvReader(path, columns=["a"], header=True).read_record(path, 1) == {"a": 2}
    assert CsvReader(path, encoding="latin-1").read_record(path, 1) == {"a": 2, "b": "été"}
    assert CsvReader(path, encoding="latin-1").read_batch(path, np.array([1]))["b"].tolist() == ["été"]


def test_what_the_encoding_lacks_in_other_columns_does_not_matter(tmp_path):
    path = write(tmp_path, b"a,b\n1,\x81\n2,x\n")  # cp1252 has no character for it
    reader = CsvReader(path, ["a"], encoding="cp1252", header=True)
    assert reader.read_batch(path, np.array([1, 0]))["a"].tolist() == [2, 1]


def test_strangers_are_refused(tmp_path):
    path = write(tmp_path)
    reader = CsvReader(path)
    with pytest.raises(ReaderError, match=r"CsvReader reads '.*table.csv', not 'x.csv'"):
        reader.read_record("x.csv", 0)
    for numbers in ([4], [-1], [0, 4]):
        with pytest.raises(ReaderError, match=r"has the records 0 to 4 here"):
            reader.read_batch(path, np.array(numbers))


def test_without_pyarrow_rows_are_read_and_batches_say_what_to_install(tmp_path, monkeypatch):
    path = write(tmp_path)
    for name in [name for name in sys.modules if name.startswith("pyarrow")] + ["pyarrow"]:
        monkeypatch.setitem(sys.modules, name, None)
    reader = CsvReader(path)
    assert same(records(reader), ROWS)
    with pytest.raises(ReaderUnavailable, match=r"pip install 'edl-torch\[csv\]'"):
        reader.read_batch(path, np.arange(1))


def test_batches_import_no_pandas(tmp_path):
    """It costs each loader worker half a second and 30 MB."""
    path = write(tmp_path)
    code = f"""
import sys, numpy
from edl_torch.readers import CsvReader
reader = CsvReader({path!r}, fill_nulls={{"id": 0}})
batch = reader.read_batch({path!r}, numpy.arange(4))
assert batch["id"].tolist() == [1, 2, 3, 4] and numpy.isnan(batch["size"][1])
assert not {{"pandas", "torch", "cv2"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=Path(__file__).parents[3])


@pytest.mark.parametrize(
    ("file", "heading", "rows", "width"),
    [
        ("iris.csv", True, 150, 5),
        ("iris.data", False, 150, 5),
        ("census_2000.csv", True, 2000, 15),
        ("adult_2000.data", False, 2000, 15),
        ("heart.csv", True, 297, 14),
        ("heart_cleveland.csv", True, 303, 14),
    ],
)
def test_real_tables(samples, file, heading, rows, width):
    path = str(samples / "csv" / file)
    check_reader(lambda: CsvReader(path, null_values=("", "?")))
    texts = CsvReader(path, dtypes=dict.fromkeys(CsvReader(path).columns, "str"))
    with open(path, newline="") as lines:
        expected = [row for row in csv.reader(lines) if row][heading:]
    assert [list(row.values()) for row in records(texts)] == expected
    assert (len(expected), len(texts.columns)) == (rows, width)


def test_real_table_with_missing_values(samples):
    path = str(samples / "csv" / "heart_cleveland.csv")
    assert CsvReader(path).dtypes["ca"] == "str"
    reader = CsvReader(path, null_values=["?"])
    assert reader.dtypes["ca"] == "float64"
    assert np.isnan(reader.read_batch(path, np.arange(303))["ca"]).sum() == 4
