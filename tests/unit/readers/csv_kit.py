"""One table with all that CSV allows, and every row of a reader: what the tests of CSV share."""

from __future__ import annotations

from pathlib import Path

from edl_torch.readers import CsvReader
from edl_torch.shard import Shard, Task

TABLE = (
    'id,word,size,ok\r\n1,one,0.5,true\r\n\r\n2,"two, and ""more""\nof it",,false\n'
    "3,,1e3,True\r4,  four ,-inf,0"
)
ROWS = [
    {"id": 1, "word": "one", "size": 0.5, "ok": True},
    {"id": 2, "word": 'two, and "more"\nof it', "size": float("nan"), "ok": False},
    {"id": 3, "word": "", "size": 1000.0, "ok": True},
    {"id": 4, "word": "  four ", "size": float("-inf"), "ok": False},
]


def write(folder: Path, text: str | bytes = TABLE, name: str = "table.csv") -> str:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def task(name: str, start: int, end: int) -> Task:
    return Task(shard=Shard(name=name, start=start, end=end))


def records(reader: CsvReader) -> list:
    counts = reader.create_shards()
    return [row for name, count in counts.items() for row in reader.read_records(task(name, 0, count))]


def same(left: object, right: object) -> bool:
    return repr(left) == repr(right)
