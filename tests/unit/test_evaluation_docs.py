"""The Python of docs/evaluation-and-prediction.md runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "evaluation-and-prediction.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_block_runs(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EDL_MASTER_ADDR", "MASTER_ADDR", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    exec(compile(BLOCKS[number], f"{PAGE.name}, block {number}", "exec"), {})


def test_there_is_a_block() -> None:
    assert len(BLOCKS) == 1
