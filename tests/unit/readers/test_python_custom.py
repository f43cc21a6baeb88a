from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from edl_torch.errors import DataFormatError, InvalidArgument, ReaderError
from edl_torch.readers import PythonCustomReader
from edl_torch.shard import Shard, Task, TaskType
from edl_torch.testing.check_reader import check_reader


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


@pytest.mark.parametrize("records_per_task", [None, 1, 4, 5, 10, 11])
def test_custom_files_keep_the_contract(write, records_per_task):
    check_reader(lambda: PythonCustomReader(write(SIZES), records_per_task))
    check_reader(lambda: PythonCustomReader(write(SIZES), records_per_task), mode=TaskType.EVALUATION)


def test_shards_are_numbered_and_the_last_short_one_is_kept(write):
    shards = PythonCustomReader(write(SIZES), records_per_task=4).create_shards()
    assert shards == {"shard_0": (0, 4), "shard_1": (4, 4), "shard_2": (8, 2)}


def test_without_records_per_task_the_file_is_one_source(write):
    path = write(SIZES)
    assert PythonCustomReader(path).create_shards() == {path: (0, 10)}


def test_records_are_their_numbers(write):
    reader = PythonCustomReader(write(SIZES), records_per_task=4)
    assert list(reader.read_records(Task(shard=Shard(name="shard_1", start=5, end=8)))) == [5, 6, 7]
    assert reader.read_record("shard_2", 9) == 9


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


def test_the_file_is_executed_once_for_all_modes(write):
    path = write("print('executed')\n" + SIZES)
    reader = PythonCustomReader(path)
    reader.size()
    Path(path).write_text("raise SystemError('executed again')")
    assert reader.size(TaskType.EVALUATION) == 3


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


def test_numpy_integers_are_sizes(write):
    reader = PythonCustomReader(write("import numpy\ndef get_training_size(): return numpy.int32(6)"))
    assert reader.size() == 6
    assert type(reader.size()) is int


def test_missing_file_other_ending_and_bad_records_per_task_are_refused(write, tmp_path):
    with pytest.raises(DataFormatError, match="does not exist"):
        PythonCustomReader(tmp_path / "nothing.py")
    with pytest.raises(DataFormatError, match=r"must end in \.py"):
        PythonCustomReader(write(SIZES, "sizes.txt")).create_shards()
    for value in (0, -1, 2.5, True):
        with pytest.raises(InvalidArgument, match="records_per_task"):
            PythonCustomReader(write(SIZES), records_per_task=value)
