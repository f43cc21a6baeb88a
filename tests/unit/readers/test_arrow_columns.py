"""Columns of Arrow as arrays, and single rows: the same values, whatever they are made of."""

from __future__ import annotations

import datetime as dt
import pickle
import subprocess
import sys
import warnings
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

from edl_torch.errors import BadRecord, DataFormatError
from edl_torch.readers.arrow import (
    RowPicker,
    is_text,
    numpy_columns,
    plain_values,
    rows,
    scalar,
    text_values,
    valid,
)

pa = pytest.importorskip("pyarrow")


def column(values, kind, **options):
    return numpy_columns(pa.table({"x": pa.array(values, kind)}), **options)["x"]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((getattr(pa, f"{u}int{n}")(), f"{u}int{n}") for u in ("", "u") for n in (8, 16, 32, 64)),
        (pa.float16(), "float16"),
        (pa.float32(), "float32"),
        (pa.float64(), "float64"),
        (pa.bool_(), "bool"),
    ],
)
def test_numbers_keep_their_width_and_become_tensors_that_may_be_written_to(kind, dtype):
    found = numpy_columns(pa.table({"x": pa.array([1, 0, 1]).cast(kind)}))["x"]
    assert found.dtype == dtype
    assert found.tolist() == [1, 0, 1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.as_tensor(found)[0] = 0
    assert found.tolist() == [0, 0, 1]


@pytest.mark.parametrize("kind", [pa.int64(), pa.uint8(), pa.bool_()])
def test_a_null_without_a_value_is_an_error_that_says_what_to_do(kind):
    with pytest.raises(BadRecord, match=r"'x'.*has 1 NULL.*fill_nulls=\{'x'"):
        numpy_columns(pa.table({"x": pa.array([1, None]).cast(kind)}))


@pytest.mark.parametrize(
    ("values", "kind", "fill", "expected"),
    [
        ([1, None], pa.int16(), -1, [1, -1]),
        ([True, None], pa.bool_(), False, [True, False]),
        ([None, 2.0], pa.float64(), 0.0, [0.0, 2.0]),
        (["a", None], pa.string(), "", ["a", ""]),
        (["a", None], pa.dictionary(pa.int8(), pa.string()), "z", ["a", "z"]),
    ],
)
def test_nulls_are_filled_with_what_was_named(values, kind, fill, expected):
    found = column(values, kind, fill_nulls={"x": fill, "absent": 3})
    assert found.tolist() == expected
    assert found.dtype == column([value for value in values if value is not None], kind).dtype


def test_strings_bytes_decimals_and_times_are_objects():
    assert column(["ä", None, ""], pa.string()).tolist() == ["ä", None, ""]
    assert column(["ä", None], pa.large_string()).tolist() == ["ä", None]
    assert column([b"\x00", None], pa.binary()).tolist() == [b"\x00", None]
    assert column([Decimal("1.50"), None], pa.decimal128(10, 2)).tolist() == [Decimal("1.50"), None]
    assert column([dt.time(1, 2), None], pa.time64("us")).tolist() == [dt.time(1, 2), None]
    assert column([None, None], pa.null()).tolist() == [None, None]


def test_lists_are_arrays_of_their_own_length():
    table = pa.table({"x": pa.array([[9], [1, 2], None, [], [3]], pa.list_(pa.int32()))})
    found = numpy_columns(table.slice(1))["x"]
    assert [None if part is None else part.tolist() for part in found] == [[1, 2], None, [], [3]]
    assert found[0].dtype == np.int32
    assert column([["a"], [], None], pa.list_(pa.string())).tolist() == [["a"], [], None]
    with pytest.raises(BadRecord, match="NULL"):
        column([[1, None]], pa.list_(pa.int32()))


def test_two_columns_of_one_name_are_refused():
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"])
    with pytest.raises(DataFormatError, match="the name x"):
        numpy_columns(table)


def test_no_pandas_is_brought_into_a_process_that_reads_columns():
    """It would cost half a second and 30 MB in each loader worker, wherever it is installed."""
    code = """
import pickle, sys
import numpy as np, pyarrow as pa
from edl_torch.readers.arrow import RowPicker, numpy_columns, rows
from edl_torch.readers.arrow import row_numbers, scalar
table = pickle.loads(bytes.fromhex(sys.argv[1]))
list(rows(table.slice(1), {"i": 7}))
RowPicker(table.slice(1), {"i": 7}, {}, table.column_names).row(0)
numpy_columns(table.take(row_numbers(np.array([1, 0]))), {"i": 7, "s": "nothing"})
pa.repeat(scalar("x", pa.string()), 3)
print("pandas" in sys.modules)
"""
    table = pa.table(
        {
            "i": [1, None],
            "u": [True, False],
            "f": [1.5, None],
            "s": ["ä", None],
            "b": [b"x", None],
            "t": pa.array([1, None], pa.timestamp("us")),
            "d": pa.array([1, None], pa.date32()),
            "l": [[1], None],
            "v": pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float32(), 2)),
        }
    )
    done = subprocess.run(
        [sys.executable, "-c", code, pickle.dumps(table).hex()], capture_output=True, text=True
    )
    assert done.stdout.split() == ["False"], done.stderr


