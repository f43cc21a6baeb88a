"""Every reader tells its data from other data of the same names and sizes, wherever the data lie."""

from __future__ import annotations

import ast
import collections
import enum
import functools
import itertools
import logging
import math
import operator
import os
import pickle
import random
import shutil
import sqlite3
import time
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from cases import cases
from image_files import write_coco, write_manifest, write_voc
from readers_kit import RECORDS
from readers_kit import write_recordio as write_records
from tar_files import samples_tar
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

from edl_torch import ElasticDataLoader
from edl_torch.errors import InvalidArgument, ReaderError
from edl_torch.fingerprint import check, describe_change, differ, known_by, strength_of
from edl_torch.readers import ParquetReader, RecordIODataReader, TarReader
from edl_torch.readers.base import AbstractDataReader, changed_since, reader_fingerprint
from edl_torch.readers.images.coco import CocoCaptionsReader, CocoDetectionReader
from edl_torch.readers.images.folder import ImageFolderReader
from edl_torch.readers.images.manifest import ImageManifestReader
from edl_torch.readers.images.voc import VocReader
from edl_torch.readers.map_dataset import MapDatasetReader
from edl_torch.readers.shared.looks import name_of_function
from edl_torch.readers.text.csv_reader import CsvReader
from edl_torch.readers.text.text_reader import TextReader

Make = Callable[[Path], AbstractDataReader]


def images(at: Path) -> AbstractDataReader:
    for number in range(48):
        (at / f"{number:02}.jpg").write_bytes(bytes(number + 1))
    return ImageFolderReader(at)


def classes(at: Path) -> AbstractDataReader:
    for number in range(48):
        (at / f"class{number % 3}").mkdir(exist_ok=True)
        (at / f"class{number % 3}" / f"{number:02}.jpg").write_bytes(bytes(number + 1))
    return ImageFolderReader(at)


def lines(at: Path) -> AbstractDataReader:
    (at / "all.txt").write_text("".join(f"line {n}\n" for n in range(5000)))
    return TextReader(at / "all.txt", index_dir=at)


def table(at: Path) -> AbstractDataReader:
    for part in range(3):
        (at / f"{part}.csv").write_text("x,y\n" + "".join(f"{n},{part}\n" for n in range(3000)))
    return CsvReader(at, index_dir=at)


def footer_of(file: Path) -> bytes:
    data = file.read_bytes()
    return data[-8 - int.from_bytes(data[-8:-4], "little") :]


def plain(at: Path) -> AbstractDataReader:
    for part in range(3):
        (at / f"day={part}").mkdir()
        rows = pa.table({"x": np.arange(3000) * (part + 1)})
        pq.write_table(
            rows,
            at / f"day={part}" / "a.parquet",
            row_group_size=500,
            use_dictionary=False,
            compression="none",
        )
    return ParquetReader(at)


def permute_plain(file: Path) -> None:
    rows, footer = pq.read_table(file, partitioning=None), footer_of(file)
    order = np.concatenate([first + np.arange(500)[::-1] for first in range(0, 3000, 500)])
    pq.write_table(rows.take(order), file, row_group_size=500, use_dictionary=False, compression="none")
    assert footer_of(file) == footer


def chunks(at: Path) -> AbstractDataReader:
    for part in range(3):
        write_records(at / f"{part}.rec", [b"%d.%03d" % (part, n) for n in range(500)])
    return RecordIODataReader(at)


def tars(at: Path) -> AbstractDataReader:
    for part in range(3):
        samples_tar(at / f"{part}.tar", 30, begin=30 * part)
    return TarReader(at)


def manifest(at: Path) -> AbstractDataReader:
    return ImageManifestReader(write_manifest(at, [n % 3 for n in range(48)]))


def captions(at: Path) -> AbstractDataReader:
    folder, listed, _ = write_coco(at)
    return CocoCaptionsReader(folder, listed)


def instances(at: Path) -> AbstractDataReader:
    folder, _, listed = write_coco(at)
    return CocoDetectionReader(folder, listed)


def voc(at: Path) -> AbstractDataReader:
    return VocReader(write_voc(at))


