"""What the tests of a framework import, the processes that they start find, whatever is installed here."""

from __future__ import annotations

import ast
import os
import runpy
import subprocess
import sys
from pathlib import Path

import framework_folder
import pytest

TESTS = Path(__file__).parents[1]
FOLDERS = sorted(path.parent for path in TESTS.glob("*_*/conftest.py") if "hooks_of" in path.read_text())
OURS = {path.stem for path in TESTS.rglob("*.py")} - {"conftest", "__init__"}
LOOK = (
    "import sys; from importlib.util import find_spec; print(*[n for n in sys.argv[1:] if not find_spec(n)])"
)


def named_by(file: Path) -> set[str]:
    """Our modules that a file imports, or names in a string, as the programs of jobs are."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        match node:
            case ast.Import(names=names):
                found |= {alias.name.partition(".")[0] for alias in names}
            case ast.ImportFrom(module=str(module)):
                found.add(module.partition(".")[0])
            case ast.Constant(value=str(text)):
                found.add(text)
    return found & OURS


def needed_in(folder: Path) -> set[str]:
    """Our modules that those of a folder need, and those that these need."""
    needed, left = set[str](), [*folder.glob("*.py")]
    while left:
        for name in named_by(left.pop()) - needed:
            needed.add(name)
            left += [file for place in (folder, TESTS) if (file := place / f"{name}.py").exists()]
    return needed


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_workers_find_every_module_that_the_tests_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if k != "PYTHONPATH"})
    monkeypatch.setattr(framework_folder, "find_spec", lambda package: True)  # as where it is installed
    runpy.run_path(str(folder / "conftest.py"))
    names = sorted(needed_in(folder))
    found = subprocess.run(
        [sys.executable, "-S", "-c", LOOK, "edl_torch", *names],
        env=dict(os.environ),
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.split() == []
    assert len(names) > 1


def test_every_framework_has_its_folder() -> None:
    """`make test-X` names it."""
    makefile = (TESTS.parent / "Makefile").read_text(encoding="utf-8")
    assert [folder for folder in FOLDERS if f"pytest -q tests/{folder.name} " not in makefile] == []
    assert len(FOLDERS) == 8
