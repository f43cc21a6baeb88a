from __future__ import annotations

import gzip
import importlib
import shutil
import sys
from pathlib import Path

import fsspec
import pytest
from image_files import write_coco, write_image_folder, write_manifest, write_voc
from readers_kit import write_hive, write_parquet

from edl_torch import readers
from edl_torch.errors import DataFormatError, InvalidArgument, ReaderError, ReaderUnavailable
from edl_torch.readers.base import AbstractDataReader
from edl_torch.readers.parquet.index import claims
from edl_torch.readers.registry import READERS, load_reader, open_reader, parse_reader_params
from edl_torch.shard import TaskType


class OwnReader(AbstractDataReader):
    def __init__(self, table, rows=1, **kwargs):
        super().__init__(**kwargs)
        self.table, self.rows = table, rows
        len(rows) if isinstance(rows, str) else None

    def create_shards(self):
        return {self.table: self.rows}

    def read_records(self, task):
        yield from range(task.start, task.end)


class TypeErrorInside(OwnReader):
    def __init__(self):
        len(5)


def test_the_reader_is_chosen_by_what_is_there(tmp_path):
    images, captions, instances = write_coco(tmp_path / "coco")
    (tmp_path / "sizes.py").write_text("def get_training_size(): return 5")
    chosen = {
        write_image_folder(tmp_path / "classes"): "ImageFolderReader",
        write_image_folder(tmp_path / "flat", ()): "ImageFolderReader",
        write_manifest(tmp_path / "manifest"): "ImageManifestReader",
        captions: "CocoCaptionsReader",
        instances: "CocoDetectionReader",
        write_voc(tmp_path / "voc"): "VocReader",
        str(tmp_path / "sizes.py"): "PythonCustomReader",
    }
    assert {path: type(open_reader(path)).__name__ for path in chosen} == chosen
    assert open_reader(captions).images == images


TABLES = {
    "images.csv": ("file,label\na.jpg,1\nb.PNG,2\n", "ImageManifestReader"),
    "one_image.csv": ("a.jpg,1\n", "ImageManifestReader"),
    "names.csv": ("picture\na.jpg\n b.jpg \n", "ImageManifestReader"),
    "numbers.csv": ("a,b\n1,2\n", "CsvReader"),
    "boxes.csv": ("file,x,y\na.jpg,1,2\nb.jpg,3,4\n", "CsvReader"),
    "mixed.csv": ("file,n\na.jpg,1\nb.txt,2\n", "CsvReader"),
    "tabs.tsv": ("a\tb\n1\t2\n", "CsvReader"),
    "lines.txt": ("a.jpg\n", "TextReader"),
    "LINES.JSONL": ("{}\n", "TextReader"),
}


def test_tables_texts_and_lists_of_images_are_told_apart(tmp_path):
    for name, (content, expected) in TABLES.items():
        (tmp_path / name).write_text(content)
        packed = tmp_path / f"{name}.gz"
        packed.write_bytes(gzip.compress(content.encode()))
        assert type(open_reader(tmp_path / name)).__name__ == expected, name
        if expected != "ImageManifestReader":
            assert type(open_reader(packed)).__name__ == expected, packed


def test_options_of_one_kind_of_table_settle_it(tmp_path):
    path = tmp_path / "list.csv"
    path.write_text("a,1\nb,2\n")
    assert type(open_reader(path, header=False)).__name__ == "CsvReader"
    assert type(open_reader(path, has_header=False)).__name__ == "ImageManifestReader"
    path.write_text("a.jpg,1\nb.jpg,2\n")
    assert type(open_reader(path, dtypes={"f1": "int8"})).__name__ == "CsvReader"
    assert type(open_reader(path, delimiter=",")).__name__ == "ImageManifestReader"


