"""What the tests with frameworks have in common, and the page that lists them."""

from __future__ import annotations

import ast
import os
import random
import re
import runpy
import subprocess
import sys
from pathlib import Path

import framework_folder
import pytest
from kill_matrix import KILLS, LATER, lives

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


def test_tests_that_do_not_run_here_have_marks_that_there_are(pytestconfig: pytest.Config) -> None:
    """pytest refuses a whole folder for one unknown mark, and `make test` collects none of these folders."""
    known = {re.split(r"[:(]", line)[0] for line in pytestconfig.getini("markers")}
    texts = {path: path.read_text(encoding="utf-8") for path in TESTS.rglob("*.py")}
    used = {name: path for path, text in texts.items() for name in re.findall(r"pytest\.mark\.(\w+)", text)}
    assert {name: path for name, path in used.items() if name not in known} == {}
    assert {"long", "timeout"} <= used.keys()


# docs/frameworks.md names tests that there are, for every adapter -------------------------------------------


ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "frameworks.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`(tests/\S+\.py)::(\w+)`", PAGE)


def functions_of(file: str) -> set[str]:
    """By its source: no environment has all frameworks."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_test_that_it_names_exists() -> None:
    assert len(NAMED) > 15
    assert [name for file, name in NAMED if name not in functions_of(file)] == []


def test_every_adapter_has_jobs() -> None:
    folders = {path.name for path in (ROOT / "tests").iterdir() if re.match("with_|on_ray", path.name)}
    assert len(folders) == 8
    assert {file.split("/")[1] for file, _ in NAMED} == folders - {"with_tensorflow"}, "it has no kills"


# The plan of ten deaths: a job has not come to its end before the tenth -------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("keeps", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("same", [False, True])
def test_a_job_is_not_over_before_its_tenth_death(ranks: int, keeps: float, same: bool) -> None:
    """Whatever part of what a life has read its checkpoints keep."""
    batches = 404
    for seed in range(100):
        done, ends = 0, 0
        planned = lives(ranks, lambda: batches - done, random.Random(seed), same=same)  # noqa: B023
        several = []
        for number, life in enumerate(planned):
            if life.ends_epoch:
                ends += 1
                assert number == KILLS - 1 or done < batches // 2, "the first epoch is over already"
                done = ends * batches // 2
            else:
                done += int((life.batches + LATER) * life.ranks * keeps)
            assert number == KILLS - 1 or done < batches
            several.append(life.ranks)
        assert sorted(several) == [ranks if same else 1] * 3 + [ranks] * 7
