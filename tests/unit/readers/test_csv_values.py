"""Rows by Python and columns by Arrow: the same fields, types, refusals and values, whatever the bytes."""

from __future__ import annotations

import csv
import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from edl_torch.errors import InvalidArgument
from edl_torch.readers.text import csv_values
from edl_torch.readers.text.csv_values import (
    ColumnType,
    CsvDialect,
    CsvLayout,
    RowParser,
    check_encoding,
    column_type,
    infer_type,
)

pytest.importorskip("pyarrow", reason="columns need pyarrow")

TYPES = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
TYPES += ["float32", "float64", "bool", "str"]
PIECES = [*"019-+.eExfF_ \t()١d", "0x", "nan", "inf"]
WORDS = ["", "?", "NA", " ", " 5 ", "1 2", "٣", "0" * 30 + "5", "true", "TRUE", "tRue", "False"]
WORDS += ["007", "-0", "0x7f", "0xFF", "0x80", "0x8000000000000000", "127", "128", "-128", "-129", "255"]
WORDS += ["256", "65535", "2147483647", "-2147483648", "9223372036854775807", "9223372036854775808"]
WORDS += ["18446744073709551615", "1.", ".5", "1e5", "+1.0", "1e400", "-1e-400", "3.4028236e38", "0.1"]
WORDS += ["16777217", "1.0000000596046448", "nan(1)", "-nan", "Infinity"]
FIELDS = st.one_of(
    st.sampled_from(WORDS), st.lists(st.sampled_from(PIECES), max_size=6).map("".join), st.text(max_size=6)
)
DIALECT = CsvDialect()


def arrow_columns(rows: list[bytes], dialect: CsvDialect, layout: CsvLayout):
    return csv_values.arrow_columns(b"\n".join(rows), len(rows), dialect, layout)


def layout_of(kind: str, nulls=("", "NA"), **options) -> CsvLayout:
    return CsvLayout(names=("a",), columns=(("a", ColumnType(kind)),), nulls=frozenset(nulls), **options)


def quoted(field: str) -> bytes:
    return ('"' + field.replace('"', '""') + '"\n').encode()


def by_row(row: bytes, dialect: CsvDialect, layout: CsvLayout):
    try:
        return RowParser(dialect, layout).parse(row)
    except ValueError:
        return None


def same(left, right) -> bool:
    return left == right or (left != left and right != right)


@pytest.mark.parametrize("kind", TYPES)
def test_both_halves_take_and_refuse_the_same_fields(kind):
    layout = layout_of(kind)

    @given(field=FIELDS)
    @example(field="+1.0")  # Arrow takes it since 21 or so
    def check(field: str) -> None:
        row = quoted(field)
        record, batch = by_row(row, DIALECT, layout), arrow_columns([row], DIALECT, layout)
        if batch is None and kind.startswith("float") and field.strip(" \t").startswith("+"):
            return
        assert (record is None) == (batch is None), (field, record, batch)
        if record is not None:
            assert batch["a"].dtype == ColumnType(kind).dtype
            assert same(batch["a"].tolist()[0], record["a"]), (field, record, batch)

    check()


@pytest.mark.parametrize("kind", ["int64", "float64", "float32", "bool", "str"])
def test_every_word_alone_and_unquoted(kind):
    """Hypothesis may not try them all."""
    for word in WORDS:
        row = word.encode() + b"\n"
        if not word:
            continue  # a line without anything is no record
        record, batch = by_row(row, DIALECT, layout_of(kind)), arrow_columns([row], DIALECT, layout_of(kind))
        assert (record is None) == (batch is None), word
        assert record is None or same(batch["a"].tolist()[0], record["a"]), word


INNER = st.lists(st.sampled_from(["a", '"', ",", "\n", "\r", "\r\n", "é", "\ufeff", " "]), max_size=8).map(
    "".join
)
AFTER = st.lists(st.sampled_from(["a", '"', "é", "\ufeff", " ", "b"]), max_size=4).map("".join)


@st.composite
def written_fields(draw: st.DrawFn) -> tuple[str, str]:
    """How a field stands in a file, and what it says: quotes inside and outside of quotes."""
    tail = draw(AFTER).lstrip('"')
    if draw(st.booleans()):
        return tail, tail
    inner = draw(INNER)
    return '"' + inner.replace('"', '""') + '"' + tail, inner + tail


