"""Single rows: the same as all rows, whatever their columns are made of."""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np
import pytest

from edl_torch.errors import BadRecord

pa = pytest.importorskip("pyarrow", reason="Arrow tables need pyarrow")

from edl_torch.readers.arrow import RowPicker, rows  # noqa: E402

COUNT = 40


def wide() -> Any:
    """A column of every sort, without NULL and with."""
    ids = list(range(COUNT))
    day = datetime.date(2024, 1, 1)
    plain: dict[str, Any] = {
        "int8": pa.array([i - 20 for i in ids], pa.int8()),
        "uint64": pa.array([2**64 - 1 - i for i in ids], pa.uint64()),
        "float32": pa.array(np.arange(COUNT) / 3, pa.float32()),
        "float64": pa.array(np.arange(COUNT) / 3),
        "bool": pa.array([i % 3 == 0 for i in ids]),
        "date": pa.array([day + datetime.timedelta(i) for i in ids]),
        "time": pa.array([1_700_000_000_000_000_000 + i for i in ids], pa.timestamp("ns")),
        "text": pa.array([f"é{i}" * (i % 3) for i in ids]),
        "large": pa.array([str(i) for i in ids], pa.large_string()),
        "binary": pa.array([bytes([i]) for i in ids]),
        "kind": pa.array([f"k{i % 3}" for i in ids]).dictionary_encode(),
        "vector": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(2.0 * COUNT)), 2),
        "many": pa.array([list(range(i % 4)) for i in ids]),
        "struct": pa.array([{"a": i} for i in ids]),
    }
    holes = {
        f"{name} or not": pa.array([None if i % 5 == 0 else v for i, v in enumerate(plain[name].to_pylist())])
        for name in ("float64", "text", "date", "many")
    }
    return pa.table({**plain, **holes})


def text(row: dict[str, Any]) -> str:
    return repr([(name, type(value), value) for name, value in row.items()])


@pytest.mark.parametrize("part", [(0, COUNT), (7, 20), (39, 1)])
def test_a_row_is_what_rows_gives(part: tuple[int, int]) -> None:
    table = wide().slice(*part)
    picker = RowPicker(table, {}, {}, table.column_names)
    for number, row in enumerate(rows(table)):
        assert text(picker.row(number)) == text(row)


def test_several_chunks_are_one_column() -> None:
    table = pa.concat_tables([wide().slice(0, 9), wide().slice(9)])
    picker = RowPicker(table, {}, {}, table.column_names)
    assert [text(picker.row(number)) for number in range(COUNT)] == list(map(text, rows(wide())))


def test_columns_come_in_the_order_asked_for_with_those_that_are_the_same() -> None:
    table = pa.table({"x": [1, 2], "y": ["a", None]})
    picker = RowPicker(table, {}, {"year": 2024}, ["y", "year", "x"])
    assert list(picker.row(1).items()) == [("y", None), ("year", 2024), ("x", 2)]


def test_rows_are_the_callers() -> None:
    table = pa.table({"many": [[1], [2]]})
    picker = RowPicker(table, {}, {}, ["many"])
    picker.row(0)["many"][0] = 7
    assert picker.row(0)["many"].tolist() == [1]


def test_a_null_without_a_value_is_a_bad_record_and_no_other_row_is() -> None:
    table = pa.table({"x": [1, None, 3]})
    picker = RowPicker(table, {}, {}, ["x"])
    assert [picker.row(0), picker.row(2)] == [{"x": 1}, {"x": 3}]
    with pytest.raises(BadRecord, match="column 'x'"):
        picker.row(1)
    assert RowPicker(table, {"x": -1}, {}, ["x"]).row(1) == {"x": -1}


def test_a_number_beyond_the_end_is_an_error() -> None:
    table = pa.table({"x": [1, 2]})
    with pytest.raises(IndexError):
        RowPicker(table, {}, {}, ["x"]).row(2)
