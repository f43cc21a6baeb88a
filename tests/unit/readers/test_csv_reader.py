"""`CsvReader`: one table by row and by column, what its columns hold, and which files it has."""

from __future__ import annotations

import csv
import os
import re
import sys
from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from readers_kit import ROWS, everything, same, task, write_csv
from test_index_cache import ADVERSARIAL, QUOTED, reference

from edl_torch.errors import (
    BadRecord,
    DataFormatError,
    InvalidArgument,
    ReaderUnavailable,
)
from edl_torch.readers import CsvReader
from edl_torch.readers.shared.files import OPEN_FILES
from edl_torch.readers.text.csv_values import inferred
from edl_torch.testing import check_reader

pytest.importorskip("pyarrow", reason="batches need pyarrow")


def test_rows_and_columns_of_a_table_with_all_that_csv_allows(tmp_path):
    path = write_csv(tmp_path)
    reader = CsvReader(path)
    assert reader.dtypes == {"id": "int64", "word": "str", "size": "float64", "ok": "bool"}
    assert reader.columns == ("id", "word", "size", "ok")
    assert same(everything(reader), ROWS)
    batch = reader.read_batch(path, np.array([3, 0, 3, 1]))
    assert [column.dtype.kind for column in batch.values()] == ["i", "O", "f", "b"]
    assert batch["id"].tolist() == [4, 1, 4, 2]
    assert same(batch["size"].tolist(), [ROWS[number]["size"] for number in (3, 0, 3, 1)])
    assert batch["word"].tolist() == [ROWS[number]["word"] for number in (3, 0, 3, 1)]


def test_an_empty_batch_has_its_types(tmp_path):
    path = write_csv(tmp_path)
    batch = CsvReader(path).read_batch(path, np.array([], dtype=np.int64))
    assert [column.dtype.kind for column in batch.values()] == ["i", "O", "f", "b"]
    assert not any(map(len, batch.values()))


@pytest.mark.parametrize("start_of_file", [b"", b"\xef\xbb\xbf"])
def test_adversarial_files_read_as_pythons_csv_reads_them(tmp_path, start_of_file):
    number_of_file = (
        count()
    )  # files of one size, written within one tick of the clock, look the same to the cache

    @given(text=ADVERSARIAL, chunk_bytes=st.integers(1, 24), seed=st.integers(0, 99))
    def check(text: str, chunk_bytes: int, seed: int) -> None:
        starts, unclosed = reference(text.encode(), QUOTED)
        if unclosed or not starts:
            return
        path = write_csv(tmp_path, start_of_file + text.encode(), f"{next(number_of_file)}.csv")
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
    path = write_csv(tmp_path, "n,x\n" + "".join(f"{number},{'7' * 40}.5\n" for number in range(20_000)))
    reader = CsvReader(path)
    numbers = np.concatenate((np.arange(5000, 5100), [3, 19_999, 3], np.arange(5099, 4999, -1)))
    calls = []
    read = reader._read
    monkeypatch.setattr(reader, "_read", lambda file: calls.append(file) or read(file))
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
    path = write_csv(tmp_path, text)
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
    path = write_csv(tmp_path, b"a,b\n1,x\n2,\xe9t\xe9\n")
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


def test_without_pyarrow_rows_are_read_and_batches_say_what_to_install(tmp_path, monkeypatch):
    path = write_csv(tmp_path)
    for name in [name for name in sys.modules if name.startswith("pyarrow")] + ["pyarrow"]:
        monkeypatch.setitem(sys.modules, name, None)
    reader = CsvReader(path)
    assert same(everything(reader), ROWS)
    with pytest.raises(ReaderUnavailable, match=r"pip install 'edl-torch\[csv\]'"):
        reader.read_batch(path, np.arange(1))


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
    assert [list(row.values()) for row in everything(texts)] == expected
    assert (len(expected), len(texts.columns)) == (rows, width)


# What the columns of a CSV file are called and hold: headings, names, types, no values ----------------------


