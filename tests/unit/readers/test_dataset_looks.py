"""A map-style dataset is told from another by what it holds, and it is said how much that tells."""

from __future__ import annotations

import collections
import itertools
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow as pa
import pytest
import torch
from cases import cases
from numpy.lib.stride_tricks import sliding_window_view
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

from edl_torch.errors import ReaderError
from edl_torch.fingerprint import check, describe_change, differ, known_by, strength_of
from edl_torch.readers.base import AbstractDataReader, changed_since, reader_fingerprint
from edl_torch.readers.map_dataset import MapDatasetReader
from edl_torch.readers.shared.looks import name_of_function

Make = Callable[[Path], AbstractDataReader]


class Held:
    """A dataset of the user's, with whatever attributes."""

    def __init__(self, count: int = 0, **attributes: Any) -> None:
        self.__dict__ |= attributes
        self._count = count or len(next(iter(attributes.values())))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("no record may be read")


class Frame(Held):
    """As Hugging Face's `Dataset`: columns, which are read as they are kept."""

    @property
    def column_names(self) -> list[str]:
        return ["x", "path"]

    def with_format(self, kind: str) -> Any:
        return [
            pa.table({"x": [x], "path": [{"bytes": b"", "path": f"{x}.jpg"}]}) for x in range(self._count)
        ]


class Sliced(Frame):
    def rows(self) -> list[Any]:
        return super().with_format("arrow")

    def with_format(self, kind: str) -> Any:
        rows = self.rows()

        class Rows:
            def __getitem__(self, part: slice) -> Any:
                return rows[part.start]

        return Rows()


class Decoded:
    """A feature of Hugging Face's."""

    def __init__(self, mode: str | None) -> None:
        self.mode, self.decode = mode, True

    def decode_example(self, value: Any) -> Any:
        raise AssertionError("no record may be read")


class Pictures(Sliced):
    """Of images by path, whose names alone need not look like a path's."""

    def rows(self) -> list[Any]:
        paths = [f"{self.folder}/{name}/x" for name in self.names]
        return [pa.table({"image": [{"bytes": None, "path": path}]}) for path in paths]


Pair, Swapped = collections.namedtuple("Pair", "k m"), collections.namedtuple("Swapped", "m k")

ARRAY = np.arange(600, dtype=np.float32).reshape(200, 3)
OTHER = ARRAY[::-1].copy()
PATHS = [f"/data/{n}.png" for n in range(200)]
DIFFERING: dict[str, tuple[Any, Any]] = {
    "a list": (list(range(200)), list(range(199, -1, -1))),
    "an array": (ARRAY, OTHER),
    "an array of a dataset's": (Held(data=ARRAY), Held(data=OTHER)),
    "labels": (Held(data=ARRAY, targets=list(range(200))), Held(data=ARRAY, targets=[1] * 200)),
    "a tuple of arrays": (Held(200, tensors=(ARRAY, ARRAY)), Held(200, tensors=(ARRAY, OTHER))),
    "a part of a dataset": (
        Held(indices=[1, 2], dataset=Held(data=ARRAY)),
        Held(indices=[2, 1], dataset=Held(data=ARRAY)),
    ),
    "a dataset in a part": (
        Held(indices=[1, 2], dataset=Held(data=ARRAY)),
        Held(indices=[1, 2], dataset=Held(data=OTHER)),
    ),
    **{
        f"a part of {type(one).__name__}": (Subset(one, [1, 2]), Subset(other, [1, 2]))
        for one, other in (([1, 2, 3], [1, 2, 4]), (torch.arange(3), torch.arange(3, 6)))
    },
    "lists in a row": (ConcatDataset([[1] * 9, [2] * 9]), ConcatDataset([[1] * 9, [3] * 9])),
    "several datasets": (
        Held(400, datasets=[Held(data=ARRAY), Held(data=OTHER)]),
        Held(400, datasets=[Held(data=OTHER), Held(data=ARRAY)]),
    ),
    "paths": (Held(paths=PATHS), Held(paths=PATHS[::-1])),
    "relative paths in another folder": tuple(
        Held(paths=[f"{folder}/{n}.png" for n in range(200)]) for folder in ("train", "val")
    ),
    "files with classes in another folder": tuple(
        Held(samples=[(f"{folder}/{n}.png", 0) for n in range(200)]) for folder in ("train", "val")
    ),
    "dates that are written like paths": tuple(
        [(f"{year}/01", n) for n in range(9)] for year in (2023, 2024)
    ),
    "files with classes": (
        Held(samples=[(path, 0) for path in PATHS]),
        Held(samples=[(path, 0) for path in PATHS[1:] + PATHS[:1]]),
    ),
    "names of classes": (
        Held(data=ARRAY, classes=["cat", "dog"]),
        Held(data=ARRAY, classes=["dog", "cat"]),
    ),
    "numbers of classes": (
        Held(samples=[(path, "cat") for path in PATHS], numbers={"cat": 0, "dog": 1}),
        Held(samples=[(path, "cat") for path in PATHS], numbers={"dog": 0, "cat": 1}),
    ),
    "a stack by name": (StackDataset(x=ARRAY, y=[1] * 200), StackDataset(x=ARRAY, y=[2] * 200)),
    "a stack of lists": (StackDataset([1] * 200, [3] * 200), StackDataset([1] * 200, [4] * 200)),
    "a stack of datasets": (StackDataset(x=Held(data=ARRAY)), StackDataset(x=Held(data=OTHER))),
    "rows": (
        Held(rows=[{"id": n, "text": None} for n in range(200)]),
        Held(rows=[{"id": -n, "text": None} for n in range(200)]),
    ),
}