@given(
    rows=st.lists(st.lists(written_fields(), min_size=3, max_size=3), min_size=1, max_size=6),
    end=st.sampled_from(["\n", "\r", "\r\n", "\n\n", ""]),
)
def test_both_halves_cut_rows_into_the_same_fields(rows, end):
    data = [(",".join(raw for raw, _ in row) + end).encode() for row in rows]
    expected = [[said for _, said in row] for row in rows]
    layout = CsvLayout(
        names=("a", "b", "c"), columns=tuple((name, ColumnType("str")) for name in "abc"), as_tuples=True
    )
    assert [list(RowParser(DIALECT, layout).parse(row)) for row in data] == expected
    assert [DIALECT._split_quoted(row.decode().rstrip("\r\n"), '"') for row in data] == expected
    batch = arrow_columns(data, DIALECT, layout)
    assert [list(row) for row in zip(*batch.values(), strict=True)] == expected


def test_fields_longer_than_pythons_limit_are_read():
    field = 'x"' * csv.field_size_limit()
    layout = CsvLayout(names=("a", "b"), columns=(("a", ColumnType("str")), ("b", ColumnType("int64"))))
    row = quoted(field).rstrip(b"\n") + b",5\n"
    assert RowParser(DIALECT, layout).parse(row) == {"a": field, "b": 5}
    assert arrow_columns([row], DIALECT, layout)["a"].tolist() == [field]


def test_one_call_of_arrow_takes_rows_of_any_size():
    """Its blocks are of 1 MiB by default, and no row may be longer than one."""
    fields = ["\n" * 3_000_000, "x\n" * 700_000, "y"]
    batch = arrow_columns([quoted(field) for field in fields], DIALECT, layout_of("str"))
    assert batch["a"].tolist() == fields


def test_nulls_are_nan_or_filled_or_bad_and_never_in_text():
    assert math.isnan(by_row(b"NA\n", DIALECT, layout_of("float32"))["a"])
    assert by_row(b"NA\n", DIALECT, layout_of("int64")) is None
    assert by_row(b"NA\n", DIALECT, layout_of("str")) == {"a": "NA"}
    assert by_row(b'""\n', DIALECT, layout_of("int64", fill_nulls={"a": -1})) == {"a": -1}
    assert by_row(b"1\n", DIALECT, layout_of("int64", nulls=("1",))) is None
    for kind, fill in (("int64", -1), ("bool", True), ("float64", 0.5)):
        layout = layout_of(kind, fill_nulls={"a": fill})
        batch = arrow_columns([b"NA\n", b"1\n"], DIALECT, layout)
        assert batch["a"].tolist() == [fill, 1]
        assert batch["a"].dtype == ColumnType(kind).dtype


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "gb18030", "shift_jis", "UTF8"])
def test_other_encodings(encoding):
    word = "ü" if encoding in ("latin-1", "cp1252") else "表"
    dialect = CsvDialect(encoding=encoding, delimiter=",")
    row = f'"{word}\n"\n'.encode(encoding)
    assert by_row(row, dialect, layout_of("str")) == {"a": word + "\n"}
    assert arrow_columns([row], dialect, layout_of("str"))["a"].tolist() == [word + "\n"]


@pytest.mark.parametrize(
    "encoding", ["utf-16", "utf-32-le", "utf-7", "iso2022_jp", "klingon", "cp037", "hex"]
)
def test_encodings_that_hide_line_ends_are_refused(encoding):
    with pytest.raises(InvalidArgument, match="encoding="):
        check_encoding(encoding, (",",))


def test_a_delimiter_that_may_be_half_a_character_is_refused():
    check_encoding("gbk", (",", '"'))
    with pytest.raises(InvalidArgument, match=r"'\|'"):
        CsvDialect(encoding="gbk", delimiter="|")
    CsvDialect(encoding="utf-8", delimiter="|")


@pytest.mark.parametrize(
    "options", [{"delimiter": ";;"}, {"delimiter": "\n"}, {"quote_char": "é"}, {"quote_char": ","}]
)
def test_characters_that_cannot_be_scanned_for_are_refused(options):
    with pytest.raises(InvalidArgument):
        CsvDialect(**options)


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        (["1", "-5", "0x1F"], "int64"),
        (["1", "", "3"], "float64"),
        (["1", "2.5"], "float64"),
        (["9223372036854775808"], "float64"),
        (["0", "1"], "int64"),
        (["true", "False", "1"], "bool"),
        (["true", ""], "str"),
        (["", ""], "str"),
        (["nan", "1"], "float64"),
        (["5 apples"], "str"),
    ],
)
def test_the_narrowest_type_that_takes_all(fields, kind):
    assert infer_type(fields, frozenset({""})).name == kind


def test_types_are_named_as_users_do():
    named = {int: "int64", float: "float64", bool: "bool", str: "str", np.float32: "float32", "string": "str"}
    named |= {np.dtype("uint8"): "uint8", "int": "int64", "float": "float64"}
    assert {given: column_type(given, "a").name for given in named} == named
    for wrong in ("int65", "datetime64[s]", complex, 5, None, []):
        with pytest.raises(InvalidArgument, match=r"dtypes\['a'\]"):
            column_type(wrong, "a")
