"""The Python of docs/maxcompute.md runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[4] / "docs" / "maxcompute.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)


def test_the_page_has_its_examples():
    assert len(BLOCKS) == 3


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_block_runs(server, number, monkeypatch):
    for name in ("EDL_MASTER_ADDR", "MASTER_ADDR", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    rows = {"label": [0, None, 1], "price": [0.5, None, 2.5], "user": ["a", "b", None]}
    server.add_table(
        "clicks",
        {"label": "bigint", "price": "double", "user": "string"},
        partition_keys={"ds": "string"},
        partitions={
            "ds=20240101": rows if number == 0 else {**rows, "label": [0, 0, 1]},
            "ds=20240201": rows,
        },
    )
    if number == 1:
        server.tables["clicks"].parts.pop("ds=20240201")
    exec(compile(BLOCKS[number], f"{PAGE.name}, block {number}", "exec"), {})
