"""The data that the readers' benchmark reads: made once, with numbers that look like somebody's.

It does not know who reads them.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edl_torch.readers import RecordIOWriter

FEATURES = [f"x{number}" for number in range(16)]
LABEL = "label"
COLUMNS = [*FEATURES, LABEL]


def numbers(count: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Sixteen features and a label for each row."""
    rng = np.random.default_rng(0)
    return rng.normal(size=(count, len(FEATURES))).astype(np.float32), rng.integers(0, 10, count)


def write_csv(path: Path, count: int) -> None:
    """Rows of numbers with four decimals, and a heading."""
    features, labels = numbers(count)
    with path.open("w") as file:
        file.write(",".join(COLUMNS) + "\n")
        for row, label in zip(features.tolist(), labels.tolist(), strict=True):
            file.write(",".join(map("{:.4f}".format, row)) + f",{label}\n")


def write_tars(folder: Path, shards: int, count: int, size: int) -> list[str]:
    """Shards of `count` samples each: `size` bytes that do not compress, and a class."""
    folder.mkdir()
    rng, paths = np.random.default_rng(0), []
    for number in range(shards):
        paths.append(str(folder / f"train-{number:03}.tar"))
        with tarfile.open(paths[-1], "w", format=tarfile.USTAR_FORMAT) as tar:
            for index in range(count):
                for suffix, data in (("bin", rng.bytes(size)), ("cls", b"%d" % (index % 10))):
                    member = tarfile.TarInfo(f"{number:03}{index:06}.{suffix}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    return paths


def write_parquet(path: Path, count: int, rows_per_group: int) -> None:
    """The same rows as columns of float32 and int64."""
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(_table(pa, count), path, row_group_size=rows_per_group)


def _table(pa: Any, count: int) -> Any:
    features, labels = numbers(count)
    return pa.table([*(pa.array(column) for column in features.T), pa.array(labels)], names=COLUMNS)


def write_text(path: Path, count: int) -> None:
    """Lines of words, of 20 to some 120 characters."""
    path.write_text("".join(f"{line}\n" for line in _sentences(count)))


def _sentences(count: int) -> Iterator[str]:
    rng = np.random.default_rng(0)
    words = np.array(
        ["a", "the", "shard", "lease", "epoch", "trainer", "batch", "reads", "keeps", "of", "and"]
    )
    lengths = rng.integers(4, 20, count)
    drawn = iter(words[rng.integers(0, len(words), int(lengths.sum()))].tolist())
    for length in lengths.tolist():
        yield " ".join(next(drawn) for _ in range(length))


def csv_lines(count: int) -> Iterator[bytes]:
    """Records of some 70 to 130 bytes, as of a table."""
    features, labels = numbers(count)
    for row, label in zip(features.tolist(), labels.tolist(), strict=True):
        yield (",".join(map("{:.3f}".format, row)) + f",{label}").encode()


def documents(count: int) -> Iterator[bytes]:
    """JSON of some 0.5 to 1.5 kB, as of annotations."""
    rng = np.random.default_rng(0)
    sentences = _sentences(10 * count)
    for number in range(count):
        captions = [next(sentences) for _ in range(int(rng.integers(5, 15)))]
        yield json.dumps({"id": number, "bbox": rng.random(4).tolist(), "captions": captions}).encode()


def pictures(count: int) -> Iterator[bytes]:
    """Some 4 to 12 kB that do not compress, as of small JPEGs."""
    rng = np.random.default_rng(0)
    for size in rng.integers(4096, 12_288, count).tolist():
        yield rng.bytes(size)


def write_recordio(path: Path, records: Iterable[bytes], chunk_bytes: int) -> None:
    """With snappy, in pyrecordio's dialect, which both can read."""
    with RecordIOWriter(path, max_chunk_bytes=chunk_bytes) as writer:
        for record in records:
            writer.write(record)


def write_huge(kind: str, folder: Path, count: int) -> Path:
    """A file of `count` small records, made of 100 equal parts: only its index is of interest."""
    part = count // 100
    path = folder / f"huge.{kind}"
    if kind == "parquet":
        _write_huge_parquet(path, part)
    elif kind == "recordio":
        write_recordio(path, (b"%08d" % number for number in range(part)), 1 << 16)
        _repeat(path, path.read_bytes(), b"")
    else:
        heading = b"a,b\n" if kind == "csv" else b""
        _repeat(path, b"".join(b"%06d,%d\n" % (number, number % 7) for number in range(part)), heading)
    return path


def _repeat(path: Path, part: bytes, heading: bytes) -> None:
    with path.open("wb") as file:
        file.write(heading)
        for _ in range(100):
            file.write(part)


def _write_huge_parquet(path: Path, part: int) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    values = np.arange(part)
    table = pa.table({"a": values, "b": values % 7})
    with parquet.ParquetWriter(path, table.schema) as writer:
        for _ in range(100):
            writer.write_table(table)