INDEXED = [pandas.Series(range(40), index=order) for order in (range(40), range(39, -1, -1))]
DIFFERING |= {
    "named tuples": ([Pair(1, 2)] * 9, [Swapped(1, 2)] * 9),
    "names of fields": (np.zeros(9, [("a", "i4")]), np.zeros(9, [("c", "i4")])),
    "a kind of numbers": (np.arange(9, dtype="f4"), np.arange(9, dtype="f8")),
    "a unit of times": tuple(np.arange(9).astype(unit) for unit in ("M8[ns]", "M8[ps]")),
    "a kind of numbers of a table": tuple(pandas.Series(np.arange(9.0), dtype=kind) for kind in ("f4", "f8")),
    "categories of a table": tuple(
        pandas.DataFrame({"kind": pandas.Categorical(["b"] * 9, categories=known)})
        for known in (["a", "b"], ["b", "a"])
    ),
    "one more category": tuple(
        pandas.Series(pandas.Categorical(["b"] * 9, categories=known)) for known in (["b"], ["b", "c"])
    ),
    "a mask": tuple(np.ma.array(ARRAY, mask=hidden == ARRAY) for hidden in (ARRAY, -1)),
    "how images are decoded": tuple(Sliced(9, features={"x": [Decoded(mode)]}) for mode in ("L", "RGB")),
    "an index": (INDEXED[0], INDEXED[1]),
    "a format of Hugging Face's": tuple(
        Sliced(9, format={"type": "torch", "columns": [name], "format_kwargs": {"dtype": torch.float32}})
        for name in ("x", "path")
    ),
    "a function of Hugging Face's format": tuple(
        Sliced(9, format={"type": "custom", "format_kwargs": {"transform": partial(print, number)}})
        for number in (1, 2)
    ),
}

DIFFERING["images by path, not by the last part alone"] = (
    Pictures(4, folder="/data", names="abcd"),
    Pictures(4, folder="/data", names="abdc"),
)
for _depth in range(1, 7):
    _one, _other = Held(data=ARRAY), Held(data=OTHER)
    for _ in range(_depth):
        _one, _other = Held(200, base=_one), Held(200, base=_other)
    DIFFERING[f"a dataset in {_depth} wrappers"] = _one, _other


@pytest.mark.parametrize("what", DIFFERING)
def test_a_dataset_in_another_order_is_another_one(what: str) -> None:
    one, other = (reader_fingerprint(MapDatasetReader(dataset)) for dataset in DIFFERING[what])
    assert differ(one, other)
    assert reader_fingerprint(MapDatasetReader(DIFFERING[what][0])) == one


