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


def missing_for_a_release(changelog: str, pyproject: dict[str, Any], readme: str) -> list[str]:
    """What docs/releasing.md asks for and is not there; nothing while the top section has no day."""
    section = re.search(r"^## (.+)", changelog, re.M)
    assert section is not None
    if not re.search(r"\d{4}-\d\d-\d\d", section[1]):
        return []
    page = (ROOT / "docs/releasing.md").read_text()
    asked = tomllib.loads(page.partition("```toml\n")[2].partition("```")[0])["project"]["urls"]
    named = pyproject["project"].get("urls", {})
    links = re.findall(r"\]\(([^)]+)\)", readme)
    return [
        *(label for label in asked if not re.match(r"https://(?!HOST/)", named.get(label, ""))),
        *(link for link in links if not link.startswith(("https://", "#"))),
    ]


def test_a_release_names_the_home_of_the_project() -> None:
    readme = (ROOT / "README.md").read_text()
    assert missing_for_a_release((ROOT / "CHANGELOG.md").read_text(), project(), readme) == []


def test_a_release_without_a_home_is_refused() -> None:
    released, readme = (
        "# Changelog\n\n## 0.1.0 (2027-01-31)\n",
        "[one](docs/tutorial.md) [two](https://a.example)",
    )
    urls = dict.fromkeys(
        ("Homepage", "Documentation", "Source", "Issues", "Changelog"), "https://a.example/b"
    )
    assert missing_for_a_release(released, {"project": {}}, readme) == [*urls, "docs/tutorial.md"]
    placeholder = {"project": {"urls": {**urls, "Source": "https://HOST/OWNER/edl_torch"}}}
    assert missing_for_a_release(released, placeholder, "") == ["Source"]
    assert missing_for_a_release(released, {"project": {"urls": urls}}, "[two](https://a.example)") == []
    assert missing_for_a_release("## 0.1.0 (not published yet)\n", {"project": {}}, readme) == []


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


# Every dependency has its reason in docs/decisions/0008 -----------------------------------------------------


def declared() -> set[str]:
    """Names of all packages in pyproject.toml: main, extras, build."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    lists = [project["build-system"]["requires"], project["project"]["dependencies"]]
    lists += project["project"]["optional-dependencies"].values()
    names = {
        re.split(r"[\s\[<>=!~;]", requirement)[0] for requirements in lists for requirement in requirements
    }
    return names - {"edl-torch"}


def test_every_dependency_has_its_reason() -> None:
    page = (ROOT / "docs" / "decisions" / "0008-dependencies.md").read_text(encoding="utf-8")
    words = set(re.findall(r"[\w.-]*\w", page))
    assert len(declared()) > 20
    assert declared() - words == set()