def replaced(at: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    file, times = at / name, os.stat(at / name)
    file.write_bytes(change(file.read_bytes()))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def with_rows_permuted(data: bytes) -> bytes:
    head, *rows = data.splitlines(keepends=True)
    random.Random(3).shuffle(rows)
    return b"".join([head, *rows])


def other_file(at: Path, old: str, new: str) -> None:
    (at / old).unlink()
    (at / new).write_bytes(b"another")


FILES: list[tuple[Make, str, Callable[[Path], Any], str]] = [
    (images, "names", lambda at: other_file(at, "07.jpg", "99.jpg"), "added '99.jpg'; removed '07.jpg'"),
    (images, "names", lambda at: (at / "07.jpg").unlink(), "48 then, 47 now: removed '07.jpg'"),
    (classes, "names", lambda at: other_file(at, "class1/07.jpg", "class2/07.jpg"), "added 'class2/07.jpg'"),
    (lines, "sampled", lambda at: replaced(at, "all.txt", with_rows_permuted), "changed 'all.txt'"),
    (table, "sampled", lambda at: replaced(at, "1.csv", with_rows_permuted), "changed '1.csv'"),
    (plain, "sampled", lambda at: permute_plain(at / "day=1" / "a.parquet"), "changed 'day=1/a.parquet'"),
    (chunks, "sampled", lambda at: write_records(at / "1.rec", RECORDS[::-1]), "changed '1.rec'"),
    (
        tars,
        "sampled",
        lambda at: replaced(at, "1.tar", lambda data: data[:512] + b"9" + data[513:]),
        "changed '1.tar'",
    ),
    (manifest, "names", lambda at: replaced(at, "manifest.csv", with_rows_permuted), "'manifest.csv'"),
    (manifest, "names", lambda at: (at / "images" / "0007.png").unlink(), "changed 'images/0007.png'"),
    (
        captions,
        "names",
        lambda at: replaced(
            at, "annotations/captions.json", lambda data: data.replace(b"caption 1", b"no hing 1")
        ),
        "changed 'captions.json'",
    ),
    (
        voc,
        "names",
        lambda at: next(
            replaced(at, str(file.relative_to(at)), lambda data: data.replace(b"<xmin>1", b"<xmin>2", 1))
            for file in sorted(at.rglob("*.xml"))
            if b"<xmin>1" in file.read_bytes()
        ),
        "4 then and now: changed '0001'",
    ),
    (
        voc,
        "names",
        lambda at: replaced(at, "VOCdevkit/VOC2012/Annotations/0001.xml", lambda data: data + b"\n"),
        "changed '0001'",
    ),
]
IDS = [f"{make.__name__}-{number}" for number, (make, *_) in enumerate(FILES)]


@pytest.mark.parametrize(("make", "strength", "change", "said"), FILES, ids=IDS)
def test_changed_data_have_another_fingerprint_that_says_what(
    tmp_path: Path, make: Make, strength: str, change: Callable[[Path], Any], said: str
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    reader = make(here)
    before = reader_fingerprint(reader)
    assert strength_of(before) == strength
    change(here)
    again = type(reader)(*_arguments(reader, here))
    now = reader_fingerprint(again)
    assert differ(before, now)
    assert said in describe_change(before, now)


@pytest.mark.parametrize("make", dict.fromkeys(make for make, *_ in FILES))
def test_the_same_data_elsewhere_and_copied_later_have_the_same_fingerprint(
    tmp_path: Path, make: Make
) -> None:
    here, there = tmp_path / "here", tmp_path / "some" / "where"
    here.mkdir()
    reader = make(here)
    shutil.copytree(here, there, copy_function=shutil.copyfile)
    for file in there.rglob("*"):
        os.utime(file, (1, 1))
    copy = type(reader)(*_arguments(reader, there))
    assert reader_fingerprint(copy) == reader_fingerprint(reader)


def _arguments(reader: AbstractDataReader, at: Path) -> tuple[Path, ...]:
    if isinstance(reader, CocoCaptionsReader):
        return at / "images", at / "annotations" / "captions.json"
    if isinstance(reader, CocoDetectionReader):
        return at / "images", at / "annotations" / "instances.json"
    file = {TextReader: "all.txt", ImageManifestReader: "manifest.csv"}.get(type(reader))
    return (at if file is None else at / file,)


@pytest.mark.parametrize("make", dict.fromkeys(make for make, *_ in FILES))
def test_a_subclass_that_makes_other_records_is_partly_known(tmp_path: Path, make: Make) -> None:
    usual = make(tmp_path)
    kind: Any = type(usual)
    named = type("Named", (kind,), {"__doc__": "of a program's own", "own": 1})
    scaled = type("Scaled", (kind,), {"read_records": lambda self, task: []})
    one, other, third = (
        reader_fingerprint(each(*_arguments(usual, tmp_path))) for each in (kind, named, scaled)
    )
    assert one == other
    assert strength_of(third) == "partly"
    assert not differ(one, third)


class PassesOn:
    """A reader around another one, with a table beside it."""

    def __init__(self, reader: AbstractDataReader) -> None:
        self.reader = reader

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["reader"], name)

    def read_records(self, task: Any) -> Any:
        return enumerate(self.reader.read_records(task))


def test_a_wrapper_that_passes_on_a_readers_look_is_partly_known(tmp_path: Path) -> None:
    reader: Any = PassesOn(lines(tmp_path))
    assert strength_of(reader_fingerprint(reader)) == "partly"


ENDINGS = (".jpg", ".png", ".txt", ".csv", ".parquet", ".rec")


@pytest.mark.parametrize("make", dict.fromkeys(make for make, *_ in FILES if make is not tars))
def test_the_whole_fingerprint_sees_every_byte(tmp_path: Path, make: Make) -> None:
    reader = make(tmp_path)
    before = reader_fingerprint(reader, whole=True)
    assert strength_of(before) == "whole"
    files = (file for file in sorted(tmp_path.rglob("*")) if file.suffix in ENDINGS)
    file = next(file for file in files if "ImageSets" not in file.parts)  # a list has been read
    replaced(tmp_path, str(file.relative_to(tmp_path)), lambda data: data[:-20] + b"\1" + data[-19:])
    assert differ(before, reader_fingerprint(reader, whole=True))


@pytest.mark.parametrize(
    ("make", "kind", "one", "other"),
    [
        (table, CsvReader, {"columns": ["COLUMN0"]}, {"columns": ["COLUMN1"]}),
        (table, CsvReader, {"dtypes": {"COLUMN0": "float32"}}, {"dtypes": {"COLUMN0": "str"}}),
        (plain, ParquetReader, {"columns": ["COLUMN0"]}, {"columns": ["COLUMN1"]}),
        (
            plain,
            ParquetReader,
            {"columns": ["COLUMN0", "COLUMN1"]},
            {"columns": ["COLUMN1", "COLUMN0"]},
        ),
        (plain, ParquetReader, {"fill_nulls": {"COLUMN0": 0}}, {"fill_nulls": {"COLUMN0": 1}}),
        (lines, TextReader, {"encoding": "utf-8"}, {"encoding": "latin-1"}),
        (lines, TextReader, {"errors": "replace"}, {"errors": "ignore"}),
        (lines, TextReader, {"universal_newlines": True}, {"universal_newlines": False}),
        (lines, TextReader, {"as_bytes": True}, {"as_bytes": False}),
        (captions, CocoCaptionsReader, {"per": "annotation"}, {"per": "image"}),
        (instances, CocoDetectionReader, {"masks": True}, {"masks": False}),
        (voc, VocReader, {"classes": ["cat", "dog"]}, {"classes": ["dog", "cat"]}),
        (captions, CocoCaptionsReader, {"min_side": 8}, {"min_side": 16}),
        (tars, TarReader, {"min_side": 8}, {"min_side": 16}),
        (
            table,
            CsvReader,
            {"columns": ["COLUMN0", "COLUMN1"], "as_tuples": True},
            {"columns": ["COLUMN1", "COLUMN0"], "as_tuples": True},
        ),
        (tars, TarReader, {"fields": ["txt", "cls"]}, {"fields": ["cls", "txt"]}),
        (tars, TarReader, {"decode": True}, {"decode": False}),
        (chunks, RecordIODataReader, {"decode": "text"}, {"decode": "json"}),
        (chunks, RecordIODataReader, {"decode": "builtins:len"}, {"decode": "zlib:crc32"}),
    ],
)
def test_what_arguments_make_of_the_same_bytes_is_told_apart(
    tmp_path: Path, make: Make, kind: Any, one: dict[str, Any], other: dict[str, Any]
) -> None:
    reader: Any = make(tmp_path)
    names = getattr(reader, "columns", ())

    def said(given: dict[str, Any]) -> Any:
        text = repr(given)
        for number, name in enumerate(names):
            text = text.replace(f"COLUMN{number}", name)
        arguments = _arguments(reader, tmp_path)
        return reader_fingerprint(kind(*arguments, **ast.literal_eval(text)))

    assert said(one) == said(one)
    assert differ(said(one), said(other))
    assert not differ(reader_fingerprint(reader), said({}))


def first_byte(data: bytes) -> int:
    return data[0]


def test_functions_that_make_records_of_bytes_are_told_apart_by_name(tmp_path: Path) -> None:
    def recordio(decode: Any) -> str:
        return reader_fingerprint(RecordIODataReader(write_records(tmp_path / "x", RECORDS), decode=decode))

    path = samples_tar(tmp_path / "x.tar", 3)
    kinds: list[Callable[[Any], str]] = [
        recordio,
        lambda decode: reader_fingerprint(TarReader(path, decoders={"cls": decode})),
    ]
    for said in kinds:
        assert said(first_byte) == said(partial(first_byte))
        assert differ(said(first_byte), said(len))
        assert differ(said(partial(first_byte, n=2)), said(partial(first_byte, n=3)))
        assert "decode" in describe_change(said(len), said(bytes)) or said is not recordio
    assert differ(recordio(first_byte), recordio(None))


def test_a_tar_that_is_written_to_has_another_whole_fingerprint(tmp_path: Path) -> None:
    """Not as the files above: a reader of the one before says that it has changed."""
    before = reader_fingerprint(tars(tmp_path), whole=True)
    assert strength_of(before) == "whole"
    replaced(tmp_path, "1.tar", lambda data: data[:512] + b"9" + data[513:])
    assert differ(before, reader_fingerprint(TarReader(tmp_path), whole=True))


def test_classes_of_a_manifest_in_another_order_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text("a.jpg,cat\nb.jpg,dog\n")
    orders = (None, ["cat", "dog"], ["dog", "cat"])
    usual, same, other = (
        reader_fingerprint(ImageManifestReader(tmp_path / "list.csv", has_header=False, classes=classes))
        for classes in orders
    )
    assert usual == same
    assert differ(same, other)


@pytest.mark.parametrize("dictionary", [False, True])
@pytest.mark.parametrize("rows", [*((n * 500, n * 500 + 500) for n in (0, 3, 11, 19)), (0, 5000)])
def test_a_row_group_of_a_parquet_file_in_another_order_is_seen(
    tmp_path: Path, rows: tuple[int, int], dictionary: bool
) -> None:
    values, prints = np.arange(10_000), []
    for _ in range(2):
        table = pa.table({name: values * scale for scale, name in enumerate("xyz", 1)})
        file = tmp_path / f"{len(prints)}" / "a.parquet"
        file.parent.mkdir()
        groups = 500 if rows[1] - rows[0] == 500 else 10_000
        pq.write_table(table, file, row_group_size=groups, use_dictionary=dictionary, compression="none")
        prints.append(reader_fingerprint(ParquetReader(file)))
        values[slice(*rows)] = values[slice(*rows)][::-1].copy()
    assert file.stat().st_size > 1 << 16
    assert differ(*prints)


@pytest.mark.parametrize("groups", [1, 20])
def test_labels_of_a_parquet_file_in_another_order_are_seen(tmp_path: Path, groups: int) -> None:
    draw, prints, footers = np.random.default_rng(1), [], []
    images, labels = draw.random(40_000), draw.integers(0, 100, 40_000).astype(np.int8)
    for number in range(2):
        file = tmp_path / f"{number}" / "a.parquet"
        file.parent.mkdir()
        table = pa.table({"image": images, "label": labels})
        pq.write_table(
            table, file, 40_000 // groups, use_dictionary=False, compression="none", write_statistics=False
        )
        prints.append(reader_fingerprint(ParquetReader(file)))
        footers.append(footer_of(file))
        labels = labels.copy()
        labels[:20_000] = labels[:20_000][::-1]
    assert footers[0] == footers[1]
    assert differ(*prints)


# Map-style datasets ---------------------------------------------------------------------------------------


class Held:
    """A dataset of the user's, with whatever attributes."""

    def __init__(self, count: int = 0, **attributes: Any) -> None:
        self.__dict__ |= attributes
        self._count = count or len(next(iter(attributes.values())))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("no record may be read")


class Made(Held):
    """What it was made with is in its attributes, and what it counts."""

    def __init__(self, data: Any, threshold: float = 5, *, fold: int = 0, epoch: int = 0) -> None:
        super().__init__(data=data)
        self._threshold, self.fold, self.epoch, self.calls = threshold, fold, epoch, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        self.calls += 1
        return self.data[index]


def module_of(name: str, code: str, **values: Any) -> Any:
    """A module that was written for this test."""
    module = ModuleType(name)
    vars(module).update(values)
    exec(code, vars(module))
    return module


def coded(body: str, before: str = "", **known: Any) -> Held:
    """A dataset of a module, with one line for `__getitem__` and what the module has beside."""
    code = f"{before}\nclass Coded(Held):\n  def __getitem__(self, i): {body}"
    made: Held = module_of("coded", code, Held=Held, **known).Coded(data=ARRAY)
    return made


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


class OfANumber(Held):
    scale, seen, rank = 2, 0, 0

    def __getitem__(self, index: int) -> Any:
        self.seen += 1
        return self.data[index] * self.scale + 0 * self.rank


class OfItsClass(Held):
    table, cache = {"k": 1, "rank": 0}, {}

    def __getitem__(self, index: int) -> Any:
        self.cache[index] = 1
        return self._made(index)

    def _made(self, index: int) -> Any:
        return self.data[index] + self.table["k"] * self.by(index)


class Timed(Held):
    """Made with what is another at each start."""

    def __init__(self) -> None:
        super().__init__(data=ARRAY)
        self.begun, self.owner = time.time(), os.getpid()

    def __getitem__(self, index: int) -> Any:
        return self.data[index], time.time() - self.begun, self.owner == os.getpid()


class Literal(Held):
    def __init__(self) -> None:
        super().__init__(data=ARRAY)
        self.mean, self.most = 0.1307, len(ARRAY)

    def __getitem__(self, index: int) -> Any:
        return self.data[index] - self.mean if index < self.most else None


class OfARun(Held):
    """Its code names numbers of this host, and of this start."""

    def __init__(self) -> None:
        super().__init__(data=ARRAY)
        self.drawn, self.free = random.getrandbits(30), os.statvfs("/").f_bavail

    def __getitem__(self, index: int) -> Any:
        return self.data[index] + 0 * (self.drawn + self.free)


class Hidden(Held):
    """Its arguments are kept by other names than theirs."""

    def __init__(self, number: Any = 0, **more: Any) -> None:
        super().__init__(data=ARRAY)
        self.__number = number
        self.__dict__.update(more)

    def __getitem__(self, index: int) -> Any:
        return self.data[index] * self.__number * self.factor  # type: ignore[attr-defined]


class Inner(Held):
    def get(self, index: int) -> Any:
        return self.data[index] * self.scale


def of_inner(scale: int) -> Held:
    made = coded("return self.inside.get(i)")
    made.inside = type("Of", (Inner,), {"scale": scale})(data=ARRAY)  # type: ignore[attr-defined]
    return made


def of_partial(value: Any) -> Held:
    return coded("return f(i)", f=partial(lambda k, i: k * i, value))


class Split(enum.Enum):
    TRAIN, VAL = 1, 2


class Kind(enum.StrEnum):
    TRAIN, VAL = "train", "val"


Pair, Swapped = collections.namedtuple("Pair", "k m"), collections.namedtuple("Swapped", "m k")


def of_class(records: list[int]) -> Held:
    """Whose records are its class's, beside an attribute of as many entries."""
    return type("OfClass", (Held,), {"records": records})(data=ARRAY)


def enclosed(records: list[int]) -> Held:
    """Whose records a function has."""
    return Held(data=ARRAY, get=lambda index: records[index])


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
    "a list of its class": (of_class([*range(200)]), of_class([*range(1, 201)])),
    "a list in a function": (enclosed([*range(200)]), enclosed([*range(1, 201)])),
    "an argument that a function has already": (
        Held(data=ARRAY, get=partial(operator.getitem, [*range(200)])),
        Held(data=ARRAY, get=partial(operator.getitem, [*range(1, 201)])),
    ),
    "a default of a function": (
        Held(data=ARRAY, get=lambda index, of=range(200): of[index]),
        Held(data=ARRAY, get=lambda index, of=range(1, 201): of[index]),
    ),
    "a number that it was made with": (Made(ARRAY, 5), Made(ARRAY, 7)),
    "a class that it was made with": (Made(ARRAY, np.float32), Made(ARRAY, np.float16)),
    "a keyword that it was made with": (Made(ARRAY), Made(ARRAY, fold=1)),
    "a number inside of it": (Held(200, base=Made(ARRAY, 5.5)), Held(200, base=Made(ARRAY, np.float32(0.5)))),
    "a stack by name": (StackDataset(x=ARRAY, y=[1] * 200), StackDataset(x=ARRAY, y=[2] * 200)),
    "a stack of lists": (StackDataset([1] * 200, [3] * 200), StackDataset([1] * 200, [4] * 200)),
    "a stack of datasets": (StackDataset(x=Held(data=ARRAY)), StackDataset(x=Held(data=OTHER))),
    "rows": (
        Held(rows=[{"id": n, "text": None} for n in range(200)]),
        Held(rows=[{"id": -n, "text": None} for n in range(200)]),
    ),
}