@pytest.mark.parametrize(
    ("here", "there"),
    [
        (Held(paths=PATHS), Held(paths=[f"/mnt/other{path}" for path in PATHS])),
        (
            Held(samples=[(path, 0) for path in PATHS], root="/data"),
            Held(samples=[(f"/mnt{path}", 0) for path in PATHS], root="/mnt/data/"),
        ),
        *(
            (Held(rows=[entry("") for entry in row]), Held(rows=[entry("/mnt") for entry in row]))
            for row in (
                [lambda root, path=path: {"image": root + path, "label": 1} for path in PATHS],
                [lambda root, path=path: (root + path, f"{root}/masks{path}") for path in PATHS],
                [lambda root, path=path: [1, root + path] for path in PATHS],
                [lambda root, path=path: {"views": [Path(root + path), 3]} for path in PATHS],
            )
        ),
        (
            Held(paths=[Path(f"../{path}") for path in PATHS]),
            Held(paths=[Path(f"/mnt{path}") for path in PATHS]),
        ),
        (
            Held(samples=[(path[1:], 0) for path in PATHS], root="data"),
            Held(samples=[(f"/mnt{path}", 0) for path in PATHS], root="/mnt/data"),
        ),
        (Held(paths=np.array(PATHS)), Held(paths=np.array([f"/mnt{path}" for path in PATHS]))),
        (
            Held(samples=[(path, f"/masks{path}") for path in PATHS]),
            Held(samples=[(f"/mnt{path}", f"/mnt/masks{path}") for path in PATHS]),
        ),
    ],
)
def test_a_dataset_of_files_is_the_same_below_another_folder(here: Any, there: Any) -> None:
    one, other = (reader_fingerprint(MapDatasetReader(dataset)) for dataset in (here, there))
    assert one == other != ""


def test_a_dataset_of_files_names_those_that_were_added_and_removed() -> None:
    old, new = ([(path, 0) for path in PATHS] for _ in range(2))
    new[7] = ("/data/new.png", 0)
    one, other = (reader_fingerprint(MapDatasetReader(Held(samples=each))) for each in (old, new))
    assert "added 'new.png'; removed '7.png'" in describe_change(one, other)


def test_a_class_of_the_program_has_one_name_in_all_processes() -> None:
    mine, workers = (type("Mine", (), {"__module__": name}) for name in ("__main__", "__mp_main__"))
    assert name_of_function(mine) == name_of_function(workers)


@pytest.mark.parametrize(
    ("dataset", "use", "said"),
    [
        (Held(4, rows=[1, 2, 3, 4]), lambda d: d.rows.insert(0, 0), "nothing of what was looked at then"),
        (Held(4, rows=[1] * 4, y=[1] * 4), lambda d: d.rows.insert(0, 0), "removed 'rows'"),
        (Held(4, rows=[1] * 4, y=[1] * 4), lambda d: d.rows.__setitem__(2, None), "removed 'rows'"),
        (
            Held(4, rows=[1] * 4, kinds={"a": 0, "b": 1}),
            lambda d: d.kinds.update(a=1, b=0),
            "removed 'kinds'",
        ),
        (
            Held(samples=[(f"{n}.png", 0) for n in range(1500)], labels=[0] * 1500),
            lambda d: d.labels.append(1),
            "removed 'labels'",
        ),
    ],
    ids=["the only list", "a list that grows", "a list that has None", "a table of classes", "of many files"],
)
def test_what_was_looked_at_when_a_job_began_is_still_there(dataset: Held, use: Any, said: str) -> None:
    reader = MapDatasetReader(dataset)
    then = reader_fingerprint(reader)
    assert changed_since(reader, then, is_own=True) == ""
    use(dataset)
    assert said in changed_since(reader, then, is_own=True)
    assert changed_since(reader, then) == ""  # another trainer's may have had more


def test_a_table_that_begins_with_folders_is_not_compared_as_hosts_differ_in_them() -> None:
    here, there = (Held(data=ARRAY, roots=[f"{at}/a", f"{at}/b"]) for at in ("/data", "/mnt"))
    one, other = (reader_fingerprint(MapDatasetReader(each)) for each in (here, there))
    assert not differ(one, other)
    assert known_by([one, other]) == "partly"