@pytest.mark.parametrize(
    ("text", "heading"),
    [
        ("a,b\n1,x\n2,y\n", True),
        ("5.1,x\n4.9,y\n", False),
        (",b\n0,1\n1,2\n", True),
        ("a,a\n1,2\n", False),
        ("name,grade\nann,?\nbob,3\n", True),
    ],
)
def test_a_heading_is_told_by_numbers(tmp_path, text, heading):
    path = write_csv(tmp_path, text)
    reader = CsvReader(path, null_values=("", "?"), dtypes=None)
    assert reader.create_shards()[path] == text.count("\n") - heading
    assert (reader.columns == tuple(text.split("\n")[0].split(","))) == heading


@pytest.mark.parametrize("text", ["caption,place\na dog,here\n", "a,b\n", "only\n"])
def test_a_heading_that_cannot_be_told_is_asked_for(tmp_path, text):
    with pytest.raises(
        DataFormatError, match=r"table.csv': whether its first line .* pass header=True or header=False"
    ):
        CsvReader(write_csv(tmp_path, text))


def test_names_and_header(tmp_path):
    path = write_csv(tmp_path, "a,b\nx,y\n")
    assert everything(CsvReader(path, header=True)) == [{"a": "x", "b": "y"}]
    assert everything(CsvReader(path, header=False)) == [{"f0": "a", "f1": "b"}, {"f0": "x", "f1": "y"}]
    assert everything(CsvReader(path, header=True, names=["c", "d"])) == [{"c": "x", "d": "y"}]
    with pytest.raises(InvalidArgument, match=r"names= has 1 columns, but .* has 2"):
        CsvReader(path, header=True, names=["c"])


def test_types_come_from_rows_all_over_the_files(tmp_path):
    lines = ["n,late"] + [f"{number},{number}" for number in range(5000)] + ["5,0.5"]
    path = write_csv(tmp_path, "\n".join(lines))
    assert CsvReader(path).dtypes == {"n": "int64", "late": "float64"}
    other = write_csv(tmp_path, "n,late\n1,2\n2,x\n", "z.csv")
    assert CsvReader([path, other]).dtypes == {"n": "int64", "late": "str"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"columns": ["nope"]}, "columns= names 'nope', but .* has the columns"),
        ({"columns": "id"}, "is one string"),
        ({"columns": []}, "name at least one column"),
        ({"columns": ["id", "id"]}, "each once"),
        ({"dtypes": {"nope": int}}, "dtypes= names 'nope'"),
        ({"dtypes": {"id": "date"}}, r"dtypes\['id'\] = 'date' is no type"),
        ({"fill_nulls": {"nope": 1}}, "fill_nulls names 'nope'"),
        ({"fill_nulls": {"id": 0.5}}, r"fill_nulls\['id'\] = 0.5 is no value of the type int64"),
        ({"fill_nulls": {"word": "x"}}, "fill_nulls"),
        ({"null_values": "NA"}, "is one string"),
        ({"header": "maybe"}, "expected True, False or 'auto'"),
        ({"delimiter": "::"}, "is not one ASCII character"),
        ({"encoding": "utf-16"}, "encoding='utf-16'"),
    ],
)
def test_options_that_cannot_be_used_are_refused(tmp_path, options, message):
    with pytest.raises(InvalidArgument, match=message):
        CsvReader(write_csv(tmp_path), **options)


@pytest.mark.parametrize(
    ("text", "delimiter", "columns"),
    [
        ("a;b;label\n1;0.5;x\n2;1.5;y\n", ";", 3),
        ("a;b;c\n1;1,5;2,25\n2;2,5;3,25\n", ";", 3),  # decimal commas
        ("name|kind\nn|x\n", "|", 2),
        ("a\tb\n1\t2\n", "\t", 2),
    ],
)
@pytest.mark.parametrize("header", [True, "auto"])
def test_a_file_of_another_delimiter_is_refused_by_its_name(tmp_path, text, delimiter, columns, header):
    path = write_csv(tmp_path, text)
    with pytest.raises(DataFormatError, match=re.escape(f"but {columns} where {delimiter!r} separates them")):
        CsvReader(path, header=header)
    assert len(CsvReader(path, header=True, delimiter=delimiter).columns) == columns
    assert CsvReader(path, header=True, delimiter=",").columns[0] == text.split("\n")[0]