def test_a_folder_of_nothing_but_tables_or_lines_is_read_by_their_reader(tmp_path):
    (tmp_path / "_SUCCESS").write_text("")
    for name in ("part-0.csv", "part-1.csv"):
        (tmp_path / name).write_text("a\n1\n")
    assert len(open_reader(tmp_path).create_shards()) == 2
    assert type(open_reader(tmp_path)).__name__ == "CsvReader"
    assert list(open_reader(f"{tmp_path}/part-*.csv").create_shards().values()) == [1, 1]
    with pytest.raises(ReaderError, match="does not exist"):
        open_reader(f"{tmp_path}/other-*.csv")
    (tmp_path / "images").mkdir()
    with pytest.raises(DataFormatError, match="has no image"):
        open_reader(tmp_path)


def test_parquet_is_known_by_its_names(tmp_path):
    root = write_hive(tmp_path / "hive")
    file = write_parquet(tmp_path / "file.pq")
    for data in (root, f"{root}/year=2024", file, f"{root}/*/*/*.parquet", f"file://{file}"):
        assert type(open_reader(data)).__name__ == "ParquetReader", data
    assert open_reader(file, columns=["id"]).columns == ["id"]
    flat = write_image_folder(tmp_path / "images", ())
    (Path(flat) / "deeper").mkdir()
    write_parquet(Path(flat) / "deeper" / "x.parquet")
    assert not claims(flat), "the first folder with files decides"
    empty = tmp_path / "empty"
    empty.mkdir()
    assert not claims(str(empty))


@pytest.mark.parametrize(
    ("url", "ours"),
    [
        ("s3://bucket/table", False),
        ("s3://bucket/table.parquet/", True),
        ("s3://bucket/v1.2/x.parquet", True),
        ("gs://bucket/*/x-*.pq", True),
        ("simplecache::s3://bucket/x.parquet", True),
        ("s3://bucket/rows.csv", False),
        ("odps://project/tables/name", False),
        ("no-such-file.parquet", False),
        ("no-such-folder", False),
    ],
)
def test_urls_of_parquet_are_told_from_others(url, ours):
    assert claims(url) is ours


def test_a_url_of_anything_but_parquet_is_refused_with_the_ways_to_read_it():
    for url, said in {
        "memory://bucket/none": "'memory://bucket/none' does not exist: .*; check the path and the bucket",
        "file:///none/a.csv": "'file:///none/a.csv' does not exist: .*; check the path$",
    }.items():
        with pytest.raises(ReaderError, match=said):
            open_reader(url)
    store = fsspec.filesystem("memory")
    store.pipe("/bucket/rows.xyz", b"1")
    with pytest.raises(
        ReaderError, match=r"no reader knows 'memory://bucket': a file is known by its ending"
    ):
        open_reader("memory://bucket")
    store.rm("/bucket", recursive=True)


def test_voc_split_follows_the_mode(tmp_path):
    root = write_voc(tmp_path)
    assert open_reader(root).count == 3
    assert open_reader(root, TaskType.EVALUATION).count == 1
    assert open_reader(root, TaskType.EVALUATION, split="train").count == 3


def test_coco_folder_with_one_annotation_file(tmp_path):
    _, captions, instances = write_coco(tmp_path)
    with pytest.raises(DataFormatError, match="several annotation files: name one of") as caught:
        open_reader(tmp_path)
    assert captions in str(caught.value)
    Path(captions).unlink()
    assert type(open_reader(tmp_path)).__name__ == "CocoDetectionReader"
    assert open_reader(tmp_path).name == instances


@pytest.mark.parametrize("folder", ["val2017", "images/val2017", "annotations/images", "annotations"])
def test_coco_images_are_found_where_copies_put_them(tmp_path, folder):
    images, captions, _ = write_coco(tmp_path)
    path = shutil.move(captions, tmp_path / "annotations" / "captions_val2017.json")
    found = [str(file) for file in Path(images).iterdir()]
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    for file in found:
        shutil.move(file, tmp_path / folder)
    assert open_reader(path).images == str(tmp_path / folder)


def test_coco_images_that_are_not_found_list_the_places(tmp_path):
    images, captions, _ = write_coco(tmp_path)
    moved = shutil.move(images, tmp_path / "elsewhere")
    with pytest.raises(DataFormatError, match="pass images="):
        open_reader(captions)
    assert open_reader(captions, images=moved).images == str(moved)