VALUES = {
    "an enumeration": (Split.TRAIN, Split.VAL),
    "an enumeration of texts": (Kind.TRAIN, Kind.VAL),
    "a decimal": (Decimal(1), Decimal(2)),
    "a fraction": (Fraction(1, 5), Fraction(2, 5)),
    "a complex number": (1j, 2j),
    "a date": (np.datetime64("2021"), np.datetime64("2022")),
    "a tensor": (torch.tensor(1), torch.tensor(2)),
    "an array": (np.array(1), np.array(2)),
    "bytes": (b"1", b"2"),
    "a frozen set": (frozenset({3, 1}), frozenset({3, 2})),
}
PLACES: dict[str, Callable[[Any], Any]] = {
    "made with": lambda value: Made(ARRAY, value),
    "hidden": Hidden,
    "set at once": lambda value: Hidden(factor=value),
    "enclosed": lambda value: Held(data=ARRAY, get=lambda index: value),
    "a default": lambda value: Held(data=ARRAY, get=lambda index, of=value: of),
    "in a partial": lambda value: Held(data=ARRAY, get=partial(operator.mul, value)),
    "in a partial of a module": of_partial,
    "of a module": lambda value: coded("return self.data[i] * K", K=value),
    "of a class of a module": lambda value: coded("return i * Of.K", Of=type("Of", (), {"K": value})),
    "of an object of a module": lambda value: coded(
        "return of.all.K", of=SimpleNamespace(all=SimpleNamespace(K=value))
    ),
    "of its class": lambda value: type("Of", (OfANumber,), {"scale": value})(data=ARRAY),
}
DIFFERING |= {
    f"{what} {where}": (made(one), made(other))
    for (what, (one, other)), (where, made) in itertools.product(VALUES.items(), PLACES.items())
}
INDEXED = [pandas.Series(range(40), index=order) for order in (range(40), range(39, -1, -1))]
DIFFERING |= {
    "named tuples": ([Pair(1, 2)] * 9, [Swapped(1, 2)] * 9),
    "names of fields": (np.zeros(9, [("a", "i4")]), np.zeros(9, [("c", "i4")])),
    "a kind of numbers": (np.arange(9, dtype="f4"), np.arange(9, dtype="f8")),
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
    "a set of its module": tuple(coded("return i in K", K={3, one}) for one in (1, 2)),
    "a set of its class": tuple(type("Of", (OfItsClass,), {"table": {3, n}})(data=ARRAY) for n in (1, 2)),
    "a number that a function of its names": tuple(
        Held(data=ARRAY, get=module_of("of", "get = lambda index: index * K", K=number).get)
        for number in (1, 2)
    ),
    "a number of a dataset inside that its code names": (of_inner(1), of_inner(2)),
    "a list that a function of another module returns from": tuple(
        coded("return get(i)", get=module_of("of", "def get(i): return ALL[i]", ALL=[*order]).get)
        for order in (range(200), range(1, 201))
    ),
    "a static method of another class": tuple(
        coded("return Of.by(i)", f"class Of:\n  @staticmethod\n  def by(i, k={number}): return i * k")
        for number in (1, 2)
    ),
    "a number that its code asks for by name": tuple(
        type("Of", (OfItsClass,), {"by": lambda self, i: getattr(self, "K", i), "K": number})(data=ARRAY)
        for number in (1, 2)
    ),
    "a partial method": tuple(
        type("Of", (OfItsClass,), {"_made": functools.partialmethod(lambda self, k, i: k, number)})(
            data=ARRAY
        )
        for number in (1, 2)
    ),
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


class OfProcess:
    """Made with numbers that differ between the ranks of a job, and in a job that goes on with fewer."""

    def __init__(self, rank: int, world_size: int, *, device: int) -> None:
        self.rank, self._world_size, self.device, self.data = rank, world_size, device, ARRAY

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


def test_what_a_loop_makes_of_a_number_later_is_the_programs() -> None:
    """As a schedule does, with each epoch; the checkpoint of it is restored with the number as it was."""
    reader = MapDatasetReader(dataset := Made(ARRAY))
    then = reader_fingerprint(reader)
    for threshold in (9, None):
        dataset[0], dataset.set_epoch(4), setattr(dataset, "_threshold", threshold)
        assert [changed_since(each, then) for each in (reader, pickle.loads(pickle.dumps(reader)))] == [
            ""
        ] * 2
    assert reader_fingerprint(MapDatasetReader(Made(ARRAY))) == then


def test_a_reader_that_is_registered_again_has_the_numbers_of_then() -> None:
    reader = MapDatasetReader(dataset := Made(ARRAY))
    then = reader_fingerprint(reader)
    dataset._threshold = 9
    assert "changed '_threshold'" in describe_change(then, reader_fingerprint(reader))


def test_a_process_that_imports_the_program_anew_compares_what_its_code_names_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader = MapDatasetReader(OfItsClass(data=ARRAY))
    then, spawned = reader_fingerprint(reader), pickle.dumps(reader)
    monkeypatch.setattr(OfItsClass, "table", {"rank": 3, "k": 1})
    assert changed_since(pickle.loads(spawned), then) == ""
    monkeypatch.setattr(OfItsClass, "table", {"k": 2, "rank": 0})
    assert changed_since(reader, then) == ""
    assert "changed 'table'" in changed_since(pickle.loads(spawned), then)


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


LABELS = [0] * 200
ROUND = Held(200, data=ARRAY)
ROUND.again = ROUND  # type: ignore[attr-defined]


KNOWN: dict[str, tuple[Any, str]] = {
    "arrays by name": (Held(200, targets=LABELS, data={"x": ARRAY}), "sampled"),
    "arrays by name of which one is short": (
        Held(200, targets=LABELS, data={"x": ARRAY, "y": ARRAY[:9]}),
        "partly",
    ),
    "tokens": (Held(200, targets=LABELS, tokens=np.arange(3000), starts=np.arange(201)), "partly"),
    "objects": (Held(200, targets=LABELS, records=[object()] * 200), "partly"),
    "a dataset inside": (Held(200, targets=LABELS, inside=Held(200, name="x")), "partly"),
    "a folder": (Held(200, targets=LABELS, classes=["cat", "dog"], cache={}, root="/data"), "partly"),
    "what holds no records": (
        Held(200, targets=LABELS, size=3, train=True, transform=str, mask=None, cache={}),
        "sampled",
    ),
    "a cycle": (ROUND, "sampled"),
    "files": (Held(files=PATHS, root="/data", classes=["cat"], class_to_idx={"cat": 0}), "names"),
    "a table of classes of its own": (Held(files=PATHS, label_of={"cat": 3, "dog": 1}), "partly"),
    "a list of labels": (Held(files=PATHS, remap=[1, 0]), "partly"),
    "tuples of plain values": (Held(files=PATHS, size=(224, 224), mean=(0.5,)), "names"),
    "parts of files": (ConcatDataset([Held(files=PATHS), Held(files=PATHS)]), "names"),
    "a part of a list": (Subset([1, 2, 3], [1, 2]), "sampled"),
    "a part of a list of objects": (Subset([object()] * 3, [1, 2]), "partly"),
    "lists in a row": (ConcatDataset([[1, 2, 3], [4, 5]]), "sampled"),
    "parts of arrays": (ConcatDataset([Held(data=ARRAY), Held(data=OTHER)]), "sampled"),
    "an array of labels": (Held(files=PATHS, remap=np.array([1, 0])), "partly"),
    "relative files": (Held(files=[f"{n}.png" for n in range(200)]), "names"),
    "paths": (Held(files=[Path(f"images/{n}") for n in range(200)]), "names"),
    "texts that may be paths": ([f"/api/v1/{n}" for n in range(200)], "names"),
    "texts": ([f"this is the text of {n}." for n in range(200)], "sampled"),
    "a part of a folder of images": (
        Held(200, indices=LABELS, dataset=Held(samples=[(p, 0) for p in PATHS], root="/data")),
        "names",
    ),
    "several folders of images": (
        Held(400, datasets=[Held(samples=[(path, 0) for path in PATHS], targets=LABELS)]),
        "names",
    ),
    "files and a text": (Held(files=PATHS, color="gray"), "partly"),
    "files and another folder": (Held(files=PATHS, masks="/masks"), "names"),
    "texts of which one may be a path": (["that is so."] * 40 + ["and/or"], "sampled"),
    "files and a store": (Held(samples=[(path, 0) for path in PATHS], store=object()), "partly"),
    "numbers and a database": (Held(40, ids=list(range(40)), path="x.db"), "partly"),
    "bytes": (Held(40, offsets=list(range(40)), blob=b"records" * 40), "partly"),
    "a text": (Held(40, starts=list(range(40)), text="records " * 400), "partly"),
    "lists by name": (Held(40, index=[("x", 1)] * 40, by_class={"x": ["a", "b"] * 10}), "partly"),
    "a list of other length": (Held(40, labels=LABELS[:40], lines=["one line"] * 80), "partly"),
    "a store": (Held(40, labels=LABELS[:40], store=object()), "partly"),
    "a path of its module": (coded("return (K / str(i)).name", K=Path("images")), "partly"),
    "a path in its code": (coded("return get(f'/data/{self.data[i]}')", get=str.strip), "partly"),
    "a file by its name in its code": (coded("return get('x.wav', i)", get=str.strip), "partly"),
    "texts in its code": (coded("'of a/b.c'; return f'{i}/{i} a. b', {'x-y': '.'}"), "sampled"),
    "a lookup of its module": (coded("return get(i)", get={1: 2}.get), "partly"),
    "a connection of its module": (coded("return db.execute(i)", db=sqlite3.connect(":memory:")), "partly"),
    "functions of its module": (coded("return sqrt(i), log(i)", sqrt=math.sqrt, log=np.log), "sampled"),
    "a random number": (coded("return draw()", draw=random.random), "sampled"),
    "files that it opens": (coded("return open(str(self.data[i]))"), "partly"),
    "an object of its module": (coded("return K.get(i)", "class Of: pass\nK = Of()"), "partly"),
    "a logger": (coded("return LOG.debug(i)", LOG=logging.getLogger("of")), "sampled"),
    "a module that is not there yet": (coded("from edl_torch_none import K; return K"), "partly"),
    "a slice": (coded("return i in K", K=slice(3)), "partly"),
    "a clock": (Timed(), "partly"),
    "a number that its code has": (Literal(), "sampled"),
    "numbers of a host and of a run": (OfARun(), "partly"),
}


def test_what_is_only_in_one_of_two_objects_shows_that_they_are_the_same_partly() -> None:
    part, other = Held(data=ARRAY), Held(data=OTHER)
    one, more = Held(200, data=ARRAY), Held(200, data=ARRAY, read_since=LABELS)
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
    dataset = Held(data=ARRAY, cache={}, losses=np.zeros(200))
    before = reader_fingerprint(MapDatasetReader(dataset))
    dataset.cache.update(enumerate(ARRAY))
    assert not differ(before, reader_fingerprint(MapDatasetReader(dataset)))
    dataset.losses += 1
    now = reader_fingerprint(MapDatasetReader(dataset))
    assert describe_change(before, now).startswith("attributes of the dataset: changed 'losses'; ")
    assert 'fingerprint="v1"' in describe_change(before, now)


class Slotted(Held):
    """With an array for what was read, made beforehand."""

    def __getitem__(self, index: int) -> Any:
        if not self.has[index]:
            self.read[index], self.has[index] = self.data[index], True
        return self.read[index]


@pytest.mark.parametrize("zeros", [np.zeros, torch.zeros])
def test_an_array_that_is_filled_as_it_is_used_makes_no_other_data(zeros: Callable[..., Any]) -> None:
    dataset = Slotted(data=ARRAY, read=zeros((200, 3)), has=zeros(200))
    reader = MapDatasetReader(dataset)
    then = reader_fingerprint(reader)
    assert strength_of(then) == "partly"
    dataset.read[:100], dataset.has[:100] = zeros((100, 3)) + 1, 1
    assert changed_since(reader, then, is_own=True) == ""
    assert not differ(then, look(dataset))
    dataset.data = OTHER  # type: ignore[attr-defined]
    assert "changed 'data'" in changed_since(reader, then, is_own=True)


class Computed(Held):
    def __getitem__(self, index: int) -> Any:
        return index * index


class Closed:
    """An array in a file that is closed, or on another machine."""

    shape, dtype = (4, 3), "float32"

    def __len__(self) -> int:
        return 4

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


def test_files_given_by_relative_and_absolute_paths_are_the_same_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table(tmp_path)
    monkeypatch.chdir(tmp_path)
    mixed = CsvReader(["0.csv", str(tmp_path / "1.csv")], index_dir=tmp_path)
    absolute = CsvReader([str(tmp_path / "0.csv"), str(tmp_path / "1.csv")], index_dir=tmp_path)
    assert reader_fingerprint(mixed) == reader_fingerprint(absolute)


@pytest.mark.parametrize(
    "dataset",
    [
        Held(4),
        Held(4, rows=Closed()),
        Held(4, names={"a": 1}),
        Held(cache=[None] * 4),
        Held(4, words=["a", "b"]),
        Computed(4),
    ],
    ids=["nothing", "a closed file", "a mapping", "a cache", "a list of another length", "code alone"],
)
def test_a_dataset_that_is_made_of_nothing_that_tells_its_records_has_none(dataset: Any) -> None:
    assert reader_fingerprint(MapDatasetReader(dataset)) == ""


def test_what_the_user_says_of_a_dataset_stands() -> None:
    one, other = (reader_fingerprint(MapDatasetReader(ARRAY, fingerprint=v)) for v in ("v1", "v2"))
    assert describe_change(one, other) == "fingerprint 'v1' then, 'v2' now"


@pytest.mark.parametrize("version", [3, b"x", "x" * 257, ["v1"]])
def test_what_is_no_version_is_refused_where_it_is_given(version: Any) -> None:
    class Mine(MapDatasetReader):
        def fingerprint(self) -> Any:  # type: ignore[override]
            return version

    for make in (
        lambda: MapDatasetReader(ARRAY, fingerprint=version),
        lambda: reader_fingerprint(Mine(ARRAY)),
        lambda: ElasticDataLoader(ARRAY, batch_size=4, fingerprint=version),
    ):
        with pytest.raises(InvalidArgument, match="fingerprint must be a text of 256 characters at most"):
            make()


def test_a_reader_of_the_users_may_say_a_version() -> None:
    class Mine(MapDatasetReader):
        def fingerprint(self) -> str:  # type: ignore[override]
            return "2026-11-01"

    assert strength_of(reader_fingerprint(Mine(Held(4)))) == "given"


def test_a_version_may_come_from_compiled_code_that_tells_no_signature() -> None:
    class Mine(MapDatasetReader):
        fingerprint = staticmethod(partial(next, iter(["2026-11-01"])))  # type: ignore[assignment]

    assert strength_of(reader_fingerprint(Mine(Held(4)))) == "given"


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


# Who holds a value, and who writes to it -------------------------------------------------------------------


class OfAText(Held):
    mode = "easy"

    def __getitem__(self, index: int) -> Any:
        return self.data[index] * len(self.mode)


class OfAProperty(Held):
    scale, log_every = 2, 100

    @property
    def factor(self) -> int:
        return self.scale

    def __getitem__(self, index: int) -> Any:
        return self.data[index] * self.factor


class OfAPrime(Held):
    prime = 2**20_000

    def __getitem__(self, index: int) -> Any:
        return self.data[index] + self.prime


class Settings(dict[str, int]):
    """As many programs have them."""

    def __getattr__(self, name: str) -> int:
        return self[name]


class OfSettings(Held):
    """An object that answers to any name is not asked what it wraps."""

    settings, factor, width = Settings(scale=3), 2, 4

    @functools.lru_cache  # noqa: B019
    def scaled(self, index: int) -> Any:
        return self.data[index] * self.settings.scale * self.factor

    @staticmethod
    def widened(of: Any) -> Any:
        return of.width

    def __getitem__(self, index: int) -> Any:
        return self.scaled(index) * self.widened(self)


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **more: Any) -> Any:
        return function(*args, **more)

    return wrapper


