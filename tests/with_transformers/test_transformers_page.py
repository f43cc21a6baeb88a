"""The example of docs/transformers.md: its diff is what it says, short, and the program trains."""

from __future__ import annotations

import difflib
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLAIN, ELASTIC = (f"examples/transformers/{name}.py" for name in ("plain", "elastic"))


def difference() -> list[str]:
    before, after = ((ROOT / name).read_text("utf-8").splitlines() for name in (PLAIN, ELASTIC))
    return list(difflib.unified_diff(before, after, PLAIN, ELASTIC, n=1, lineterm=""))


def test_the_page_shows_the_difference() -> None:
    page = (ROOT / "docs/transformers.md").read_text("utf-8")
    assert re.findall(r"```diff\n(.*?)\n```", page, re.S) == ["\n".join(difference())]


def test_at_most_five_lines_differ() -> None:
    added = [line for line in difference()[2:] if line.startswith("+") and line != "+"]
    removed = [line for line in difference()[2:] if line.startswith("-")]
    assert len(added) <= 5
    assert len(removed) <= 1


def test_both_programs_train_and_go_on(tmp_path: Path) -> None:
    for name in (PLAIN, ELASTIC):
        output = tmp_path / Path(name).stem
        for _ in range(2):
            subprocess.run([sys.executable, ROOT / name, output], check=True, timeout=100, cwd=tmp_path)
        assert (output / "checkpoint-252" / "trainer_state.json").exists()