def test_unknown_data_is_refused(tmp_path):
    with pytest.raises(ReaderError, match="does not exist"):
        open_reader(tmp_path / "nothing")
    for name, content in (("notes.md", "x"), ("other.json", "{}"), ("empty.json", "")):
        (tmp_path / name).write_text(content)
        with pytest.raises(
            ReaderError, match=r"no reader knows .* name its reader \(--custom_data_reader csv"
        ):
            open_reader(tmp_path / name)


def test_a_folder_that_cannot_be_listed_is_named(tmp_path, monkeypatch):
    def refuse(path="."):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("os.listdir", refuse)
    monkeypatch.setattr("os.scandir", refuse)
    with pytest.raises(ReaderError, match=f"'{tmp_path}' cannot be .*: Permission denied"):
        open_reader(tmp_path)


@pytest.mark.parametrize("name", ["text", "csv", "tar", "recordio", "parquet", "image_folder", "voc"])
def test_an_option_that_no_reader_has_is_refused_with_those_that_there_are(name, tmp_path):
    of_a_store = "storage_options, index_dir, refresh"
    with pytest.raises(InvalidArgument, match=f"'colour'; its arguments are: .*{of_a_store}$"):
        load_reader(name, {"colour": 3}, data=str(tmp_path))
    module, _, kind_name = READERS[name].partition(":")
    kind = getattr(importlib.import_module(module), kind_name)
    with pytest.raises(TypeError, match=f"{kind.__name__}.__init__.. got an unexpected .* 'colour'"):
        kind(str(tmp_path), colour=3)


class OnePath(AbstractDataReader):
    def __init__(self, path, step=1):
        super().__init__()
        self.told = (path, step)

    create_shards = read_records = None.__init__


class TwoPaths(OnePath):
    def __init__(self, images, labels):
        self.told = (images, labels)


class Origin(OnePath):
    def __init__(self, path="", *, data_origin):
        self.told = (path, data_origin)


class Any_(OnePath):
    def __init__(self, **kwargs):
        self.told = kwargs


@pytest.mark.parametrize(
    ("reader", "params", "told"),
    [
        ("OnePath", "", ("D", 1)),
        ("OnePath", "step=3", ("D", 3)),
        ("OnePath", "path=E", ("E", 1)),
        ("TwoPaths", "images=I", ("I", "D")),
        ("Origin", "", ("", "D")),
        ("Origin", "data_origin=E", ("", "E")),
        ("Any_", "", {"data_origin": "D"}),
        ("Any_", "data_origin=E", {"data_origin": "E"}),
    ],
)
def test_what_is_to_be_read_goes_where_the_class_wants_it(monkeypatch, reader, params, told):
    monkeypatch.setitem(sys.modules, "own_module", sys.modules[__name__])
    assert load_reader(f"own_module:{reader}", params, "D").told == told


def test_data_does_not_go_to_one_of_several_arguments_that_are_needed(monkeypatch):
    monkeypatch.setitem(sys.modules, "own_module", sys.modules[__name__])
    with pytest.raises(InvalidArgument, match="missing a required argument: 'images'"):
        load_reader("own_module:TwoPaths", "", "D")


def test_a_kind_reads_data_whose_name_does_not_tell(tmp_path):
    (tmp_path / "iris.data").write_text("1,2\n3,4\n")
    table = load_reader("csv", "header=False", str(tmp_path / "iris.data"))
    assert table.create_shards() == {str(tmp_path / "iris.data"): 2}
    captions = write_coco(tmp_path / "coco")[1]
    assert load_reader("coco_captions", "per=image", captions).count == 4
    images = str(tmp_path / "coco" / "images")
    assert load_reader("coco_captions", {"images": images}, shutil.copy(captions, tmp_path)).count == 6
    voc = load_reader("voc", "", write_voc(tmp_path / "voc"), TaskType.EVALUATION)
    assert voc.name.endswith("val.txt")


