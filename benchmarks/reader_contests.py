"""Each reader against its peer: scans, random access, columns.

What is compared with what, and why, is in the README beside it.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import reader_files as files
import reader_peers as peers
from contenders import Elastic, MapStyle, ReaderRows
from harness import Contest, Round
from reader_tables import TABLE, MaxComputeServer
from serving import serving
from torch.utils.data import Dataset, Subset

from edl_torch.readers import (
    CsvReader,
    ODPSDataReader,
    ParquetReader,
    RecordIODataReader,
    TarReader,
    TextReader,
)
from edl_torch.readers.base import AbstractDataReader, reader_sources
from edl_torch.readers.storage import Storage
from edl_torch.readers.tar.index import OpenTar, made_index
from edl_torch.shard import Shard, Task

OURS, COLUMNS, MAP_STYLE = "ours", "elastic, columnar", "map-style per record"
SCAN, RANDOM, COLUMNAR = 5.0, 50.0, 10.0
_PER_RECORD = 8  # batches of a round, where each record takes its time
MAKERS = {"lines": files.csv_lines, "documents": files.documents, "pictures": files.pictures}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is read, and where it lies."""

    folder: Path
    rounds: int
    rows: int
    records: dict[str, int]  # of RecordIO, by kind
    picked: int  # records that a slow peer reads at random
    huge: int
    batch: int = 2048


class Scan:
    """All records of a reader's only source, in order."""

    def __init__(self, reader: AbstractDataReader) -> None:
        self._reader = reader
        (source,) = reader_sources(reader)
        self._shard = Shard(name=source.name, start=0, end=source.count)

    def __call__(self) -> int:
        records = self._reader.read_records(Task(shard=self._shard))
        return peers.consume(records, self._shard.end)


class Shuffled:
    """Each record once, in a random order, by a reader that has nothing in memory."""

    def __init__(self, reader: AbstractDataReader, most: int | None = None) -> None:
        self._pickled = pickle.dumps(reader)
        (source,) = reader_sources(reader)
        self._name = source.name
        self._order = random.Random(0).sample(range(source.count), source.count)[:most]

    def __call__(self) -> int:
        read = pickle.loads(self._pickled).read_record
        return peers.consume((read(self._name, index) for index in self._order), len(self._order))


def recordio(sizes: Sizes, stack: ExitStack, workers: Iterable[int]) -> Iterator[Contest]:
    """Three sorts of records, in chunks of pyrecordio's default size and of ours."""
    for kind, make in MAKERS.items():
        for chunk_bytes, chunks in ((1 << 10, "chunks of 1 KiB"), (1 << 18, "chunks of 256 KiB")):
            path = sizes.folder / f"{kind}-{chunk_bytes}.recordio"
            files.write_recordio(path, make(sizes.records[kind]), chunk_bytes)
            reader = RecordIODataReader(path)
            peer = peers.PyRecordIO(path)
            yield Contest(
                title=f"RecordIO, {kind}, {chunks}: scan",
                contenders={OURS: Scan(reader), "pyrecordio": peer.scan},
                ratios=[(OURS, "pyrecordio", SCAN)],
            )
            yield _picked(f"RecordIO, {kind}, {chunks}: random access", path, peer, sizes)


def _picked(title: str, path: Path, peer: peers.PyRecordIO, sizes: Sizes) -> Contest:
    reader = RecordIODataReader(path)
    picked = random.Random(1).sample(range(reader.count), min(sizes.picked, reader.count))
    uncached = "ours, a chunk for each record"
    return Contest(
        title=title,
        contenders={
            OURS: Shuffled(reader),
            uncached: Shuffled(RecordIODataReader(path, cache_bytes=0), sizes.picked),
            "pyrecordio": lambda: peer.pick(picked),
        },
        ratios=[(OURS, "pyrecordio", RANDOM), (uncached, "pyrecordio", None)],
    )


def tar(sizes: Sizes, stack: ExitStack, workers: Iterable[int]) -> Iterator[Contest]:
    """Samples of 100 kB and 1 kB against `webdataset`, raw bytes both; headers against `tarfile`."""
    shards = 4
    for what, size in (("100 kB", 100_000), ("1 kB", 1_000)):
        count = sizes.records["documents"] // (shards * (8 if size > 10_000 else 1))
        paths = files.write_tars(sizes.folder / f"tars-{size}", shards, count, size)
        reader = TarReader(paths)
        peer = "webdataset"
        yield Contest(
            title=f"tar, samples of {what}: in order",
            contenders={OURS: Scan(reader), peer: partial(peers.webdataset_samples, paths, False)},
            ratios=[(OURS, peer, None)],
        )
        yield Contest(
            title=f"tar, samples of {what}: shuffled, all of them against a buffer of 1,000",
            contenders={OURS: Shuffled(reader), peer: partial(peers.webdataset_samples, paths, True)},
            ratios=[(OURS, peer, None)],
        )
        yield Contest(
            title=f"tar, samples of {what}: members indexed",
            contenders={
                OURS: partial(_indexed, paths[0], count),
                "tarfile": partial(peers.tarfile_members, paths[0]),
            },
            ratios=[(OURS, "tarfile", None)],
        )


def _indexed(path: str, samples: int) -> int:
    assert len(made_index(OpenTar.of(path, Storage()))) == samples + 1
    return 2 * samples


