"""Every reader tells its data from other data of the same names and sizes, wherever the data lie."""

from __future__ import annotations

import ast
import os
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from image_files import write_coco, write_manifest, write_voc
from readers_kit import RECORDS
from readers_kit import write_recordio as write_records
from tar_files import samples_tar

from edl_torch import ElasticDataLoader
from edl_torch.errors import InvalidArgument
from edl_torch.fingerprint import describe_change, differ, strength_of
from edl_torch.readers import ParquetReader, RecordIODataReader, TarReader
from edl_torch.readers.base import AbstractDataReader, reader_fingerprint
from edl_torch.readers.images.coco import CocoCaptionsReader, CocoDetectionReader
from edl_torch.readers.images.folder import ImageFolderReader
from edl_torch.readers.images.manifest import ImageManifestReader
from edl_torch.readers.images.voc import VocReader
from edl_torch.readers.map_dataset import MapDatasetReader
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


def test_an_encoding_has_several_names(tmp_path: Path) -> None:
    arguments = _arguments(table(tmp_path), tmp_path)
    one, other = (CsvReader(*arguments, encoding=name) for name in ("latin-1", "iso8859-1"))
    assert reader_fingerprint(one) == reader_fingerprint(other)


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


def test_files_given_by_relative_and_absolute_paths_are_the_same_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table(tmp_path)
    monkeypatch.chdir(tmp_path)
    mixed = CsvReader(["0.csv", str(tmp_path / "1.csv")], index_dir=tmp_path)
    absolute = CsvReader([str(tmp_path / "0.csv"), str(tmp_path / "1.csv")], index_dir=tmp_path)
    assert reader_fingerprint(mixed) == reader_fingerprint(absolute)


ROWS = [1, 2, 3, 4]


def test_what_the_user_says_of_a_dataset_stands() -> None:
    one, other = (reader_fingerprint(MapDatasetReader(ROWS, fingerprint=v)) for v in ("v1", "v2"))
    assert describe_change(one, other) == "fingerprint 'v1' then, 'v2' now"


@pytest.mark.parametrize("version", [3, b"x", "x" * 257, "", ["v1"]])
def test_what_is_no_version_is_refused_where_it_is_given(version: Any) -> None:
    class Mine(MapDatasetReader):
        def fingerprint(self) -> Any:  # type: ignore[override]
            return version

    for make in (
        lambda: MapDatasetReader(ROWS, fingerprint=version),
        lambda: reader_fingerprint(Mine(ROWS)),
        lambda: ElasticDataLoader(ROWS, batch_size=4, fingerprint=version),
    ):
        with pytest.raises(InvalidArgument, match="fingerprint must be a text of 1 to 256 characters"):
            make()


def test_a_reader_of_the_users_may_say_a_version() -> None:
    class Mine(MapDatasetReader):
        def fingerprint(self) -> str:  # type: ignore[override]
            return "2026-11-01"

    assert strength_of(reader_fingerprint(Mine(ROWS))) == "given"


def test_a_version_may_come_from_compiled_code_that_tells_no_signature() -> None:
    class Mine(MapDatasetReader):
        fingerprint = staticmethod(partial(next, iter(["2026-11-01"])))  # type: ignore[assignment]

    assert strength_of(reader_fingerprint(Mine(ROWS))) == "given"