@pytest.mark.parametrize(
    ("reader", "error", "message"),
    [
        ("nonsense", InvalidArgument, "expected module:Class or one of python_custom"),
        (":Class", InvalidArgument, "expected module:Class"),
        ("no_such_module:Class", ReaderUnavailable, "cannot import 'no_such_module'"),
        ("own_module:Nothing", InvalidArgument, "has no class Nothing"),
        ("own_module:Path", InvalidArgument, "needs create_shards and read_records"),
        (
            "own_module:OwnReader",
            InvalidArgument,
            "OwnReader: missing a .*'table'; its arguments are: table, rows",
        ),
    ],
)
def test_bad_reader_names_say_what_is_wrong(monkeypatch, reader, error, message):
    monkeypatch.setitem(sys.modules, "own_module", sys.modules[__name__])
    with pytest.raises(error, match=message):
        load_reader(reader)


def test_a_type_error_inside_a_constructor_is_the_readers_own(monkeypatch):
    monkeypatch.setitem(sys.modules, "own_module", sys.modules[__name__])
    with pytest.raises(TypeError, match="has no len"):
        load_reader("own_module:TypeErrorInside")


@pytest.mark.parametrize(
    ("text", "params"),
    [
        ("", {}),
        (" ; ;", {}),
        (
            "a=1; b=2.5;c=[1, 2] ;d={'x': None};e=True",
            {"a": 1, "b": 2.5, "c": [1, 2], "d": {"x": None}, "e": True},
        ),
        ("path=/data/x y.csv; table=odps://p/t", {"path": "/data/x y.csv", "table": "odps://p/t"}),
        ("sep=';'; quote=\"it's; so\"; where='a=b'", {"sep": ";", "quote": "it's; so", "where": "a=b"}),
        ("query=a=b; empty=", {"query": "a=b", "empty": ""}),
        (r"s='it\'s;'", {"s": "it's;"}),
    ],
)
def test_reader_parameters_are_parsed(text, params):
    assert parse_reader_params(text) == params


@pytest.mark.parametrize("text", ["a", "=1", "a b=1", "a=1;a=2", "1a=2", "a='x; b=2"])
def test_bad_reader_parameters_are_refused(text):
    with pytest.raises(InvalidArgument, match="reader parameter"):
        parse_reader_params(text)


@pytest.mark.parametrize("text", ["table=t; access_key=abc;secret", "table=t; access_key='secret"])
def test_bad_reader_parameters_are_not_repeated(text):
    with pytest.raises(InvalidArgument, match=r"parameter 3|character 21") as caught:
        parse_reader_params(text)
    assert "secret" not in str(caught.value)


def test_public_names_are_there():
    assert set(readers.__all__) <= set(dir(readers))
    for name in readers.__all__:
        assert getattr(readers, name).__name__ == name
    assert {target.partition(":")[2] for target in READERS.values()} <= set(readers.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = readers.Nothing


def test_a_bucket_of_voc_and_other_data_is_refused_with_the_folder_to_give():
    store = fsspec.filesystem("memory")
    voc = "/several/voc/VOCdevkit/VOC2012"
    for name in (f"{voc}/JPEGImages/1.jpg", f"{voc}/SegmentationClass/1.png", f"{voc}/Annotations/1.xml"):
        store.pipe(name, b"1")
    store.pipe("/several/table/rows.csv", b"a,b\n1,2\n")
    with pytest.raises(
        ReaderError, match=r"holds Pascal VOC in '.*VOC2012/' and other data, as '.*rows.csv'"
    ):
        open_reader("memory://several")
    store.rm("/several/table", recursive=True)
    with pytest.raises(DataFormatError, match="ImageSets"):  # its list is not there: it was taken for VOC
        open_reader("memory://several/voc")
    store.pipe("/several/coco/annotations/instances.json", b"{}")
    store.pipe("/several/coco/images/1.jpg", b"1")
    with pytest.raises(ReaderError, match=r"holds COCO, as '.*s.json': name .* by CocoDetectionReader\(i"):
        open_reader("memory://several/coco")
    store.rm("/several", recursive=True)
