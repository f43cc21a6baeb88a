"""The Python blocks of docs/tensorflow.md run as they stand, to the end of their data."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "tensorflow.md").read_text("utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.S)


@pytest.mark.parametrize("number", range(2))
def test_block_runs(number, monkeypatch):
    for name in ("EDL_MASTER_ADDR", "MASTER_ADDR", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert len(BLOCKS) == 2
    exec(compile(BLOCKS[number] + "\n    assert service.finished\n", f"block {number}", "exec"), {})
