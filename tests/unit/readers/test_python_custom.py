"""What every reader inherits: names, paths, records as bytes, and readers that are given as Python."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edl_torch.errors import BadRecord, DataFormatError, InvalidArgument, ReaderError
from edl_torch.readers import PythonCustomReader
from edl_torch.readers.base import (
    AbstractDataReader,
    has_batch_reads,
    has_random_access,
    import_for_reading,
    reader_sources,
    sources_of,
)
from edl_torch.readers.images.decode import safe_relative_path
from edl_torch.readers.recordio.record_bytes import DECODERS, AutoEncode, kind_of
from edl_torch.shard import Shard, Source, Task, TaskType
from edl_torch.testing.check_reader import records_equal


@pytest.fixture
def write(tmp_path: Path):
    def write(content: str, name: str = "sizes.py") -> str:
        path = tmp_path / name
        path.write_text(content)
        return str(path)

    return write


SIZES = """
import dataclasses
@dataclasses.dataclass
class Sizes:
    train: int = 10
def get_training_size(): return Sizes().train
def get_evaluation_size(): return 3
"""


def test_shards_are_numbered_and_the_last_short_one_is_kept(write):
    shards = PythonCustomReader(write(SIZES), records_per_task=4).create_shards()
    assert shards == {"shard_0": (0, 4), "shard_1": (4, 4), "shard_2": (8, 2)}


def test_each_mode_has_its_function(write):
    reader = PythonCustomReader(write(SIZES))
    assert reader.create_shards(TaskType.EVALUATION) == {reader.filename: (0, 3)}
    with pytest.raises(DataFormatError, match=r"has no function get_prediction_size\(\): define it"):
        reader.create_shards(TaskType.PREDICTION)
    with pytest.raises(InvalidArgument, match="use TRAINING"):
        reader.create_shards(TaskType.WAIT)


def test_known_sizes_travel_and_the_file_is_not_executed_again(write):
    path = write(SIZES)
    reader = PythonCustomReader(path)
    reader.create_shards()
    data = pickle.dumps(reader)
    Path(path).write_text("raise SystemError('executed again')")
    copy = pickle.loads(data)
    assert copy.create_shards() == {path: (0, 10)}
    assert copy.read_record(path, 9) == 9
    assert list(copy.read_records(Task(shard=Shard(name=path, start=0, end=2)))) == [0, 1]


def test_elasticdl_s_own_way_to_the_size(write):
    """`load_get_size_fn` and `get_size` of its images design."""
    reader = PythonCustomReader(write(SIZES), records_per_task=2)
    assert reader.get_size() == 10
    reader.load_get_size_fn(fn_name="get_evaluation_size")
    assert reader.get_size() == 3
    assert reader.create_shards() == {"shard_0": (0, 2), "shard_1": (2, 1)}
    copy = pickle.loads(pickle.dumps(reader))
    assert copy.read_record("shard_1", 2) == 2
    with pytest.raises(ReaderError, match="shard_0 to shard_1"):
        copy.read_record("shard_2", 4)
    with pytest.raises(DataFormatError, match=r"has no function get_test_size\(\)"):
        reader.load_get_size_fn("get_test_size")
    assert reader.get_size() == 3


@pytest.mark.parametrize("name", ["shard_3", "shard_01", "shard_-1", "shard_", "shard_٢", "x", ""])
def test_unknown_shards_are_refused(write, name):
    reader = PythonCustomReader(write(SIZES), records_per_task=4)
    reader.create_shards()
    with pytest.raises(ReaderError, match="shard_0 to shard_2"):
        reader.read_record(name, 0)


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        ("", DataFormatError, r"has no function get_training_size\(\)"),
        ("get_training_size = 7", DataFormatError, "has no function"),
        ("def get_training_size(): return 0", DataFormatError, "returned 0: there is nothing to read"),
        ("def get_training_size(): return -5", DataFormatError, "returned -5"),
        ("def get_training_size(): return 'ten'", DataFormatError, "returned 'ten', expected an integer"),
        ("def get_training_size(): return 1.5", DataFormatError, "returned 1.5"),
        ("def get_training_size(): return True", DataFormatError, "returned True"),
        ("def get_training_size(): return None", DataFormatError, "returned None"),
        ("def get_training_size(): 1/0", ReaderError, r"get_training_size\(\) raised ZeroDivisionError"),
        ("import nowhere_to_be_found", ReaderError, "executing it raised ModuleNotFoundError"),
        ("def (:", ReaderError, "executing it raised SyntaxError"),
    ],
)
def test_bad_files_name_the_file_and_the_reason(write, content, error, message):
    path = write(content)
    with pytest.raises(error, match=message) as caught:
        PythonCustomReader(path).create_shards()
    assert path in str(caught.value)


def test_missing_file_other_ending_and_bad_records_per_task_are_refused(write, tmp_path):
    with pytest.raises(DataFormatError, match="does not exist"):
        PythonCustomReader(tmp_path / "nothing.py")
    with pytest.raises(DataFormatError, match=r"must end in \.py"):
        PythonCustomReader(write(SIZES, "sizes.txt")).create_shards()
    for value in (0, -1, 2.5, True):
        with pytest.raises(InvalidArgument, match="records_per_task"):
            PythonCustomReader(write(SIZES), records_per_task=value)


# Reader base ------------------------------------------------------------------------------------------------


class WithoutMode(AbstractDataReader):
    def create_shards(self):
        return {"a": 3}

    def read_records(self, task):
        return iter(())


class WithMode(WithoutMode):
    def create_shards(self, mode=TaskType.TRAINING):
        return {mode.name: 3}

    def read_record(self, name, index):
        return index


class WithAnything(WithoutMode):
    def create_shards(self, *args):
        return {args[0].name: 3}

    def read_batch(self, name, indices):
        return indices


def test_both_signatures_of_create_shards_are_understood():
    assert reader_sources(WithoutMode(), TaskType.EVALUATION) == (Source(name="a", count=3),)
    for reader in (WithMode(), WithAnything()):
        assert reader_sources(reader, TaskType.EVALUATION) == (Source(name="EVALUATION", count=3),)


def test_optional_methods_are_noticed_only_where_written():
    assert [has_random_access(r) for r in (WithoutMode(), WithMode(), WithAnything())] == [False, True, False]
    assert [has_batch_reads(r) for r in (WithoutMode(), WithMode(), WithAnything())] == [False, False, True]


@pytest.mark.parametrize(
    ("shards", "rows"),
    [
        ({}, []),
        ({"a": 3, "b": (5, 2), "c": [7, np.int32(1)]}, [("a", 0, 3), ("b", 5, 2), ("c", 7, 1)]),
        ([("a", 0, 3), ("a", 3, 2)], [("a", 0, 3), ("a", 3, 2)]),
        ({"a": np.int64(4), "b": 0}, [("a", 0, 4), ("b", 0, 0)]),
    ],
)
def test_every_form_of_shards_is_normalised(shards, rows):
    sources = sources_of(shards, "Reader")
    assert [(source.name, source.start, source.count) for source in sources] == rows


@pytest.mark.parametrize(
    "shards",
    [
        None,
        5,
        {"a": None},
        {"a": 2.5},
        {"a": "5"},
        {"a": (1, 2, 3)},
        {"a": -1},
        {"a": (-1, 5)},
        [("a", 3)],
        ["a"],
    ],
)
def test_other_forms_name_the_reader(shards):
    with pytest.raises(DataFormatError, match=r"Reader\.create_shards\(\)"):
        sources_of(shards, "Reader")


def test_what_reading_imports_is_imported_ahead_and_what_is_not_there_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "edl_imported_ahead.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    reader = WithMode()
    reader.imports = ("edl_not_installed", "edl_imported_ahead")
    import_for_reading(reader)
    assert sys.modules.pop("edl_imported_ahead").__file__
    import_for_reading(object())


# Records as bytes and back, one rule for each kind of record ------------------------------------------------


IMAGE = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)


@pytest.mark.parametrize(
    ("record", "kind", "back"),
    [
        (b"\0x", "bytes", b"\0x"),
        (bytearray(b"x"), "bytes", b"x"),
        (memoryview(b"x"), "bytes", b"x"),
        ("größe", "text", "größe"),
        ("", "text", ""),
        (None, "json", None),
        (3, "json", 3),
        (np.int64(3), "json", 3),
        ({"a": [1, 2.5, None, True], "ü": "ü"}, "json", {"a": [1, 2.5, None, True], "ü": "ü"}),
        ((1, "x"), "json", [1, "x"]),
        ({"n": np.float32(0.5)}, "json", {"n": 0.5}),
        ([], "json", []),
        (IMAGE, "npy", IMAGE),
        (np.float64([1, np.nan]), "npy", np.float64([1, np.nan])),
        (torch.arange(3), "npy", np.arange(3)),
        ((IMAGE, 7), "npz", {"0": IMAGE, "1": np.array(7)}),
        ((IMAGE, {"boxes": IMAGE[0], "names": ["a", "b"]}), "npz",
         {"0": IMAGE, "1/boxes": IMAGE[0], "1/names/0": np.array("a"), "1/names/1": np.array("b")}),
        ({"file": IMAGE, "allow_pickle": torch.ones(1)}, "npz",
         {"file": IMAGE, "allow_pickle": np.ones(1, np.float32)}),
    ],
)  # fmt: skip
def test_records_come_back(record: object, kind: str, back: object) -> None:
    assert kind_of(record) == kind
    data = AutoEncode()(record)
    assert type(data) is bytes
    found = DECODERS[kind](data) if kind != "bytes" else data
    assert records_equal(found, back), found


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (object(), "holds a object, which has no form here.*--encode"),
        ([1, {2, 3}], "holds a set at '1'"),
        ({1: 2}, "has the key 1, which is no text"),
        (float("nan"), "does not fit JSON"),
        ("\udcff", "is no UTF-8 text"),
        (np.array([object()]), "does not fit .npy"),
        ((IMAGE, None), "has None at '1'"),
        ({"a": {"b": IMAGE}, "a/b": 1}, "has 1 at 'a/b'"),
        (torch.ones(1, requires_grad=True), "does not fit .npy"),
    ],
)
def test_other_records_are_refused_with_a_way_out(record: object, message: str) -> None:
    with pytest.raises(BadRecord, match=message):
        AutoEncode()(record)


@pytest.mark.parametrize("kind", DECODERS)
def test_damaged_records_are_bad_records(kind: str) -> None:
    with pytest.raises(BadRecord, match="is n"):
        DECODERS[kind](b"\xff\x00 nonsense")


def test_pickled_objects_are_not_loaded() -> None:
    import io

    file = io.BytesIO()
    np.save(file, np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(BadRecord, match="allow_pickle"):
        DECODERS["npy"](file.getvalue())


# Safe paths -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "path"),
    [
        ("a.jpg", "a.jpg"),
        ("train/a b.jpg", "train/a b.jpg"),
        ("..a/b...jpg", "..a/b...jpg"),
        ("train\\cats\\1.jpg", "train/cats/1.jpg"),
        ("./a.jpg", "a.jpg"),
        ("a//b/../c.jpg", "a/c.jpg"),
    ],
)
def test_paths_inside_the_root_are_normalised(entry, path):
    assert safe_relative_path(entry, "'list.csv' line 1") == path


@pytest.mark.parametrize(
    "entry",
    [
        "",
        ".",
        "/etc/passwd",
        "//host/x",
        "..",
        "../a",
        "a/../../b",
        "a/..",
        "..\\a",
        "\\a",
        "C:\\a",
        "c:a",
        "a\x00b",
    ],
)
def test_paths_that_lead_out_name_file_and_entry(entry):
    with pytest.raises(DataFormatError) as caught:
        safe_relative_path(entry, "'list.csv' line 7")
    assert "'list.csv' line 7" in str(caught.value)
    assert repr(entry) in str(caught.value)


@given(
    st.lists(st.sampled_from(["..", ".", "", "a", "b.jpg", "\\", "/", "C:", "..\\"]), max_size=8).map(
        "/".join
    )
)
def test_what_is_accepted_stays_inside(entry):
    try:
        path = safe_relative_path(entry, "x")
    except DataFormatError:
        return
    full = os.path.normpath(os.path.join("/root/images", path))
    assert full.startswith("/root/images/")
