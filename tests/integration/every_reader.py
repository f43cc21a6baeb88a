"""Data for every reader that opens a bare path: what it is called, and how many records it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from image_files import write_coco, write_image_folder, write_manifest, write_voc
from tar_files import samples_tar

SIZES = """
def get_training_size():
    return 11


def get_evaluation_size():
    return 5


def get_prediction_size():
    return 7
"""


@dataclass(frozen=True)
class Data:
    """`data` as it is named on a command line; `counts` of training, evaluation and prediction."""

    data: str
    counts: tuple[int, int, int]
    reader: str
    environment: dict[str, str] = field(default_factory=dict)


def same(data: str | Path, count: int, reader: str) -> Data:
    return Data(str(data), (count, count, count), reader)


def coco(root: Path, number: int, reader: str, count: int) -> Data:
    return same(write_coco(root, 4)[number], count, reader)


def csv_rows(root: Path) -> Data:
    (root / "rows.csv").write_text("x,y\n" + "".join(f"{n},{n / 2}\n" for n in range(9)))
    return same(root / "rows.csv", 9, "CsvReader")


def text_lines(root: Path) -> Data:
    (root / "lines.txt").write_text("".join(f"line {n}\n" for n in range(13)))
    return same(root / "lines.txt", 13, "TextReader")


def parquet_rows(root: Path) -> Data:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"x": list(range(10))}), root / "rows.parquet", row_group_size=4)
    return same(root / "rows.parquet", 10, "ParquetReader")


def recordio(root: Path) -> Data:
    from edl_torch.readers import RecordIOWriter

    with RecordIOWriter(root / "a.recordio") as writer:
        for number in range(12):
            writer.write(b"record %d" % number)
    return same(root / "a.recordio", 12, "RecordIODataReader")


def tar_shards(root: Path) -> Data:
    for number in range(3):
        samples_tar(root / f"{number}.tar", 5, begin=5 * number)
    return same(root, 15, "TarReader")


def python_file(root: Path) -> Data:
    (root / "sizes.py").write_text(SIZES)
    return Data(str(root / "sizes.py"), (11, 5, 7), "PythonCustomReader")


def voc(root: Path) -> Data:
    data = write_voc(root, 5)  # train has 4, val 1
    lists = root / "VOCdevkit" / "VOC2012" / "ImageSets" / "Main"
    (lists / "test.txt").write_text("0000\n0003\n")
    return Data(data, (4, 1, 2), "VocReader")


MAKERS: dict[str, Callable[[Path], Data]] = {
    "image_folder": lambda root: same(write_image_folder(root / "f", per_class=4), 8, "ImageFolderReader"),
    "flat_folder": lambda root: same(write_image_folder(root / "f", (), 5), 5, "ImageFolderReader"),
    "image_manifest": lambda root: same(write_manifest(root, [0, 1, 0, 2, 2]), 5, "ImageManifestReader"),
    "coco_captions": lambda root: coco(root, 1, "CocoCaptionsReader", 6),
    "coco_detection": lambda root: coco(root, 2, "CocoDetectionReader", 4),
    "voc": voc,
    "csv": csv_rows,
    "text": text_lines,
    "parquet": parquet_rows,
    "recordio": recordio,
    "tar": tar_shards,
    "python_custom": python_file,
}


@contextmanager
def made(kind: str, root: Path) -> Iterator[Data]:
    """The data of one kind; a table needs its server while it is used."""
    root.mkdir(parents=True, exist_ok=True)
    if kind != "odps":
        yield MAKERS[kind](root)
        return
    from maxcompute import MaxComputeServer

    with MaxComputeServer(batch_rows=5) as server:
        columns: dict[str, Any] = {"i": list(range(14))}
        server.add_table("numbers", {"i": "bigint"}, columns)
        address = f"odps://{server.project}/tables/numbers"
        yield Data(address, (14, 14, 14), "ODPSDataReader", dict(server.environment()))


KINDS = (*MAKERS, "odps")