def csv(sizes: Sizes, stack: ExitStack, workers: Iterable[int]) -> Iterator[Contest]:
    """Rows of numbers."""
    path = sizes.folder / "numbers.csv"
    files.write_csv(path, sizes.rows)
    dtypes = dict.fromkeys(files.FEATURES, "float32")
    rows = CsvReader(path, dtypes=dtypes, as_tuples=True)
    yield Contest(
        title="CSV rows in order",
        contenders={OURS: Scan(rows), "csv": lambda: peers.csv_rows(path, sizes.rows)},
        ratios=[(OURS, "csv", None)],
    )
    reader, dataset = CsvReader(path, dtypes=dtypes), peers.CsvLines(path)
    for count in workers:
        yield _columnar("CSV", reader, {MAP_STYLE: dataset}, sizes, stack, count)


def text(sizes: Sizes, stack: ExitStack, workers: Iterable[int]) -> Iterator[Contest]:
    """Lines of words."""
    path = sizes.folder / "lines.txt"
    files.write_text(path, sizes.rows)
    plain = "for line in file"
    yield Contest(
        title="text lines in order",
        contenders={OURS: Scan(TextReader(path)), plain: lambda: peers.plain_lines(path, sizes.rows)},
        ratios=[(OURS, plain, None)],
    )


def parquet(sizes: Sizes, stack: ExitStack, workers: Iterable[int]) -> Iterator[Contest]:
    """The numbers again."""
    path = sizes.folder / "numbers.parquet"
    files.write_parquet(path, sizes.rows, rows_per_group=8 * sizes.batch)
    reader = ParquetReader(path, cache_bytes=1)  # so that each round decodes what it reads
    rows: dict[str, Round] = {"pyarrow, to_pylist": lambda: peers.arrow_rows(path, sizes.rows)}
    datasets: dict[str, Dataset[Any]] = {MAP_STYLE: peers.ArrowRows(path)}
    datasets["map-style, arrays in memory"] = peers.ArrayRows(path)
    if find_spec("pandas"):
        rows["pandas, itertuples"] = lambda: peers.frame_rows(path, sizes.rows)
        datasets["map-style, pandas iloc"] = Subset(peers.FrameRows(path), range(2 * sizes.batch))
    yield Contest(
        title="Parquet rows in order",
        contenders={OURS: Scan(reader), **rows},
        ratios=[(OURS, name, None) for name in rows],
    )
    for count in workers:
        yield _columnar("Parquet", reader, datasets, sizes, stack, count)


def odps(sizes: Sizes, stack: ExitStack, workers: Iterable[int]) -> Iterator[Contest]:
    """The numbers as a table of a service on this machine, in a process of its own."""
    from odps import ODPS

    script = str(Path(__file__).with_name("reader_tables.py"))
    server = stack.enter_context(serving([script, str(sizes.rows)]))
    with MaxComputeServer() as same:  # its account is every server's
        account, key, project = same.access_id, same.access_key, same.project
    endpoint = f"http://{server.address}/api"
    client = ODPS(account, key, project, endpoint)
    open_table = partial(
        ODPSDataReader, TABLE, project=project, access_id=account, access_key=key, endpoint=endpoint
    )
    reader, ours = open_table(cache_bytes=1), open_table(cache_bytes=1)
    records, arrow = "pyodps records", "pyodps Arrow batches"
    yield Contest(
        title="ODPS rows in order",
        contenders={OURS: Scan(reader), records: lambda: peers.odps_records(client, TABLE, sizes.rows)},
        ratios=[(OURS, records, None)],
    )
    requests = peers.OdpsRows(client, TABLE, sizes.picked)
    for count, method in ((n, how) for n in workers for how in (("fork", "spawn") if n else (None,))):
        streams: dict[str, Round] = {}
        blocks = peers.OdpsBlocks(client, TABLE, sizes.rows, block_rows=8 * sizes.batch)
        datasets: dict[str, Dataset[Any]] = {MAP_STYLE: blocks, "map-style, our reader's": ReaderRows(ours)}
        if not count:
            streams[records] = lambda: peers.odps_records(client, TABLE, sizes.rows)
            streams[arrow] = lambda: peers.odps_batches(client, TABLE, sizes.rows)
            datasets["map-style, a request for each"] = requests
        yield _columnar(
            "ODPS",
            reader,
            datasets,
            sizes,
            stack,
            count,
            others=streams,
            per_record=sizes.rows,
            method=method,
        )


def _columnar(
    what: str,
    reader: AbstractDataReader,
    datasets: dict[str, Dataset[Any]],
    sizes: Sizes,
    stack: ExitStack,
    workers: int,
    others: dict[str, Round] | None = None,
    per_record: int = 0,
    method: str | None = None,
) -> Contest:
    """`per_record`: how many rows the map-style peers read; by default some batches, as all cost the same."""
    elastic = Elastic(reader, columnar=True, batch_size=sizes.batch, workers=workers, method=method)
    stack.callback(elastic.close)
    contenders: dict[str, Round] = {COLUMNS: elastic, **(others or {})}
    for name, dataset in datasets.items():
        some = Subset(dataset, range(min(len(dataset), per_record or _PER_RECORD * sizes.batch)))  # type: ignore[arg-type]
        contenders[name] = MapStyle(some, batch_size=sizes.batch, workers=workers, method=method)
    return Contest(
        title=f"{what} columns in batches of {sizes.batch}, {workers} workers"
        + (f" ({method})" if method else ""),
        contenders=contenders,
        ratios=[(COLUMNS, name, COLUMNAR if name == MAP_STYLE else None) for name in list(contenders)[1:]],
    )