class OfALoggedArgument(Held):
    @logged
    @logged
    def __init__(self, data: Any, margin: int = 1) -> None:
        super().__init__(data=data)
        self.margin = margin

    @classmethod
    def with_margin(cls, margin: int) -> OfALoggedArgument:
        made = cls(ARRAY)
        made.margin = margin
        return made


def of_kind(base: type[Held], **of_class: Any) -> Held:
    kind: type[Held] = type("Kind", (base,), of_class)
    return kind(data=ARRAY)


def of_its_class(number: int = 1, **of_class: Any) -> Held:
    kind: type[Held] = type("Kind", (OfItsClass,), of_class)
    return kind(data=ARRAY, by=lambda index: index * number)


def counting(factor: int, calls: int = 0) -> Held:
    """With a function that counts its calls, itself and by another one."""
    own_calls = inner_calls = 0

    def count() -> None:
        nonlocal inner_calls
        inner_calls += 1

    def scaled(value: int) -> int:
        nonlocal own_calls
        own_calls += 1
        count()
        return value * factor + 0 * inner_calls

    for _ in range(calls):
        scaled(1)
    return Held(data=ARRAY, by=scaled)


def plus(table: list[int], factor: int) -> Callable[..., Any]:
    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(self: Held, index: int) -> Any:
            return function(self, index) * factor + table[index]

        return wrapper

    return decorate


