"""What this repository says twice, and files of it that run elsewhere: they agree with the rest."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

import edl_torch

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def loaded(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_call_targets_that_there_are(workflow: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    jobs = yaml.safe_load(workflow.read_text())["jobs"]
    called: set[str] = set()
    for job in jobs.values():
        commands = "\n".join(step.get("run", "") for step in job["steps"])
        called |= set(re.findall(r"\bmake ([a-z-]+)", commands))
        if "make ${{ matrix.target }}" in commands:
            called |= set(job["strategy"]["matrix"]["target"])
    assert called <= targets


def test_all_pythons_that_are_promised_are_tested() -> None:
    versions = loaded(".github/workflows/ci.yml")["jobs"]["tests"]["strategy"]["matrix"]["python"]
    classifiers = project()["project"]["classifiers"]
    assert [f"Programming Language :: Python :: {version}" for version in versions] == [
        line for line in classifiers if "Python :: 3." in line
    ]
    assert project()["project"]["requires-python"] == f">={versions[0]}"


def test_the_changelog_begins_with_this_version_or_what_follows_it() -> None:
    (top, *_) = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert top in ("Unreleased", edl_torch.__version__)


def test_hooks_and_tests_lint_with_the_same_ruff() -> None:
    (hook,) = loaded(".pre-commit-config.yaml")["repos"]
    pinned = re.search(r"^ruff==(.+)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert pinned is not None
    assert hook["rev"] == f"v{pinned[1]}"


def test_images_are_tagged_with_the_version() -> None:
    tags = [
        re.findall(r"edl-torch-(?:master|coco):(\S+)|newTag: (\S+)", path.read_text())
        for path in (ROOT / "deploy").rglob("*")
        if path.is_file()
    ]
    said = {one or other for found in tags for one, other in found}
    assert said == {edl_torch.__version__}


def test_files_of_tests_have_names_of_their_own() -> None:
    """pytest imports them by their names alone."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, times in names.items() if times > 1] == []
