"""docs/frameworks.md names tests that there are, for every adapter."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "frameworks.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`(tests/\S+\.py)::(\w+)`", PAGE)


def functions_of(file: str) -> set[str]:
    """By its source: no environment has all frameworks."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_test_that_it_names_exists() -> None:
    assert len(NAMED) > 20
    assert [name for file, name in NAMED if name not in functions_of(file)] == []


def test_every_adapter_has_jobs_and_a_case_of_plain_use() -> None:
    proven, plain = PAGE.split("## Without the adapter")
    folders = {path.name for path in (ROOT / "tests").iterdir() if re.match("with_|on_ray", path.name)}
    assert len(folders) == 8
    for folder in folders:
        assert f"tests/{folder}/" in plain, folder
        assert f"tests/{folder}/" in proven or folder == "with_tensorflow"