def decorated(factor: int = 2, step: int = 1, margin: int = 0, rank: int = 0) -> Held:
    class Decorated(Held):
        @plus(list(range(len(ARRAY)))[::step], factor)
        def __getitem__(self, index: int, margin: int = margin, rank: int = rank) -> Any:
            return ARRAY[index] + margin

    return Decorated(data=ARRAY)


def of_two_modules(here: float, there: float, offset: int = 1) -> Held:
    """Of classes in two modules that have a constant of the same name."""
    base = "class Base(Held):\n  def __getitem__(self, index): return self.data[index] * SCALE[0] + OFFSET"
    kind = "class Kind(Base):\n  def __getitem__(self, index): return super().__getitem__(index) * SCALE[1]"
    below = module_of("below", base, Held=Held, SCALE=[here, 1], OFFSET=offset)
    made: Held = module_of("above", kind, Base=below.Base, SCALE=[1, there], OFFSET=0).Kind(data=ARRAY)
    return made


def of_a_module(scale: int, zone: int) -> Held:
    """Names of modules and of attributes are not crossed: neither `os.name` nor `settings.zone` is named."""
    settings = module_of("settings", "", scale=scale, zone=zone, index=zone)
    body = "return self.data[i] * settings.scale, os.getpid(), self.name, self.zone, (settings, i)"
    return coded(body, os=os, settings=settings)


