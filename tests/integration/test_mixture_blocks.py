"""How often blocks of a component of few records are read: as often as alone, by one process."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from cases import cases

from edl_torch import ElasticDataLoader, LocalMaster, Mixture
from edl_torch.readers import ParquetReader, RecordIODataReader, RecordIOWriter
from edl_torch.readers.recordio.source import RecordIOSource

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

RECORDS, BLOCK = 2_000, 125


def parquet(folder: Path) -> ParquetReader:
    path = folder / "rows.parquet"
    if not path.exists():
        pq.write_table(pa.table({"id": range(RECORDS)}), path, row_group_size=BLOCK)
    return ParquetReader(str(path), cache_bytes=1)


def recordio(folder: Path) -> RecordIODataReader:
    path = folder / "records.rec"
    if not path.exists():
        with RecordIOWriter(path, max_chunk_bytes=BLOCK * 8) as writer:
            for number in range(RECORDS):
                writer.write(b"%08d" % number)
    return RecordIODataReader(str(path), cache_bytes=1)


class Blocks:
    """Counts chunks of RecordIO, those of runs too; a Parquet reader counts its row groups."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.chunks = 0
        read_chunk = RecordIOSource.read_chunk

        def counted(source: RecordIOSource, *more: Any) -> object:
            self.chunks += 1
            return read_chunk(source, *more)

        read_run = RecordIOSource.read_run

        def counted_run(source: RecordIOSource, read: Any, row: int, end: int) -> object:
            self.chunks += end - row
            return read_run(source, read, row, end)

        monkeypatch.setattr(RecordIOSource, "read_chunk", counted)
        monkeypatch.setattr(RecordIOSource, "read_run", counted_run)

    def read_by(self, *readers: Any) -> int:
        chunks, self.chunks = self.chunks, 0
        return chunks or sum(reader.groups_decoded for reader in readers)


def train(readers: list[Any], mixed: bool, shuffle: Any, **options: Any) -> None:
    """One pass over the reader's records: by itself, or as a hundredth of a mixture; by turns for several."""
    master = LocalMaster()

    def data(reader: Any) -> Any:
        parts = {"few": reader, "most": list(range(1000))}
        return Mixture(parts, {"few": 1, "most": 99}, num_records=100 * RECORDS) if mixed else reader

    loaders = [
        ElasticDataLoader(
            data(reader), 32, master_client=master, seed=1, collate_fn=list, shuffle=shuffle, **options
        )
        for reader in readers
    ]
    rest = [iter(loader) for loader in loaders]
    while rest:
        rest = [one for one in rest if next(one, None) is not None]
    for loader in loaders:
        loader.close()


@cases(
    "make, shuffle",
    [(parquet, True), (recordio, "in_shard")],
    product([parquet, recordio], [False, "in_shard", True]),
)
def test_one_process_reads_blocks_of_a_hundredth_as_often_as_alone(
    make: Any, shuffle: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = Blocks(monkeypatch)
    counts = []
    for mixed in (False, True):
        reader = make(tmp_path)
        train([reader], mixed, shuffle)
        counts.append(blocks.read_by(reader))
    alone, in_mixture = counts
    print(make.__name__, shuffle, alone, in_mixture)
    assert alone >= RECORDS // BLOCK
    assert in_mixture <= 1.3 * alone
