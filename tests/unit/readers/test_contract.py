"""Every reader keeps the contract of readers, with whatever options and whatever files it has."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from image_files import write_coco, write_image_folder, write_manifest, write_voc
from readers_kit import write_csv, write_hive, write_parquet, write_recordio
from tar_files import samples_tar, write_tar
from test_map_dataset import Batched
from torch.utils.data import Subset, TensorDataset

from edl_torch import readers
from edl_torch.errors import DataFormatError, ReaderError
from edl_torch.readers import (
    CocoCaptionsReader,
    CocoDetectionReader,
    CsvReader,
    ImageFolderReader,
    ImageManifestReader,
    MapDatasetReader,
    ParquetReader,
    PythonCustomReader,
    RecordIODataReader,
    TarReader,
    TextReader,
    VocReader,
)
from edl_torch.readers.base import AbstractDataReader
from edl_torch.shard import Shard, Task, TaskType
from edl_torch.testing import check_reader

Make = Callable[[Path], Callable[[], AbstractDataReader]]
TENSORS = TensorDataset(torch.arange(12.0).reshape(6, 2), torch.arange(6))
SIZES = "def get_training_size(): return 10\ndef get_evaluation_size(): return 3\n"


def csv(*, chunk_bytes: int = 7, **options: Any) -> Make:
    return lambda at: partial(CsvReader, write_csv(at), chunk_bytes=chunk_bytes, **options)


def csv_files(at: Path) -> Callable[[], CsvReader]:
    """Many rows with quoted line ends; one file is packed, and begins with a mark."""
    body = "".join(f'{number},"{number}\n",{number / 7}\n' for number in range(10_000))
    write_csv(at, "n,text,part\n" + body, "a.csv")
    packed = '\ufeffn,text,part\r\n1,"x\r\ny",0.5\r\n2,z,1.5'
    write_csv(at, gzip.compress(packed.encode()), "b.csv.gz")
    return lambda: CsvReader(at)


def text(*, chunk_bytes: int = 1, **options: Any) -> Make:
    lines = '\ufeffone\r\n\n"two\n\rthree\n\n\nfö"ur'
    return lambda at: partial(TextReader, write_csv(at, lines, "a.txt"), chunk_bytes=chunk_bytes, **options)


def parquet(group: int = 7, **options: Any) -> Make:
    return lambda at: partial(ParquetReader, write_parquet(at / "a.parquet", (0, 40), group, **options))


def hive(**options: Any) -> Make:
    return lambda at: partial(ParquetReader, write_hive(at), **options)


def several_kinds_of_strings(at: Path) -> Callable[[], ParquetReader]:
    plain = pa.table({"s": pa.array(["a", "b"])})
    write_parquet(at / "1.parquet", plain)
    write_parquet(at / "2.parquet", pa.table({"s": plain["s"].combine_chunks().dictionary_encode()}))
    write_parquet(at / "3.parquet", plain.cast(pa.schema([("s", pa.large_string())])))
    return lambda: ParquetReader(at)


def nulls_in_lists(at: Path) -> Callable[[], ParquetReader]:
    pairs = pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int8(), 2))
    path = write_parquet(at / "a.parquet", pa.table({"x": [[1, None], None, [3]], "m": pairs}))
    return lambda: ParquetReader(path, fill_nulls={"x": 7, "m": [0, 0]})


def recordio_files(at: Path) -> Callable[[], RecordIODataReader]:
    for name in (os.fsdecode(b"\xff\xfe.recordio"), "deep/b.recordio"):
        (at / name).parent.mkdir(exist_ok=True)
        write_recordio(at / name)
    return lambda: RecordIODataReader(at)


def tars(**options: Any) -> Make:
    def make(at: Path) -> Callable[[], TarReader]:
        samples_tar(at / "b.tar", 7)
        samples_tar(at / "a.tar", 1500, begin=7)
        write_tar(at / "c.tar", {"README": b"no sample"})
        return lambda: TarReader(at, **options)

    return make


def coco(kind: Any, **options: Any) -> Make:
    def make(at: Path) -> Callable[[], AbstractDataReader]:
        images, captions, instances = write_coco(at)
        return lambda: kind(images, captions if kind is CocoCaptionsReader else instances, **options)

    return make


def custom(records_per_task: int | None) -> Make:
    return lambda at: partial(PythonCustomReader, write_csv(at, SIZES, "sizes.py"), records_per_task)


def held(dataset: Any, **options: Any) -> Make:
    return lambda at: partial(MapDatasetReader, dataset, **options)


READERS: dict[str, Make] = {
    "csv": csv(),
    "csv in pieces of a byte": csv(chunk_bytes=1),
    "csv as tuples": csv(as_tuples=True),
    "csv of some columns": csv(columns=["size", "id"]),
    "csv in cp1252": csv(encoding="cp1252"),
    "csv files": csv_files,
    "text": text(),
    "text as bytes": text(as_bytes=True),
    "text without empty lines": text(skip_empty=True),
    "text by LF": text(universal_newlines=False, chunk_bytes=1 << 20),
    **{f"parquet by {group}": parquet(group) for group in (1, 7, 100)},
    "parquet of zstd": parquet(compression="zstd"),
    "parquet of version 1.0": parquet(version="1.0"),
    "parquet of pages of version 2.0": parquet(data_page_version="2.0"),
    "parquet in folders": hive(),
    "parquet of a folder's column": hive(columns=["colour"]),
    "parquet of some columns": hive(columns=["colour", "half", "year"]),
    "parquet of several kinds of strings": several_kinds_of_strings,
    "parquet with NULL in lists": nulls_in_lists,
    "recordio files": recordio_files,
    "recordio decoded": lambda at: partial(
        RecordIODataReader, write_recordio(at / "x"), decode=f"{__name__}:length"
    ),
    "tar": tars(),
    "tar as tuples": tars(fields=("txt", "cls", "__key__")),
    "tar as bytes": tars(decode=False),
    "captions": coco(CocoCaptionsReader),
    "captions of images": coco(CocoCaptionsReader, per="image"),
    "detection": coco(CocoDetectionReader),
    "detection with masks": coco(CocoDetectionReader, masks=True),
    "voc": lambda at: partial(VocReader, write_voc(at)),
    "voc val": lambda at: partial(VocReader, write_voc(at), split="val"),
    "class folders": lambda at: partial(ImageFolderReader, write_image_folder(at, ("c", "a", "b"), 4)),
    "flat folder": lambda at: partial(ImageFolderReader, write_image_folder(at, (), 5)),
    "manifest": lambda at: partial(ImageManifestReader, write_manifest(at)),
    "manifest without heading": lambda at: partial(ImageManifestReader, write_manifest(at, header=False)),
    **{f"custom by {size}": custom(size) for size in (None, 1, 4, 10, 11)},
    "list": held(list(range(10))),
    "empty list": held([]),
    "tensors": held(TENSORS),
    "subset": held(Subset(TENSORS, [4, 2, 0])),
    "getitems": held(Batched()),
    "getitems by threads": held(Batched(), thread_safe=True),
}


def length(record: bytes) -> int:
    return len(record)


@pytest.mark.parametrize("what", READERS)
def test_the_contract_is_kept(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDL_INDEX_DIR", str(tmp_path / "index"))
    (tmp_path / "data").mkdir()
    check_reader(READERS[what](tmp_path / "data"))


def test_the_contract_is_kept_in_another_mode(tmp_path: Path) -> None:
    check_reader(custom(2)(tmp_path), mode=TaskType.EVALUATION)


def test_sources_and_records_that_are_not_there_are_refused_with_what_is(tmp_path: Path) -> None:
    reader = TextReader(path := write_csv(tmp_path, "one\ntwo\n", "a.txt"))
    with pytest.raises(
        ReaderError, match=r"TextReader reads '.*a\.txt', not 'b': make the reader with the same"
    ):
        reader.read_record("b", 0)
    with pytest.raises(ReaderError, match="has the records 0 to 2 here, but record 2 was asked for"):
        reader.read_record(path, 2)
    with pytest.raises(ReaderError, match="here, but records 1 to 9 was asked for"):
        list(reader.read_records(Task(shard=Shard(name=path, start=1, end=9))))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
@pytest.mark.parametrize("kind", [TextReader, RecordIODataReader, ParquetReader, TarReader])
def test_a_file_without_permission_is_named(tmp_path: Path, kind: Any) -> None:
    (tmp_path / "x").touch(mode=0)
    with pytest.raises((DataFormatError, ReaderError), match=r"[Pp]ermission"):
        kind(tmp_path / "x")


# What reading imports ---------------------------------------------------------------------------------------


def test_readers_say_what_reading_imports_so_that_it_is_imported_before_a_fork() -> None:
    of_images = ("ImageFolderReader", "ImageManifestReader", "CocoCaptionsReader", "VocReader")
    assert {getattr(readers, name).imports for name in of_images} == {("cv2",)}
    assert readers.RecordIODataReader.imports == ("cramjam", "google_crc32c")


LAZY = {
    "names and folders": (
        "from edl_torch.readers import *\n"
        "import edl_torch.readers.images.coco, edl_torch.readers.images.voc\n"
        "open_reader('images').create_shards()",
        {"cv2", "torch", "pycocotools", "grpc", "google.protobuf"},
    ),
    "recordio": (
        "from edl_torch.readers import RecordIODataReader\n"
        "RecordIODataReader('x', dialect='go').read_record('x', 0)",
        {"cramjam", "google_crc32c", "cv2", "torch", "grpc"},
    ),
    "columns of csv": (
        "import numpy\nfrom edl_torch.readers import CsvReader\n"
        "batch = CsvReader('table.csv', fill_nulls={'id': 0}).read_batch('table.csv', numpy.arange(4))\n"
        "assert batch['id'].tolist() == [1, 2, 3, 4] and numpy.isnan(batch['size'][1])",
        {"pandas", "torch", "cv2"},  # pandas takes half a second and 30 MB of each loader worker
    ),
}


@pytest.mark.parametrize("what", LAZY)
def test_nothing_heavy_is_imported_before_it_is_needed(what: str, tmp_path: Path) -> None:
    write_image_folder(tmp_path / "images")
    write_recordio(tmp_path / "x", form=("go", "none"))
    write_csv(tmp_path)
    code, heavy = LAZY[what]
    code += f"\nimport sys; heavy = {heavy} & set(sys.modules); assert not heavy, heavy"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=tmp_path)
