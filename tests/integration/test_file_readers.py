"""Every reader of files keeps the contract and trains: each record once an epoch, in workers of any start.

What is special to one of them is in its own tests; here is what all promise alike.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from every_reader import made
from image_files import encode, render
from tar_files import write_tar

from edl_torch import AbstractDataReader, DataShardService, ElasticDataLoader, ShardedDataset
from edl_torch.readers import open_reader
from edl_torch.readers.base import reader_sources
from edl_torch.testing import check_reader

pytest.importorskip("pyarrow", reason="Parquet and columns need pyarrow")
pytest.importorskip("cramjam", reason="RecordIO needs cramjam")

KINDS = ("recordio", "csv", "text", "parquet", "tar", "python_custom")
WAYS: dict[str, dict[str, Any]] = {
    "0 workers": {},
    "2 forked": {"num_workers": 2, "multiprocessing_context": "fork", "timeout": 120},
    "2 started": {"num_workers": 2, "multiprocessing_context": "forkserver", "timeout": 120},
}
# Spawned workers read these in test_loader_recordio, test_loader_tables and test_parquet_loader.
ELSEWHERE = [(kind, "2 started") for kind in ("recordio", "csv", "text", "parquet")]
CASES = [
    pytest.param(kind, way, marks=[pytest.mark.long] * ((kind, way) in ELSEWHERE))
    for kind in KINDS
    for way in WAYS
]
PAGES = Path(__file__).parents[2] / "docs"


def as_they_are(batch: list[Any]) -> list[Any]:
    return batch


def one_by_one(reader: AbstractDataReader) -> Counter[str]:
    """All records, asked for without a loader."""
    return Counter(
        repr(reader.read_record(source.name, index))
        for source in reader_sources(reader)
        for index in range(source.start, source.start + source.count)
    )


@pytest.mark.parametrize(("kind", "way"), CASES)
def test_each_record_is_trained_on_once_an_epoch(kind: str, way: str, tmp_path: Path) -> None:
    with made(kind, tmp_path) as data:
        check_reader(lambda: open_reader(data.data))
        reader = open_reader(data.data)
    expected = one_by_one(reader)
    assert (type(reader).__name__, sum(expected.values())) == (data.reader, data.counts[0])
    assert set(expected.values()) == {1}, "records that can be told apart"
    with DataShardService(4, reader=reader, num_epochs=2, shuffle_shards=True, seed=5) as service:
        dataset = ShardedDataset(service, reader, shuffle=True)
        loader = ElasticDataLoader(dataset, collate_fn=as_they_are, **WAYS[way], **_persistent(way))
        epochs = []
        while not service.finished:
            epochs.append(Counter(repr(record) for batch in loader for record in batch))
    assert epochs == [expected] * 2


def _persistent(way: str) -> dict[str, Any]:
    """What is not forked from this process takes long to begin."""
    return {"persistent_workers": True} if "started" in way else {}


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the pages name."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "tables").mkdir()
    rows = "".join(f"{number},{number / 2},x\n" for number in range(3000))
    (tmp_path / "tables" / "a.csv").write_text("age,income,name\n" + rows)
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").write_text("first\nsecond\n")
    (tmp_path / "bucket").mkdir()
    table = pa.table({"features": [0.5] * 3000, "label": list(range(3000))})
    pq.write_table(table, tmp_path / "bucket" / "a.parquet", row_group_size=500)
    monkeypatch.chdir(tmp_path)
    for name in ("EDL_MASTER_ADDR", "MASTER_ADDR", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def run_page(page: str, **instead: str) -> dict[str, Any]:
    """Run the Python of a page; `instead` are words of it that stand for what is here. Gives its names."""
    blocks = re.findall(r"```python\n(.*?)```", (PAGES / page).read_text("utf-8"), re.S)
    assert blocks
    names: dict[str, Any] = {"__name__": "page"}
    for number, block in enumerate(blocks):
        for word, other in instead.items():
            assert word in block
            block = block.replace(word, other)
        exec(compile(block, f"{page}, block {number}", "exec"), names)
    return names


def test_the_examples_for_recordio_run(desk: Path) -> None:
    assert run_page("recordio.md")["reader"].count == 3


def test_the_examples_for_tables_and_text_run(desk: Path) -> None:
    names = run_page("text-and-csv.md")
    assert names["table"].dtypes == {"age": "int64", "income": "float32"}
    assert names["batch"]["income"].dtype is names["torch"].float32
    assert names["seen"] == ["first", "second"]


def test_the_example_for_parquet_runs(desk: Path) -> None:
    names = run_page("parquet.md", **{"s3://bucket/table": str(desk / "bucket")})
    assert names["batch"]["label"].dtype is names["torch"].int64


def test_the_example_for_tars_runs(desk: Path) -> None:
    pictures = {f"{n:03}.jpg": encode(render(n), ".jpg") for n in range(70)}
    classes = {f"{n:03}.cls": b"%d" % (n % 3) for n in range(70)}
    (desk / "shards").mkdir()
    write_tar(desk / "shards" / "train-0.tar", sorted({**pictures, **classes}.items()))
    assert run_page("tar.md")["seen"] == 3 * 70


def test_the_example_for_python_files_runs(desk: Path) -> None:
    assert run_page("elasticdl.md")["seen"] == list(range(100))