def look(dataset: Any) -> str:
    return reader_fingerprint(MapDatasetReader(dataset))


def test_what_is_only_in_one_of_two_objects_shows_that_they_are_the_same_partly() -> None:
    part, other = Held(data=ARRAY), Held(data=OTHER)
    one, more = TensorDataset(torch.tensor(ARRAY)), TensorDataset(torch.tensor(ARRAY))
    more.read_since = [0] * 200  # type: ignore[attr-defined]
    alone, again = (reader_fingerprint(MapDatasetReader(each)) for each in (one, more))
    assert not differ(alone, again)
    assert known_by([alone, alone]) == "sampled"
    assert known_by([alone, again]) == known_by([again, alone, again]) == "partly"
    for then, now in (
        (Held(200, tensors=(ARRAY,)), Held(200, tensors=(ARRAY, OTHER))),
        (Held(400, datasets=[part, part]), Held(400, datasets=[part, other])),
    ):
        assert differ(*(reader_fingerprint(MapDatasetReader(each)) for each in (then, now)))
    same = (Held(400, datasets=[part, second]) for second in (part, Held(data=ARRAY.copy())))
    assert not differ(*(reader_fingerprint(MapDatasetReader(each)) for each in same))


def test_caches_of_hundreds_of_datasets_that_are_filled_make_no_other_data() -> None:
    inside = [Held(v=[n] * 4, w=[n] * 4, u=[n] * 4, slots=[None] * 4) for n in range(250)]
    prints = [reader_fingerprint(MapDatasetReader(Held(1000, datasets=inside)))]
    for filled in (inside[:100], inside):
        for one in filled:
            one.slots[:] = one.v  # type: ignore[attr-defined]
        prints.append(reader_fingerprint(MapDatasetReader(Held(1000, datasets=inside))))
    assert not any(differ(*pair) for pair in itertools.combinations(prints, 2))
    inside[249].v[:] = [-1] * 4  # type: ignore[attr-defined]
    assert differ(prints[0], reader_fingerprint(MapDatasetReader(Held(1000, datasets=inside))))


def test_a_cache_that_is_filled_makes_no_other_data_and_an_attribute_that_does_is_named() -> None:
    dataset = Held(data=ARRAY, cache={}, losses=np.arange(200))
    before = reader_fingerprint(MapDatasetReader(dataset))
    dataset.cache.update(enumerate(ARRAY))
    assert not differ(before, reader_fingerprint(MapDatasetReader(dataset)))
    dataset.losses += 1
    now = reader_fingerprint(MapDatasetReader(dataset))
    assert describe_change(before, now).startswith("attributes of the dataset: changed 'losses'; ")
    assert 'fingerprint="v1"' in describe_change(before, now)


class Closed:
    """An array in a file that is closed, or on another machine."""

    shape, dtype = (4, 3), "float32"

    def __len__(self) -> int:
        return 4

    def __array__(self) -> Any:
        raise OSError("the file is closed")

    def __getitem__(self, index: int) -> Any:
        raise OSError("the file is closed")


class NoLength:
    def __len__(self) -> int:
        raise AttributeError("no connection")

    def __getitem__(self, index: int) -> Any:
        raise KeyError(index)


class NoShape(Closed):
    """As a closed dataset of h5py, or a nested tensor."""

    def __init__(self, says: Exception) -> None:
        self.says = says

    @property
    def shape(self) -> Any:
        raise self.says


def test_an_error_of_an_attributes_own_is_said_with_its_name_and_the_remedy() -> None:
    class Broken(Closed):
        def __len__(self) -> int:
            raise AssertionError("never")

    with pytest.raises(ReaderError, match=r"attribute 'rows' \(Broken\) .* with fingerprint=\"v1\""):
        reader_fingerprint(MapDatasetReader(Held(4, labels=[1] * 4, rows=Broken())))


@pytest.mark.parametrize(
    "dataset",
    [
        Held(4),
        Held(4, rows=Closed()),
        Held(4, names={"a": 1}),
        Held(cache=[None] * 4),
        Held(4, words=["a", "b"]),
    ],
    ids=["nothing", "a closed file", "a mapping", "a cache", "a list of another length"],
)
def test_a_dataset_that_is_made_of_nothing_that_tells_its_records_has_none(dataset: Any) -> None:
    assert reader_fingerprint(MapDatasetReader(dataset)) == ""