def of_settings(scale: int, rank: int = 0) -> Held:
    settings = {"scale": scale, "rank": rank, "NUM_WORKERS": rank}
    return coded("return i * K['scale'] + 0 * K['rank'] + 0 * WORLD_SIZE", K=settings, WORLD_SIZE=rank + 1)


ORDER = [*range(200)]
NAMED: dict[str, tuple[Any, Any, str]] = {
    "a number of its class": (of_kind(OfANumber), of_kind(OfANumber, scale=3), "scale"),
    "a number of its own": (OfANumber(data=ARRAY), OfANumber(data=ARRAY, scale=3), "scale"),
    "a number that a property names": (of_kind(OfAProperty), of_kind(OfAProperty, scale=3), "scale"),
    "a number that a cached method names": (of_kind(OfSettings), of_kind(OfSettings, factor=3), "factor"),
    "a number that a static method names": (of_kind(OfSettings), of_kind(OfSettings, width=5), "width"),
    "an integer too long to be written": (
        of_kind(OfAPrime),
        of_kind(OfAPrime, prime=OfAPrime.prime + 1),
        "prime",
    ),
    "an argument of an __init__ that is wrapped": (
        OfALoggedArgument.with_margin(1),
        OfALoggedArgument.with_margin(2),
        "margin",
    ),
    "a table of its class": (of_its_class(), of_its_class(table={"k": 2, "rank": 0}), "table"),
    "a number that a function holds": (of_its_class(), of_its_class(2), "by.number"),
    "a number that a function holds that counts": (counting(2), counting(3), "by.factor"),
    "a number that a decorator holds": (decorated(), decorated(3), "wrapper.factor"),
    "a table that a decorator holds": (decorated(), decorated(step=-1), "wrapper.table"),
    "a default of what is decorated": (decorated(), decorated(margin=1), "__getitem__.margin"),
    "a table of its module": (
        coded("return i * K['cat']", K={"cat": 3}),
        coded("return i * K['cat']", K={"cat": 4}),
        "global K",
    ),
    "records of its module": (
        coded("return [K[n] for n in [i]][0]", K=ORDER),
        coded("return [K[n] for n in [i]][0]", K=ORDER[::-1]),
        "global K",
    ),
    "settings of its module": (of_settings(2), of_settings(3), "global K"),
    "a number of another module": (of_a_module(1, 2), of_a_module(2, 2), "global settings.scale"),
    "a table of the first of two modules": (of_two_modules(2, 3), of_two_modules(2, 4), "global SCALE"),
    "a table of the second": (of_two_modules(2, 3), of_two_modules(4, 3), "global SCALE (1)"),
    "a number of the second": (of_two_modules(2, 3), of_two_modules(2, 3, 7), "global OFFSET"),
}
PADDED = np.dtype([("a", "i1"), ("b", "f8")], align=True)


