"""Every reader of files keeps the contract and trains: each record once an epoch, in workers of any start.

What is special to one of them is in its own tests; here is what all promise alike.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from every_reader import made
from image_files import encode, render
from tar_files import write_tar

from edl_torch import (
    AbstractDataReader,
    DataShardService,
    ElasticDataLoader,
    Shard,
    ShardedDataset,
    Task,
    TaskType,
)
from edl_torch.readers import CsvReader, ParquetReader, open_reader
from edl_torch.readers.base import reader_sources
from edl_torch.testing import check_reader
from edl_torch.testing.check_reader import records_equal

pytest.importorskip("pyarrow", reason="Parquet and columns need pyarrow")
pytest.importorskip("cramjam", reason="RecordIO needs cramjam")

KINDS = ("recordio", "csv", "text", "parquet", "tar", "python_custom")
WAYS: dict[str, dict[str, Any]] = {
    "0 workers": {},
    "2 forked": {"num_workers": 2, "multiprocessing_context": "fork", "timeout": 120},
    "2 started": {"num_workers": 2, "multiprocessing_context": "forkserver", "timeout": 120},
}
CASES = [
    pytest.param(kind, way, marks=[pytest.mark.long] * (kind == "parquet" and "started" in way))
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
    assert run_page("text-and-csv.md")["seen"] == ["first", "second"]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_columns_come_as_tensors(desk: Path, kind: str) -> None:
    if kind == "csv":
        reader: AbstractDataReader = CsvReader(
            "tables/*.csv", columns=["age", "income"], dtypes={"income": "float32"}
        )
        number, fraction = "age", "income"
    else:
        reader = ParquetReader("bucket", columns=["label", "features"])
        number, fraction = "label", "features"
    seen: list[int] = []
    with DataShardService(batch_size=1024, reader=reader, shuffle_shards=True) as service:
        for batch in ElasticDataLoader(ShardedDataset(service, reader, shuffle=True), batch_size=None):
            assert batch[number].dtype is torch.int64
            assert batch[fraction].dtype is (torch.float32 if kind == "csv" else torch.float64)
            seen += batch[number].tolist()
    assert sorted(seen) == list(range(3000))


def test_the_example_for_tars_runs(desk: Path) -> None:
    pictures = {f"{n:03}.jpg": encode(render(n), ".jpg") for n in range(70)}
    classes = {f"{n:03}.cls": b"%d" % (n % 3) for n in range(70)}
    (desk / "shards").mkdir()
    write_tar(desk / "shards" / "train-0.tar", sorted({**pictures, **classes}.items()))
    assert run_page("tar.md")["seen"] == 3 * 70


# Images and tables through the elastic loader ---------------------------------------------------------------


IMAGES = (
    "image_folder",
    "flat_folder",
    "image_manifest",
    "coco_captions",
    "coco_detection",
    "voc",
    "odps",
)


class Together(AbstractDataReader):
    """The sources of several readers: spawned workers are dear, so all readers travel to the same ones."""

    def __init__(self, readers: dict[str, AbstractDataReader]) -> None:
        super().__init__()
        self.readers = readers

    def create_shards(self, mode: Any = TaskType.TRAINING) -> dict[str, int]:
        return {name: reader_sources(reader)[0].count for name, reader in self.readers.items()}

    def read_records(self, task: Task) -> Iterator[Any]:
        return iter(self.readers[task.shard_name].read_records(task))

    def read_record(self, name: str, index: int) -> Any:
        return self.readers[name].read_record(name, index)


@pytest.fixture
def addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Data of each kind: where it is, and which reader is to be chosen for it."""
    for package in ("odps", "pyarrow"):
        pytest.importorskip(package)
    with ExitStack() as stack:
        found = {}
        for kind in IMAGES:
            data = stack.enter_context(made(kind, tmp_path / kind))
            for name, value in data.environment.items():
                monkeypatch.setenv(name, value)
            found[data.data] = data.reader
        yield found


@pytest.fixture
def opened(addresses: dict[str, str]) -> dict[str, AbstractDataReader]:
    """A reader of each kind, by the name of its source."""
    readers = [open_reader(address) for address in addresses]
    assert [type(reader).__name__ for reader in readers] == list(addresses.values())
    return {reader_sources(reader)[0].name: reader for reader in readers}


def direct(reader: AbstractDataReader, name: str, index: int) -> Any:
    (record,) = reader.read_records(Task(shard=Shard(name=name, start=index, end=index + 1)))
    return record


def test_each_keeps_the_contract(addresses: dict[str, str]) -> None:
    assert len(addresses) == len(IMAGES)
    for address in addresses:
        check_reader(partial(open_reader, address))


@pytest.mark.parametrize(
    ("num_workers", "method"), [(0, None), (2, "fork"), pytest.param(2, "spawn", marks=pytest.mark.long)]
)
def test_each_record_is_trained_on_once_and_is_the_one_that_is_named(
    opened: dict[str, AbstractDataReader], num_workers: int, method: str | None
) -> None:
    reader = Together(opened)
    options = {"num_workers": num_workers, "multiprocessing_context": method} if num_workers else {}
    seen: list[tuple[str, int]] = []
    with DataShardService(3, reader=reader, records_per_shard=4, shuffle_shards=True, seed=3) as service:
        dataset = ShardedDataset(service, reader, shuffle=True)
        loader = ElasticDataLoader(dataset, collate_fn=list, **options)
        for batch in loader:
            assert len(batch) == len(loader.records)
            for record, (name, index) in zip(batch, loader.records, strict=True):
                assert records_equal(record, direct(opened[name], name, index)), (name, index)
                seen.append((name, index))
        assert service.finished
    counts = reader.create_shards()
    assert sorted(seen) == sorted((name, index) for name in counts for index in range(counts[name]))
