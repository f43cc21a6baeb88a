"""Every dependency has its reason in docs/decisions/0008."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


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