def padded(padding: int) -> Any:
    """The same values, with other bytes between them."""
    rows = np.full((9, PADDED.itemsize), padding, np.uint8).view(PADDED)[:, 0]
    rows["a"], rows["b"] = range(9), range(9)
    return rows


SAME: dict[str, tuple[Any, Any]] = {
    "bytes between the fields of an array": (padded(0), padded(7)),
    "a whole float": (Made(ARRAY, 5), Made(ARRAY, 5.0)),
    "an integer of numpy's": (Made(ARRAY, 5), Made(ARRAY, np.int64(5))),
    "a number that a method writes": (Made(ARRAY), Made(ARRAY, epoch=3)),
    "numbers of the process": (OfProcess(0, 4, device=0), OfProcess(1, 2, device=3)),
    "clocks": (Timed(), Timed()),
    "numbers of a host and of a run": (OfARun(), OfARun()),
    "numbers of its class that it writes to": (of_kind(OfANumber), of_kind(OfANumber, seen=5, rank=1)),
    "numbers of its own that it writes to": (
        OfANumber(data=ARRAY),
        OfANumber(data=ARRAY, seen=9, rank=3),
    ),
    "a number that no code names": (of_kind(OfAProperty), of_kind(OfAProperty, log_every=10)),
    "a rank in a table of its class": (of_its_class(), of_its_class(table={"k": 1, "rank": 3})),
    "a folder of images by path": (
        Pictures(4, folder="/data", names="abcd"),
        Pictures(4, folder="/else/where", names="abcd"),
    ),
    "a rank in a default": (decorated(), decorated(rank=1)),
    "a rank in settings of its module": (of_settings(2), of_settings(2, rank=1)),
    "a number of another module that is not named": (of_a_module(1, 2), of_a_module(1, 3)),
    "calls that a function counts": (counting(2), counting(2, calls=1)),
}


def look(dataset: Any) -> str:
    return reader_fingerprint(MapDatasetReader(dataset))


@pytest.mark.parametrize("what", NAMED)
def test_what_makes_other_records_is_named(what: str) -> None:
    one, other, named = NAMED[what]
    assert f"changed '{named}'" in describe_change(look(one), look(other))


@pytest.mark.parametrize("what", SAME)
def test_what_makes_no_other_records_is_not_compared(what: str) -> None:
    one, other = SAME[what]
    assert look(one) == look(other)


def test_what_its_code_writes_to_makes_no_other_data() -> None:
    assert not differ(look(of_its_class()), look(of_its_class(cache={7: 1})))
    one, other = (coded("K[i] = 1; return K", K=cache) for cache in ({-1: 0}, {-1: 0, 7: 1}))
    assert not differ(look(one), look(other))