# Correct jobs ---------------------------------------------------------------------------------------------


class Forwards(Held):
    """A wrapper that has whatever is asked of it and what it wraps has; its records are its own."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inside"], name)


def made_of(draw: random.Random, root: str, depth: int = 0) -> Any:
    """A dataset as a program makes it each time that it starts; `root` is where its files lie."""
    count = draw.choice([3, 65, 200])
    kinds: dict[str, Callable[[], Any]] = {
        "array": lambda: np.arange(count * 3.0).reshape(count, 3) * draw.random(),
        "tensor": lambda: torch.arange(count) * draw.randrange(9),
        "labels": lambda: [draw.randrange(5) for _ in range(count)],
        "paths": lambda: [f"{root}/{draw.random()}.png" for _ in range(count)],
        "rows": lambda: [{"image": f"{root}/{n}.png", "label": draw.randrange(5)} for n in range(count)],
        "table": lambda: pandas.DataFrame({"x": [draw.random() for _ in range(count)], "y": range(count)}),
        "tensors": lambda: (torch.ones(count) * draw.random(), torch.arange(count)),
        "frame": lambda: Sliced(count),
        "cache": lambda: [None] * count,
        "memory": dict,
        "shape": lambda: (3, 8, 8),
        "dtype": lambda: "float32",
        "stream": lambda: iter(()),
        "many": lambda: [Held(data=np.arange(2) + n) for n in range(draw.choice([2, 300, 3000]))],
    }
    chosen = draw.sample(sorted(kinds), draw.randrange(1, 6))
    held = Held(count, **{name: kinds[name]() for name in chosen})
    if depth < 3 and draw.random() < 0.4:
        inside = made_of(draw, root, depth + 1)
        held = draw.choice([Held, Forwards])(len(inside), inside=inside, indices=list(range(len(inside))))
    return held


def used(dataset: Any, draw: random.Random) -> None:
    """What reading does to a dataset's own state."""
    attributes = vars(dataset)
    if "inside" in attributes:
        used(dataset.inside, draw)
    for name, value in attributes.items():
        if name == "cache":
            value[:] = [f"record {n}" if draw.random() < 0.9 else None for n in range(len(value))]
        if name == "memory":
            value.update({n: torch.ones(2) for n in range(dataset._count)})
    if draw.random() < 0.3:
        attributes["read_since"] = list(range(dataset._count))


@cases("seed", range(30), range(120))
def test_a_dataset_is_the_same_when_it_is_made_again_moved_and_used(seed: int) -> None:
    """Whatever it has: state, tensors, lists, tables, other datasets."""
    first, again = (made_of(random.Random(seed), root) for root in ("/data", "/mnt/other/data"))
    before = reader_fingerprint(MapDatasetReader(first))
    check(before)
    assert not differ(before, reader_fingerprint(MapDatasetReader(again)))
    draw = random.Random(seed)
    for _ in range(3):
        used(again, draw)
        now = reader_fingerprint(MapDatasetReader(again))
        check(now)
        assert not differ(before, now)
        assert changed_since(MapDatasetReader(again), before, is_own=True) == ""


@pytest.mark.parametrize("wrap", [Held, Forwards])
def test_a_wrapper_is_known_by_what_it_wraps_and_by_what_it_has(wrap: type[Held]) -> None:
    frame = pandas.DataFrame({"x": range(200)})
    inside = [Held(data=ARRAY), Held(data=OTHER), frame, frame[::-1]]
    prints = [reader_fingerprint(MapDatasetReader(wrap(3, inside=one, indices=[1, 2, 3]))) for one in inside]
    prints.append(reader_fingerprint(MapDatasetReader(wrap(3, inside=inside[0], indices=[3, 2, 1]))))
    assert all(differ(*pair) for pair in itertools.combinations(prints, 2))


