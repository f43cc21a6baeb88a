from __future__ import annotations

import collections
import sys
from pathlib import Path

import numpy as np
import pytest
from readers_kit import task
from torch.utils.data import IterableDataset, StackDataset

from edl_torch.errors import InvalidArgument, ReaderError, SourceChanged
from edl_torch.readers import MapDatasetReader


class Batched:
    """Counts calls; record 40 is bad."""

    def __init__(self, n: int = 100, bad: int | None = None) -> None:
        self.n, self.bad, self.calls = n, bad, []

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        if index == self.bad:
            raise OSError(f"record {index} is bad")
        return index * index

    def __getitems__(self, indices: list[int]) -> list[int]:
        self.calls.append(list(indices))
        return [self[index] for index in indices]


def test_getitems_reads_several_at_once_and_never_a_whole_shard():
    dataset = Batched()
    records = MapDatasetReader(dataset).read_records(task("Batched", 10, 90))
    assert next(iter(records)) == 100
    assert len(dataset.calls) == 1
    assert list(records) == [n * n for n in range(11, 90)]
    assert [n for call in dataset.calls for n in call] == list(range(10, 90))
    assert max(map(len, dataset.calls)) <= 32


def test_getitems_runs_python_for_a_call_and_not_for_a_record():
    records = MapDatasetReader(Batched()).read_records(task("Batched", 0, 96))
    calls = collections.Counter()
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, _: calls.update([frame.f_code.co_name] if event == "call" else ()))
    try:
        collections.deque(records, maxlen=0)
    finally:
        sys.setprofile(before)
    assert calls["_read_ahead"] <= 96 / 32 + 1


def test_a_bad_record_among_several_is_the_one_that_raises():
    records = iter(MapDatasetReader(Batched(bad=40)).read_records(task("Batched", 10, 90)))
    for expected in range(10, 40):
        assert next(records) == expected**2
    with pytest.raises(OSError, match="record 40 is bad"):
        next(records)


def test_getitems_of_another_length_is_refused():
    dataset = Batched()
    dataset.__class__ = type("Short", (Batched,), {"__getitems__": lambda self, indices: indices[1:]})
    with pytest.raises(ReaderError, match="gave 31 records for 32 numbers"):
        list(MapDatasetReader(dataset).read_records(task("Short", 0, 40)))


def test_getitems_that_gives_columns_is_refused_though_there_are_as_many_as_records():
    class Columns(Batched):
        def __getitems__(self, indices: list[int]) -> dict[str, list[int]]:
            return {name: [10 * index for index in indices] for name in "abc"}

    reader = MapDatasetReader(Columns(6), "columns")
    with pytest.raises(ReaderError, match=r"columns\.__getitems__ gave a dict of 3 columns, and not a list"):
        list(reader.load_each([0, 1, 2]))


@pytest.mark.parametrize("bad", [None, 40])
def test_getitems_may_change_the_list_that_it_is_given(bad: int | None):
    class Pops(Batched):
        def __getitems__(self, indices: list[int]) -> list[int]:
            indices.sort()  # then one cannot be read, and all are asked for again, one by one
            return [self[indices.pop(0)] for _ in range(len(indices))]

    records = MapDatasetReader(Pops(bad=bad)).read_each("Pops", np.array([3, 40, 2] if bad else [2, 3, 40]))
    if bad is None:
        assert list(records) == [4, 9, 1600]
        return
    assert next(records) == 9
    with pytest.raises(OSError, match="record 40 is bad"):
        next(records)


@pytest.mark.parametrize(
    ("name", "numbers"), [("Batched", [1, 100, 2]), ("Batched", [1, -1]), ("other", [1])]
)
def test_picked_records_that_are_not_there_are_refused_each_in_its_turn(name, numbers):
    records = iter(MapDatasetReader(Batched()).read_each(name, np.array(numbers)))
    if name == "Batched":
        assert next(records) == 1
    with pytest.raises(ReaderError, match=r"make the reader with the same|was asked for"):
        next(records)


def test_a_read_record_of_ones_own_reads_what_is_picked():
    class Negative(MapDatasetReader):
        def read_record(self, name, index):
            return -super().read_record(name, index)

    assert list(Negative(Batched()).read_each("Batched", np.array([3, 5]))) == [-9, -25]


class Endless(IterableDataset):
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize("dataset", [Endless(), iter([]), object(), {0: 1}])
def test_other_objects_are_refused(dataset):
    with pytest.raises(InvalidArgument, match="no map-style dataset"):
        MapDatasetReader(dataset)


def test_a_dataset_may_keep_an_open_npz_which_answers_to_no_name_but_its_arrays(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.arange(3.0))

    class Npz(Batched):
        def __init__(self, *files: np.lib.npyio.NpzFile) -> None:
            super().__init__(3)
            self.file, self.attributes = files[0], [one.f for one in files]

        def __getitem__(self, index: int) -> float:
            return self.file["x"][index]

    with np.load(tmp_path / "x.npz") as file:
        reader = MapDatasetReader(Npz(file))
        assert reader.load(2) == 2
        assert reader.fingerprint().strength == "partly"


def test_an_array_that_a_dict_has_is_compared_with_its_file(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(40.0))
    reader = MapDatasetReader(StackDataset(x=np.load(tmp_path / "x.npy", mmap_mode="r")))
    assert reader.load(3) == {"x": 3.0}
    written = np.lib.format.open_memmap(tmp_path / "x.npy", mode="r+")
    written[3] = 7
    written.flush()
    with pytest.raises(SourceChanged):
        reader.load(3)