def test_functions_are_named_with_the_numbers_that_they_hold_but_those_of_the_process() -> None:
    names = [name_of_function(partial(print, device=number)) for number in range(2)]
    numbers = (0, OfAPrime.prime, OfAPrime.prime + 1)
    assert names[0] == names[1]
    assert len({names[0], *(name_of_function(partial(print, number)) for number in numbers)}) == 4


def test_many_datasets_that_wrap_others_are_looked_at() -> None:
    def many(last: int) -> str:
        parts = [TensorDataset(torch.tensor([n, n + 1])) for n in [*range(255), last]]
        return look(ConcatDataset([Subset(part, [0, 1]) for part in parts]))

    assert strength_of(many(500)) == "sampled"
    assert differ(many(500), many(501))


class Filled(Held):
    """What it reads first is read when it is asked for."""

    def __getitem__(self, index: int) -> Any:
        if self.rows is None:
            self.rows = [*range(len(self))]
        return self.rows[index]


class Cached(Held):
    @functools.cached_property
    def table(self) -> list[int]:
        return [*range(len(self))]

    def __getitem__(self, index: int) -> Any:
        return self.table[index]


class Switched(Made):
    def __init__(self, data: Any, factor: int = 2) -> None:
        super().__init__(data)
        self.factor = factor

    def switch(self, factor: int) -> None:
        self.factor = factor

    def __getitem__(self, index: int) -> Any:
        return self.data[index] * self.factor


class SetUp(Switched):
    def __init__(self, data: Any) -> None:
        super().__init__(data)
        self.switch(3)


class Growing:
    """Holds others without end, as a mock does: who asks for its length makes two more."""

    def __init__(self, depth: int = 0) -> None:
        self.depth = depth

    def __len__(self) -> int:
        if "left" not in vars(self) and self.depth < 40:
            self.left, self.right = Growing(self.depth + 1), Growing(self.depth + 1)
        return 0

    def __getitem__(self, index: int) -> Any:
        raise IndexError(index)


class Transform:
    def __init__(self, *steps: Any, **more: Any) -> None:
        self.steps, self.mean, self.mode = steps, [0.5] * 3, "reflect"
        self.__dict__ |= more

    def __call__(self, record: Any) -> Any:
        return record


def holding(value: Any) -> Callable[[int], Any]:
    return lambda index: value


CALLED: dict[str, tuple[Any, str]] = {
    "a connection": (sqlite3.connect(":memory:"), "partly"),
    "a dict in a function": (holding({"a": 1}), "partly"),
    "a folder in a function": (holding("/data/v1"), "partly"),
    "a folder in a partial": (partial(open, "/data/v1"), "partly"),
    "tokens in a function": (holding(list(range(1000))), "partly"),
    "a dict by its method": ({"a": 1}.get, "partly"),
    "rows of an object": (Transform(rows=[(n, n) for n in range(200)]).__call__, "partly"),
    "words of a tokenizer": (Transform(vocab={"a": 1}), "partly"),
    "letters of a tokenizer": (Transform(letters=[*"abc"]), "partly"),
    "letters of a tokenizer in one text": (Transform(letters="abcdefghijklmnopqrstuvwxyz"), "partly"),
    "an embedding": (torch.nn.Embedding(40, 2), "partly"),
    "transforms": (Transform(Transform(), torch.nn.Sequential(torch.nn.ReLU())), "sampled"),
    "a method of a transform": (Transform().__call__, "sampled"),
    "functions": (Transform(np.log, str.upper, math.sqrt, partial(int, base=8), holding(2)), "sampled"),
    "a cached function": (functools.lru_cache(holding(2)), "sampled"),
    "a dict in a cached function": (functools.lru_cache(holding({"a": 1})), "partly"),
    "a class": (np.float32, "sampled"),
}
BOUND = Held(data=ARRAY)
BOUND.size = BOUND.__len__  # type: ignore[attr-defined]
KNOWN |= {f"{what} as an attribute": (Held(data=ARRAY, by=by), known) for what, (by, known) in CALLED.items()}
KNOWN |= {
    **{
        f"{what} of its module": (coded("return by(i)", by=Transform(**more)), known)
        for what, more, known in (
            ("a tokenizer", {"vocab": {"a": 1}}, "partly"),
            ("a transform", {}, "sampled"),
        )
    },
    "a method of a tokenizer": (coded("return by(i)", by=Transform(vocab={"a": 1}).__call__), "partly"),
    "a module of its class": (of_kind(OfANumber, scale=torch.nn.Embedding(40, 2)), "partly"),
    "a number that a method writes": (Switched(ARRAY), "partly"),
    "a number that __init__ has set by a method": (SetUp(ARRAY), "partly"),
    "a method of its own": (BOUND, "sampled"),
    "rows that are read first": (Filled(data=ARRAY, rows=None), "partly"),
    "a property that is kept": (Cached(data=ARRAY), "partly"),
    "an object without a length": (Held(40, labels=[1] * 40, x=NoLength()), "partly"),
    "a file that is closed": (Held(40, labels=[1] * 40, x=NoShape(ValueError("closed"))), "partly"),
    "a nested tensor": (Held(40, labels=[1] * 40, x=NoShape(RuntimeError("sizes"))), "partly"),
    "a text of its class": (OfAText(data=ARRAY), "partly"),
    "texts of its module": (
        coded("return get(i)", "def get(i): return K[i]", K=dict(enumerate(PATHS))),
        "partly",
    ),
    "records of its module": (NAMED["records of its module"][0], "sampled"),
    "a table of its module": (NAMED["a table of its module"][0], "sampled"),
    "a cache of its module": (coded("K[i] = 1; return K", K={-1: 0}), "partly"),
    "numbers of another module": (of_a_module(1, 2), "sampled"),
    "tables of two modules": (of_two_modules(2, 3), "sampled"),
    "objects without end": (Held(data=ARRAY, log=Growing()), "partly"),
    "images by path": (Pictures(4, folder="/data", names="abcd"), "names"),
    "of its class": (of_its_class(), "sampled"),
}


@pytest.mark.parametrize("how", ["r", "c", "r+"])
def test_of_a_mapped_array_that_a_job_may_write_to_no_write_is_noticed(tmp_path: Path, how: Any) -> None:
    """It is not watched as one of mode "r" is."""
    ARRAY.tofile(file := tmp_path / "x.bin")
    mapped = np.memmap(file, ARRAY.dtype, how, shape=ARRAY.shape)
    known = "partly" if how == "r+" else "sampled"
    for dataset in (mapped, Held(data=np.asarray(mapped))):
        assert strength_of(look(dataset)) == known


@pytest.mark.parametrize("what", KNOWN)
def test_a_dataset_is_known_as_well_as_its_least_known_part(what: str) -> None:
    dataset, strength = KNOWN[what]
    assert strength_of(look(dataset)) == strength