def test_of_thousands_of_arrays_the_text_stays_short_and_another_one_is_seen() -> None:
    arrays = [np.arange(3) + n for n in range(4000)]
    prints = []
    for _ in range(2):
        found = Held(9, parts=[Held(each=Held(tensors=[one] * 40)) for one in arrays])
        prints.append(reader_fingerprint(MapDatasetReader(found)))
        check(prints[-1])
        arrays.reverse()
    assert differ(*prints)


def test_what_a_user_says_of_an_object_stands_after_a_look_too() -> None:
    noise = Held(data=ARRAY, noise=np.random.rand(200))
    looked = reader_fingerprint(MapDatasetReader(noise))
    noise.noise = np.random.rand(200)  # type: ignore[attr-defined]
    again = reader_fingerprint(MapDatasetReader(noise))
    assert "changed 'noise'; where that is none of the data, give fingerprint=" in describe_change(
        looked, again
    )
    said = reader_fingerprint(MapDatasetReader(noise, fingerprint="v1"))
    assert differ(looked, again)
    assert not differ(looked, said)


def test_functions_are_named_with_the_numbers_that_they_hold_but_those_of_the_process() -> None:
    names = [name_of_function(partial(print, device=number)) for number in range(2)]
    numbers = (0, 2**61 - 1, 2**61)
    assert names[0] == names[1]
    assert len({names[0], *(name_of_function(partial(print, number)) for number in numbers)}) == 4


def test_many_datasets_that_wrap_others_are_looked_at() -> None:
    def many(last: int) -> str:
        parts = [TensorDataset(torch.tensor([n, n + 1])) for n in [*range(255), last]]
        return look(ConcatDataset([Subset(part, [0, 1]) for part in parts]))

    assert strength_of(many(500)) == "sampled"
    assert differ(many(500), many(501))


# How well it is known --------------------------------------------------------------------------------------


def of_library(name: str, base: type, **more: Any) -> type:
    """A class as a library has it, which is not installed here."""
    module, _, kind = name.rpartition(".")
    return type(kind, (base,), vars(base) | {"__module__": module, "__qualname__": kind} | more)


Folder = of_library("torchvision.datasets.folder.DatasetFolder", Held)
ImageFolder = type("ImageFolder", (Folder,), {"__module__": "torchvision.datasets.folder"})
Mine = type("Mine", (Folder,), {"__module__": "mine"})
Rewritten = of_library("torchvision.datasets.folder.Rewritten", Folder, __getitem__=Held.__getitem__)
Table = of_library("datasets.arrow_dataset.Dataset", Sliced, __getitem__=Held.__getitem__)
Images = of_library("datasets.arrow_dataset.Dataset", Pictures, __getitem__=Held.__getitem__)
SAMPLES = [(path, 0) for path in PATHS]
TENSOR = torch.tensor(ARRAY)


class Listed(list[int]):
    """A list whose records are made of its entries."""

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index) + random.random()


class Endless(Held):
    """To look at one makes another, as a mock does."""

    def __init__(self) -> None: ...

    def __len__(self) -> int:
        self.more = Endless()
        return 1


class NewTensors(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index + 1)