@pytest.mark.parametrize("start", [0, 1, 3])
@pytest.mark.parametrize(
    "kind",
    [
        *(pa.int8(), pa.uint64(), pa.float16(), pa.float64(), pa.bool_(), pa.date32(), pa.date64()),
        *(pa.timestamp("ns"), pa.timestamp("s", tz="UTC"), pa.duration("ms")),
        *(pa.string(), pa.large_string(), pa.binary(), pa.large_binary()),
    ],
    ids=str,
)
@pytest.mark.parametrize("with_null", [False, True])
def test_values_are_those_that_arrow_itself_gives(kind, start, with_null):
    """Arrow's conversion is the standard; ours reads buffers, so that pandas stays out."""
    values = [1, 0, None if with_null else 1, 1, 0, 1, 0, 0, 1, 1]
    text = ["a", "", None if with_null else "ä", "b", "\0", "cc", "dé", "", "e", "f"]
    array = pa.array(text).cast(kind) if is_text(kind) else _numbers(values, kind)
    array = array.slice(start, 6)
    found = text_values(array) if is_text(kind) else plain_values(array)
    if not is_text(kind):
        present = valid(array)
        assert present.tolist() == [value is not None for value in values[start : start + 6]]
        if found.dtype.kind in "iub" and with_null:
            found, array = found[present], array.drop_null()
    expected = array.to_numpy(zero_copy_only=False)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)
    assert found.flags.writeable


def _numbers(values, kind):
    if pa.types.is_date32(kind):
        return pa.array(values, pa.int32()).cast(kind)
    if pa.types.is_temporal(kind):
        return pa.array([None if value is None else value * 86_400_000 for value in values]).cast(kind)
    return pa.array(values).cast(kind)


def test_a_scalar_is_arrows_own_and_so_are_its_errors():
    for value, kind in ((3, pa.int8()), (1.5, pa.float64()), (True, pa.bool_()), ("ä", pa.string())):
        assert scalar(value, kind).equals(pa.scalar(value, kind))
    for value, kind in ((300, pa.int8()), ("x", pa.int8()), (-1, pa.uint64()), (1, pa.string())):
        with pytest.raises((pa.ArrowException, TypeError, OverflowError)) as arrows:
            pa.scalar(value, kind)
        with pytest.raises(arrows.type):
            scalar(value, kind)


def test_fill_nulls_reaches_into_lists():
    lists = pa.list_(pa.int64())
    found = column([[1, None], None, []], lists, fill_nulls={"x": 7})
    assert [None if row is None else row.tolist() for row in found] == [[1, 7], None, []]
    assert column([[1, None], [3, 4]], pa.list_(pa.int64(), 2), fill_nulls={"x": 7}).tolist() == [
        [1, 7],
        [3, 4],
    ]
    assert column([[[1, None]], None], pa.list_(lists), fill_nulls={"x": 7}).tolist()[0][0].tolist() == [1, 7]
    assert column([["a", None], None], pa.list_(pa.string()), fill_nulls={"x": "z"}).tolist() == [
        ["a", "z"],
        None,
    ]
    assert column([[1.5, None]], pa.list_(pa.float64()), fill_nulls={"x": 0.0})[0].tolist() == [1.5, 0]


def test_a_list_stands_for_null_lists_not_for_what_is_null_inside():
    lists = pa.list_(pa.int64())
    assert [row.tolist() for row in column([[1], None], lists, fill_nulls={"x": [7]})] == [[1], [7]]
    assert column([[1, 2], None], pa.list_(pa.int64(), 2), fill_nulls={"x": [7, 8]}).tolist() == [
        [1, 2],
        [7, 8],
    ]
    with pytest.raises(
        BadRecord, match=r"int64 in its lists.* 1 NULL.*fill_nulls=\{'x': …\}, a value and no list"
    ):
        column([[1, None]], lists, fill_nulls={"x": [7]})
    with pytest.raises(BadRecord, match=r"1 NULL list.*fill_nulls=\{'x': \[…\]\}, a list of 2 values"):
        column([[1, 2], None], pa.list_(pa.int64(), 2))
    with pytest.raises(
        DataFormatError, match=r"fill_nulls\['x'\] = 'z' is no value of the column's type int64"
    ):
        column([[1, None]], lists, fill_nulls={"x": "z"})


# Single rows: the same as all rows, whatever their columns are made of --------------------------------------


COUNT = 40


def wide() -> Any:
    """A column of every sort, without NULL and with."""
    ids = list(range(COUNT))
    day = dt.date(2024, 1, 1)
    plain: dict[str, Any] = {
        "int8": pa.array([i - 20 for i in ids], pa.int8()),
        "uint64": pa.array([2**64 - 1 - i for i in ids], pa.uint64()),
        "float32": pa.array(np.arange(COUNT) / 3, pa.float32()),
        "float64": pa.array(np.arange(COUNT) / 3),
        "bool": pa.array([i % 3 == 0 for i in ids]),
        "date": pa.array([day + dt.timedelta(i) for i in ids]),
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
