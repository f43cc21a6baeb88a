"""What the readers are raced against: each format as one reads it without us, by record.

Map-style peers are datasets whose `__getitem__` reads one record in the way that is natural to its format;
`DataLoader` and its default collate make batches of them.
"""

from __future__ import annotations

import csv
import os
import tarfile
import threading
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reader_files import FEATURES, LABEL
from torch.utils.data import Dataset


def consume(records: Iterable[Any], count: int) -> int:
    """Go over all records and keep none."""
    deque(records, maxlen=0)
    return count


class PyRecordIO:
    """A file opened by pyrecordio, its index made."""

    def __init__(self, path: Path) -> None:
        from recordio.recordio.file import File

        self._file = File(str(path), "r")
        self._count = self._file.count()

    def scan(self) -> int:
        """All records in order, as `for record in File(path, "r")` gives them."""
        return consume(self._file.get_reader(), self._count)

    def pick(self, numbers: Sequence[int]) -> int:
        """Single records, each by `File.get`."""
        return consume(map(self._file.get, numbers), len(numbers))


class CsvLines(Dataset[Any]):
    """Rows by the offsets of their lines, noted once: seek, read the line, make numbers of it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offsets = array("q")
        with path.open("rb") as file:
            while file.readline():
                self._offsets.append(file.tell())
        self._offsets.pop()
        self._file: Any = None
        self._pid = 0

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self._pid != os.getpid():
            self._file, self._pid = self._path.open("rb"), os.getpid()
        self._file.seek(self._offsets[index])
        *features, label = self._file.readline().split(b",")
        return torch.tensor(list(map(float, features))), int(label)


def webdataset_samples(paths: list[str], shuffles: bool) -> int:
    """All samples of some shards, raw, in order or through a shuffle buffer of 1,000."""
    import webdataset

    samples = webdataset.WebDataset(paths, shardshuffle=len(paths) if shuffles else False, empty_check=False)
    return sum(1 for _ in (samples.shuffle(1000) if shuffles else samples))


def tarfile_members(path: str) -> int:
    """All headers of a tar, by Python."""
    count = 0
    with tarfile.open(path) as tar:
        while tar.next() is not None:
            count += 1
            tar.members = []  # type: ignore[attr-defined]  # it keeps all
    return count


def csv_rows(path: Path, count: int) -> int:
    """All rows by Python's `csv`, with their values as numbers."""
    with path.open(newline="") as file:
        rows = csv.reader(file)
        next(rows)
        return consume(((*map(float, row[:-1]), int(row[-1])) for row in rows), count)


def plain_lines(path: Path, count: int) -> int:
    """All lines of a file without their ends."""
    with path.open(encoding="utf-8") as file:
        return consume((line.rstrip("\n") for line in file), count)


class ArrowRows(Dataset[Any]):
    """A Parquet file as a pyarrow table in memory; one row of it as a dict, as `datasets` does it."""

    def __init__(self, path: Path) -> None:
        from pyarrow import parquet

        self._table = parquet.read_table(path)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> Any:
        return self._table.slice(index, 1).to_pylist()[0]


class FrameRows(Dataset[Any]):
    """A Parquet file as a pandas frame in memory; one row of it by `iloc`, as tutorials do it."""

    def __init__(self, path: Path) -> None:
        import pandas as pd  # type: ignore[import-untyped]

        self._frame = pd.read_parquet(path)

    def __len__(self) -> int:
        return len(self._frame)

    def __getitem__(self, index: int) -> Any:
        row = self._frame.iloc[index]
        return torch.tensor(row[FEATURES].to_numpy(), dtype=torch.float32), int(row[LABEL])


class ArrayRows(Dataset[Any]):
    """A Parquet file as arrays in memory, which it no longer is; one row of them."""

    def __init__(self, path: Path) -> None:
        from pyarrow import parquet

        table = parquet.read_table(path)
        self._features = np.stack([table.column(name).to_numpy() for name in FEATURES], axis=1)
        self._labels = table.column(LABEL).to_numpy()

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> Any:
        return self._features[index], self._labels[index]


def arrow_rows(path: Path, count: int) -> int:
    """All rows of a Parquet file as dicts, batch after batch, by pyarrow."""
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        return consume((row for part in file.iter_batches() for row in part.to_pylist()), count)


def frame_rows(path: Path, count: int) -> int:
    """All rows of a Parquet file as named tuples, by pandas."""
    import pandas as pd

    return consume(pd.read_parquet(path).itertuples(index=False), count)


class OdpsRows(Dataset[Any]):
    """A table opened by pyodps; each row by its number, which is a request."""

    def __init__(self, client: Any, table: str, count: int) -> None:
        self._reader = client.get_table(table).open_reader()
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        with self._reader._download_session.open_record_reader(index, 1) as records:
            return list(records.read().values)


class OdpsBlocks(Dataset[Any]):
    """A table's rows as pyodps's records, downloaded in blocks of which the last is kept; one row of it."""

    def __init__(self, client: Any, table: str, count: int, block_rows: int) -> None:
        self._client, self._table, self._count = client, table, count
        self._block_rows = block_rows
        self._at, self._pid = -1, 0
        self._block: list[Any] = []
        self._session: Any = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        block, row = divmod(index, self._block_rows)
        if block != self._at or self._pid != os.getpid():
            self._download(block)
        return self._block[row]

    def _download(self, block: int) -> None:
        if self._pid != os.getpid():
            _forget_connections()
            self._session = self._client.get_table(self._table).open_reader()._download_session
        start = block * self._block_rows
        rows = min(self._block_rows, self._count - start)
        with self._session.open_record_reader(start, rows) as records:
            self._block = [list(record.values) for record in records]
        self._at, self._pid = block, os.getpid()


def _forget_connections() -> None:
    """pyodps is not to be carried over a fork: children would share the parent's sockets, and its rows."""
    from odps.rest import RestClient

    RestClient._session_local = threading.local()


def odps_records(client: Any, table: str, count: int) -> int:
    """All rows of a table as pyodps's records, with their values."""
    with client.get_table(table).open_reader() as reader:
        return consume((record.values for record in reader), count)


def odps_batches(client: Any, table: str, count: int) -> int:
    """All rows of a table as pyodps's Arrow batches, of which nothing is made."""
    with client.get_table(table).open_reader(arrow=True) as reader:
        return consume(reader, count)