KNOWN: dict[str, tuple[Any, str]] = {
    "a list": ([1, 2, 3], "sampled"),
    "a list with holes": ([1, None, 3], "sampled"),
    "texts": ([f"this is the text of {n}." for n in range(200)], "sampled"),
    "texts of which one may be a path": (["that is so."] * 40 + ["and/or"], "sampled"),
    "texts that may be paths": ([f"/api/v1/{n}" for n in range(200)], "names"),
    "paths": ([Path(f"images/{n}") for n in range(200)], "names"),
    "an array": (ARRAY, "sampled"),
    "a tensor": (TENSOR, "sampled"),
    "a table": (pandas.DataFrame({0: range(9)}), "sampled"),
    "tensors": (TensorDataset(TENSOR, torch.zeros(200)), "sampled"),
    "a part of a list": (Subset([1, 2, 3], [1, 2]), "sampled"),
    "a part of a list of objects": (Subset([object()] * 3, [1, 2]), "partly"),
    "a part of a dict": (Subset({1: 1, 2: 2}, [1, 2]), "partly"),
    "a part of a text": (Subset("abc", [1, 2]), "partly"),
    "lists in a row": (ConcatDataset([[1, 2, 3], [4, 5]]), "sampled"),
    "parts of tensors": (
        ConcatDataset([TensorDataset(TENSOR), Subset(TensorDataset(TENSOR), [3])]),
        "sampled",
    ),
    "a part that is the user's": (ConcatDataset([TensorDataset(TENSOR), Held(data=ARRAY)]), "partly"),
    "a stack": (StackDataset(x=ARRAY, y=PATHS), "names"),
    "a folder of images": (ImageFolder(samples=SAMPLES, root="/data", transform=str), "names"),
    "a part of a folder of images": (Subset(Folder(samples=SAMPLES), [*range(9)]), "names"),
    "a library's class that reads otherwise": (Rewritten(samples=SAMPLES), "partly"),
    "Hugging Face's": (Table(9, format={"format_kwargs": {"dtype": torch.float32}}), "sampled"),
    "Hugging Face's, of images by path": (Images(4, folder="/data", names="abcd"), "names"),
    "arrays of the user's class": (Held(data=ARRAY), "partly"),
    "files of the user's class": (Held(samples=SAMPLES), "partly"),
    "the user's class of a library's": (Mine(samples=SAMPLES), "partly"),
    "the user's list": (Listed([1, 2, 3]), "partly"),
    "the user's tensors": (NewTensors(TENSOR), "partly"),
    "objects without end": (Held(data=ARRAY, log=Endless()), "partly"),
    "an object without a length": (Held(40, labels=[1] * 40, x=NoLength()), "partly"),
    "a file that is closed": (Held(40, labels=[1] * 40, x=NoShape(ValueError("closed"))), "partly"),
    "a nested tensor": (Held(40, labels=[1] * 40, x=NoShape(RuntimeError("sizes"))), "partly"),
}
KNOWN["a cycle"] = KNOWN["objects without end"][0], "partly"
KNOWN["a cycle"][0].again = KNOWN["a cycle"][0]


@pytest.mark.parametrize("what", KNOWN)
def test_a_dataset_is_known_as_well_as_its_least_known_part(what: str) -> None:
    dataset, strength = KNOWN[what]
    assert strength_of(look(dataset)) == strength


@pytest.mark.parametrize("how", ["r", "c", "r+"])
def test_of_a_mapped_array_that_a_job_may_write_to_no_write_is_noticed(tmp_path: Path, how: Any) -> None:
    """It is not watched as one of mode "r" is."""
    ARRAY.tofile(file := tmp_path / "x.bin")
    mapped = np.memmap(file, ARRAY.dtype, how, shape=ARRAY.shape)
    known = "partly" if how == "r+" else "sampled"
    windows = sliding_window_view(mapped, 1, axis=0, writeable=how == "r+")
    for dataset in (mapped, np.asarray(mapped), StackDataset(mapped), windows):
        assert strength_of(look(dataset)) == known


@pytest.mark.parametrize("zeros", [np.zeros, torch.zeros])
def test_an_array_that_is_filled_as_it_is_used_makes_no_other_data(zeros: Callable[..., Any]) -> None:
    """As one for what was read, made beforehand."""
    dataset = Held(data=ARRAY, read=zeros((200, 3)), has=zeros(200))
    reader = MapDatasetReader(dataset)
    then = reader_fingerprint(reader)
    dataset.read[:100], dataset.has[:100] = zeros((100, 3)) + 1, 1  # type: ignore[attr-defined]
    assert changed_since(reader, then, is_own=True) == ""
    assert not differ(then, look(dataset))
    dataset.data = OTHER  # type: ignore[attr-defined]
    assert "changed 'data'" in changed_since(reader, then, is_own=True)


def test_numbers_of_the_users_class_make_no_other_data() -> None:
    """They are the program's, as what its code does."""
    one, other = (Held(data=ARRAY, threshold=number, cache={number: 1}) for number in (1, 2))
    assert look(one) == look(other)


def test_a_list_of_the_users_class_is_looked_at_without_its_code() -> None:
    reader = MapDatasetReader(Listed([1, 2, 3]))
    then = reader_fingerprint(reader)
    assert changed_since(reader, then) == ""
    assert differ(then, look(Listed([1, 2, 4])))
