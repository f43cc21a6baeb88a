"""CSV and text files through the loaders: every row once, whatever the workers and how they start."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loader_kit import trainer

from edl_torch import ElasticDataLoader
from edl_torch.errors import BadRecord, ReaderUnavailable
from edl_torch.readers import CsvReader, TextReader
from edl_torch.testing import FakeMaster

pytest.importorskip("pyarrow", reason="batches need pyarrow")

WAYS: list[dict[str, Any]] = [
    {"num_workers": 0},
    {"num_workers": 2, "multiprocessing_context": "fork", "timeout": 60},
    {"num_workers": 1, "multiprocessing_context": "forkserver", "timeout": 60},
]
COUNT = 83


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """Two files with one heading; the second is packed."""
    rows = [f'{number},{number / 4},"row ""{number}"",\n"' for number in range(COUNT)]
    (tmp_path / "a.csv").write_text("\r\n".join(["id,quarter,text", *rows[:50]]), newline="")
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress("\n".join(["id,quarter,text", *rows[50:]]).encode()))
    return tmp_path


def batches(
    reader: Any, way: dict[str, Any], *, columnar: bool, shuffle: bool, **options: Any
) -> Iterator[Any]:
    fake = FakeMaster()
    dataset = {"shuffle": shuffle, **options}
    with trainer(fake, reader, batch_size=4, records_per_shard=16, in_process=False, dataset=dataset) as (
        service,
        data,
    ):
        loader = ElasticDataLoader(data, **({"batch_size": None} if columnar else {}), **way)
        while not service.finished:
            yield from loader
    fake.outcomes["training"].check_complete(1)


@pytest.mark.parametrize("way", WAYS, ids=["0 workers", "fork", "forkserver"])
@pytest.mark.parametrize("columnar", [False, True], ids=["rows", "columns"])
def test_every_row_comes_once(tables: Path, way: dict[str, Any], columnar: bool) -> None:
    reader = CsvReader(tables, dtypes={"quarter": "float32"})
    seen = []
    for batch in batches(reader, way, columnar=columnar, shuffle=True):
        assert batch["id"].dtype == torch.int64
        assert not columnar or batch["quarter"].dtype == torch.float32
        assert list(batch["text"]) == [f'row "{number}",\n' for number in batch["id"].tolist()]
        assert batch["quarter"].tolist() == [number / 4 for number in batch["id"].tolist()]
        seen += batch["id"].tolist()
    assert sorted(seen) == list(range(COUNT))
    assert seen != sorted(seen)


@pytest.mark.parametrize("way", WAYS, ids=["0 workers", "fork", "forkserver"])
def test_every_line_comes_once(tmp_path: Path, way: dict[str, Any]) -> None:
    (tmp_path / "lines.txt").write_text("\n".join(map(str, range(COUNT))))
    seen = [
        int(line)
        for batch in batches(TextReader(tmp_path), way, columnar=False, shuffle=False)
        for line in batch
    ]
    assert sorted(seen) == list(range(COUNT))


@pytest.mark.parametrize("columnar", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_bad_rows_are_set_aside(tmp_path: Path, columnar: bool, shuffle: bool) -> None:
    bad = {7: "7", 20: "twenty,x", 21: ",", 40: "40,1,2"}
    rows = [bad.get(number, f"{number},x") for number in range(COUNT)]
    (tmp_path / "a.csv").write_text("\n".join(["id,text", *rows]))
    reader = CsvReader(tmp_path, dtypes={"id": "int32"})
    fake = FakeMaster()
    dataset = {"on_bad_record": "quarantine", "shuffle": shuffle}
    with trainer(fake, reader, max_bad_records=4, dataset=dataset) as (service, data):
        loader = ElasticDataLoader(data, **({"batch_size": None} if columnar else {}))
        seen = [number for batch in loader for number in np.asarray(batch["id"]).tolist()]
        reasons = sorted(bad_record.reason for bad_record in service.progress().quarantine)
    assert sorted(seen) == [number for number in range(COUNT) if number not in bad]
    for number, reason in zip(
        bad, ("has 1 fields", "has 'twenty'", "has nothing in column", "has 3 fields"), strict=True
    ):
        assert any(f"a.csv' line {number + 2} {reason}" in found for found in reasons), reasons


def test_a_bad_row_ends_the_loop_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,text\n1,x\n2\n")
    reader = CsvReader(tmp_path, header=True)
    with (
        trainer(FakeMaster(), reader) as (_, data),
        pytest.raises(BadRecord, match=r"record 1 of '.*a.csv': '.*a.csv' line 3 has 1 fields, expected 2"),
    ):
        list(ElasticDataLoader(data, batch_size=None))


def test_a_missing_package_is_no_bad_record(tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    dataset = {"on_bad_record": "quarantine"}
    with (
        trainer(FakeMaster(), CsvReader(tables), max_bad_records=1000, dataset=dataset) as (_, data),
        pytest.raises(ReaderUnavailable, match="pip install"),
    ):
        list(ElasticDataLoader(data, batch_size=None))
