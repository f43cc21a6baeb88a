"""RecordIO through the loader: every record once, in workers of both start methods."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from edl_torch import DataShardService, ElasticDataLoader, ShardedDataset
from edl_torch.readers import RecordIODataReader, RecordIOWriter

FILES = {
    "a.recordio": ("python", "snappy", 70),
    "b.recordio": ("go", "gzip", 41),
    "c.recordio": ("go", "snappy", 0),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    for name, (dialect, compressor, count) in FILES.items():
        path = tmp_path / "data" / name
        with RecordIOWriter(path, dialect=dialect, compressor=compressor, max_chunk_bytes=60) as writer:
            for number in range(count):
                writer.write(f"{name} {number}".encode())
    return tmp_path / "data"


ALL = Counter(f"{name} {number}" for name, (*_, count) in FILES.items() for number in range(count))


def as_they_are(batch: list[str]) -> list[str]:
    return batch


@pytest.mark.parametrize(
    ("workers", "order"),
    [
        *((workers, order) for workers in (0, "fork") for order in ("plain", "in shards", "global")),
        ("forkserver", "in shards"),
    ],
)
def test_each_record_is_read_once(folder: Path, workers: int | str, order: str) -> None:
    reader = RecordIODataReader(folder, decode="text")
    reader.read_record(reader.files[0], 3)  # what is open and kept does not travel
    options = {} if workers == 0 else {"num_workers": 2, "multiprocessing_context": workers}
    with DataShardService(8, reader=reader, num_epochs=2, shuffle=order == "global") as service:
        dataset = ShardedDataset(service, reader, shuffle=order == "in shards")
        loader = ElasticDataLoader(dataset, collate_fn=as_they_are, **options)
        for _ in range(2):
            assert Counter(record for batch in loader for record in batch) == ALL
        assert service.finished


@pytest.mark.parametrize("workers", [0, 2])
def test_records_of_a_damaged_chunk_are_set_aside_by_name(folder: Path, workers: int) -> None:
    path = folder / "b.recordio"
    data = bytearray(path.read_bytes())
    data[-5] ^= 0xFF
    path.write_bytes(data)
    reader = RecordIODataReader(folder, decode="text")
    source = reader._by_name()[str(path)]
    lost = source.records - source.firsts[len(source.firsts) - 2]
    context = {"multiprocessing_context": "fork"} if workers else {}
    with DataShardService(8, reader=reader, max_bad_records=lost) as service:
        dataset = ShardedDataset(service, reader, on_bad_record="quarantine")
        loader = ElasticDataLoader(dataset, collate_fn=as_they_are, num_workers=workers, **context)
        seen = Counter(record for batch in loader for record in batch)
    assert sum(seen.values()) == sum(ALL.values()) - lost
    assert ALL - seen == Counter(f"b.recordio {41 - lost + number}" for number in range(lost))


def test_the_number_of_open_files_does_not_grow_with_epochs(folder: Path) -> None:
    reader = RecordIODataReader(folder)
    before = len(os.listdir("/proc/self/fd"))
    with DataShardService(8, reader=reader, num_epochs=3) as service:
        loader = ElasticDataLoader(ShardedDataset(service, reader), collate_fn=as_they_are)
        for _ in range(3):
            list(loader)
    assert len(os.listdir("/proc/self/fd")) <= before + 3