def test_a_wrong_delimiter_is_named_where_it_hides_the_heading(tmp_path):
    path = write_csv(tmp_path, "a,b\n1,2\n3,4\n")
    with pytest.raises(DataFormatError, match="but 2 where ',' separates them"):
        CsvReader(path, delimiter=";")


def test_one_column_may_hold_other_delimiters(tmp_path):
    path = write_csv(tmp_path, 'text\n"a;b"\nc;d;e\n')
    assert everything(CsvReader(path, header=True)) == [{"text": "a;b"}, {"text": "c;d;e"}]
    assert everything(CsvReader(write_csv(tmp_path, "a;b\n"), header=False)) == [{"f0": "a;b"}], (
        "nothing to tell by"
    )
    reader = CsvReader(write_csv(tmp_path, '""\n,"\n"\n'), header=False)  # by ; the second is no row
    assert reader.create_shards() == {str(tmp_path / "table.csv"): 2}
    options = {"encoding": "gbk", "quote_char": None, "header": True}
    assert everything(CsvReader(write_csv(tmp_path, "a|b\nc|d\n"), **options)) == [{"a|b": "c|d"}]


def test_tabs_other_quotes_and_none(tmp_path):
    assert everything(CsvReader(write_csv(tmp_path, "a\tb\n1\tx,y\n", "t.tsv"))) == [{"a": 1, "b": "x,y"}]
    path = write_csv(tmp_path, "a;b\n1;'x;y'\n")
    assert everything(CsvReader(path, delimiter=";", quote_char="'")) == [{"a": 1, "b": "x;y"}]
    path = write_csv(tmp_path, 'a,b\n1,"x\n2,y"\n')
    assert everything(CsvReader(path, quote_char=None)) == [{"a": 1, "b": '"x'}, {"a": 2, "b": 'y"'}]
    with pytest.raises(InvalidArgument, match=r"some of the files are .tsv and some are not"):
        CsvReader([path, str(tmp_path / "t.tsv")])


def test_a_sample_of_a_wide_table_is_looked_at_once() -> None:
    """A table of 5,000 columns would take hours if each field looked for its column's place."""

    class Names(tuple[str, ...]):
        __slots__ = ()
        asked = 0

        def index(self, *args: object) -> int:
            Names.asked += 1
            return super().index(*args)  # type: ignore[arg-type]

    names = Names(f"f{number}" for number in range(50))
    rows = [[str(number) for number in range(50)]] * 20
    types = inferred(rows, names, names[::2], frozenset())
    assert {kind.name for kind in types.values()} == {"int64"}
    assert Names.asked <= 25


# The files of a `CsvReader`: which ones, in which state, opened how often, indexed once ---------------------


def test_files_with_other_headings_are_refused(tmp_path):
    write_csv(tmp_path, "a,b\n1,2\n", "a.csv")
    write_csv(tmp_path, "b,a\n1,2\n", "b.csv")
    with pytest.raises(
        DataFormatError, match=r"b.csv' begins with \['b', 'a'\] and .*a.csv' with \['a', 'b'\]"
    ):
        CsvReader(tmp_path)
    write_csv(tmp_path, "n,n\n1,2\n", "a.csv")
    with pytest.raises(DataFormatError, match=r"two columns called 'n'"):
        CsvReader(tmp_path / "a.csv", header=True)


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
        CsvReader(write_csv(tmp_path, content))


def test_many_files_do_not_stay_open(tmp_path, monkeypatch):
    monkeypatch.setattr(OPEN_FILES, "limit", 40)
    for number in range(150):
        write_csv(tmp_path, f"n\n{number}\n", f"{number:03}.csv")
    reader = CsvReader(tmp_path, header=True)
    before = len(os.listdir("/proc/self/fd"))
    assert [row["n"] for row in everything(reader)] == list(range(150))
    assert len(os.listdir("/proc/self/fd")) - before <= 64
