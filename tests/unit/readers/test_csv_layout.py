"""What the columns of a CSV file are called and hold: headings, names, types, no values."""

from __future__ import annotations

import pickle
import re

import numpy as np
import pytest
from csv_kit import records, same, write

from edl_torch.errors import DataFormatError, InvalidArgument
from edl_torch.readers import CsvReader
from edl_torch.readers.text.csv_values import inferred

pytest.importorskip("pyarrow", reason="batches need pyarrow")


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
    path = write(tmp_path, text)
    reader = CsvReader(path, null_values=("", "?"), dtypes=None)
    assert reader.create_shards()[path] == text.count("\n") - heading
    assert (reader.columns == tuple(text.split("\n")[0].split(","))) == heading


@pytest.mark.parametrize("text", ["caption,place\na dog,here\n", "a,b\n", "only\n"])
def test_a_heading_that_cannot_be_told_is_asked_for(tmp_path, text):
    with pytest.raises(
        DataFormatError, match=r"table.csv': whether its first line .* pass header=True or header=False"
    ):
        CsvReader(write(tmp_path, text))


def test_names_and_header(tmp_path):
    path = write(tmp_path, "a,b\nx,y\n")
    assert records(CsvReader(path, header=True)) == [{"a": "x", "b": "y"}]
    assert records(CsvReader(path, header=False)) == [{"f0": "a", "f1": "b"}, {"f0": "x", "f1": "y"}]
    assert records(CsvReader(path, header=True, names=["c", "d"])) == [{"c": "x", "d": "y"}]
    with pytest.raises(InvalidArgument, match=r"names= has 1 columns, but .* has 2"):
        CsvReader(path, header=True, names=["c"])


def test_types_come_from_rows_all_over_the_files(tmp_path):
    lines = ["n,late"] + [f"{number},{number}" for number in range(5000)] + ["5,0.5"]
    path = write(tmp_path, "\n".join(lines))
    assert CsvReader(path).dtypes == {"n": "int64", "late": "float64"}
    other = write(tmp_path, "n,late\n1,2\n2,x\n", "z.csv")
    assert CsvReader([path, other]).dtypes == {"n": "int64", "late": "str"}


def test_inferred_types_travel_with_the_reader(tmp_path):
    reader = CsvReader(write(tmp_path, "a\n1\n2\n"))
    copy = pickle.loads(pickle.dumps(reader))
    write(tmp_path, "a\nx\ny\n")  # of the same length: only a copy that looks again would say str
    assert copy.dtypes == {"a": "int64"}


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
        CsvReader(write(tmp_path), **options)


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
    path = write(tmp_path, text)
    with pytest.raises(DataFormatError, match=re.escape(f"but {columns} where {delimiter!r} separates them")):
        CsvReader(path, header=header)
    assert len(CsvReader(path, header=True, delimiter=delimiter).columns) == columns
    assert CsvReader(path, header=True, delimiter=",").columns[0] == text.split("\n")[0]


def test_one_column_may_hold_other_delimiters(tmp_path):
    path = write(tmp_path, 'text\n"a;b"\nc;d;e\n')
    assert records(CsvReader(path, header=True)) == [{"text": "a;b"}, {"text": "c;d;e"}]
    assert records(CsvReader(write(tmp_path, "a;b\n"), header=False)) == [{"f0": "a;b"}], "nothing to tell by"
    reader = CsvReader(write(tmp_path, '""\n,"\n"\n'), header=False)  # by ; the second is no row
    assert reader.create_shards() == {str(tmp_path / "table.csv"): 2}
    options = {"encoding": "gbk", "quote_char": None, "header": True}
    assert records(CsvReader(write(tmp_path, "a|b\nc|d\n"), **options)) == [{"a|b": "c|d"}]


def test_no_values(tmp_path):
    path = write(tmp_path, "a,b,c\n1,?,x\n?,2.5,?\n")
    reader = CsvReader(
        path, dtypes={"a": "int32", "b": "float32"}, null_values=["?"], fill_nulls={"a": -1}, header=True
    )
    number, real = np.int32, np.float32
    wanted = [{"a": number(1), "b": real("nan"), "c": "x"}, {"a": number(-1), "b": real(2.5), "c": "?"}]
    assert same(records(reader), wanted)
    batch = reader.read_batch(path, np.arange(2))
    assert (batch["a"].dtype, batch["b"].dtype) == (np.int32, np.float32)
    assert batch["a"].tolist() == [1, -1]


def test_tabs_other_quotes_and_none(tmp_path):
    assert records(CsvReader(write(tmp_path, "a\tb\n1\tx,y\n", "t.tsv"))) == [{"a": 1, "b": "x,y"}]
    path = write(tmp_path, "a;b\n1;'x;y'\n")
    assert records(CsvReader(path, delimiter=";", quote_char="'")) == [{"a": 1, "b": "x;y"}]
    path = write(tmp_path, 'a,b\n1,"x\n2,y"\n')
    assert records(CsvReader(path, quote_char=None)) == [{"a": 1, "b": '"x'}, {"a": 2, "b": 'y"'}]
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
