"""The documentation site, without Sphinx: navigation, reference, copies. `make docs` builds it, strictly."""

from __future__ import annotations

import ast
import importlib
import re
import runpy
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

import edl_torch
from edl_torch import readers, testing

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"
SHARED = {"adapter", "engines", "frameworks"}  # by the adapters, not with their users
INTEGRATIONS = sorted(
    path for path in (ROOT / "edl_torch" / "integrations").glob("[!_]*.py") if path.stem not in SHARED
)


def listed(page: Path) -> list[Path]:
    """The pages in the tables of contents of a page."""
    found = []
    for tree in re.findall(r"```\{toctree\}\n(.*?)```", page.read_text(encoding="utf-8"), re.S):
        for entry in tree.split("\n"):
            if entry and not entry.startswith(":"):
                found += sorted(page.parent.glob(entry + ".md" if "*" not in entry else entry))
                assert found, f"{page}: {entry} is not there"
    return found


def entries(page: str) -> list[str]:
    """What a page of the reference has an entry for."""
    text = (REFERENCE / page).read_text(encoding="utf-8")
    return re.findall(r"auto(?:class|function|module):: edl_torch\.([\w.]+)", text)


def test_every_page_is_in_the_navigation_once() -> None:
    pages = set(DOCS.rglob("*.md"))
    in_trees = Counter(entry for page in pages for entry in listed(page))
    assert pages - set(in_trees) == {DOCS / "index.md"}, "add these to a toctree of docs/index.md"
    assert {page for page, times in in_trees.items() if times > 1} == set()


def test_every_public_name_has_a_reference_entry() -> None:
    own = [name for name in entries("edl_torch.md") if "." not in name]
    assert Counter(own) == Counter(edl_torch.__all__)
    inherited = {"AbstractDataReader"}  # which the package has too
    assert Counter(entries("readers.md")) == Counter(
        f"readers.{name}" for name in {*readers.__all__} - inherited
    )
    assert Counter(entries("testing.md")) == Counter(f"testing.{name}" for name in testing.__all__)
    assert entries("errors.md") == ["errors"]


@pytest.mark.parametrize("module", INTEGRATIONS, ids=lambda path: path.stem)
def test_every_public_name_of_an_integration_has_a_reference_entry(module: Path) -> None:
    """By its source: no environment has all frameworks."""
    tree = ast.parse(module.read_text(encoding="utf-8"))
    kinds = (ast.ClassDef, ast.FunctionDef)
    public = {node.name for node in tree.body if isinstance(node, kinds) and node.name[0] != "_"}
    prefix = f"integrations.{module.stem}."
    assert {name for name in entries("integrations.md") if name.startswith(prefix)} == {
        prefix + name for name in public
    }


def test_the_reference_has_no_integration_that_is_gone() -> None:
    named = {name.split(".")[1] for name in entries("integrations.md")}
    assert named == {module.stem for module in INTEGRATIONS}


def test_every_reference_entry_exists_and_says_what_it_is() -> None:
    for page in ("edl_torch.md", "readers.md", "testing.md", "errors.md"):
        for name in entries(page):
            home, _, attribute = f"edl_torch.{name}".rpartition(".")
            assert getattr(importlib.import_module(home), attribute).__doc__, name


def test_the_page_of_the_command_line_is_that_of_the_parser() -> None:
    render = runpy.run_path(str(DOCS / "command_line.py"))["render"]
    page = (REFERENCE / "command-line.md").read_text(encoding="utf-8")
    assert page == render(), "python docs/command_line.py"


def test_every_variable_that_is_read_has_its_row() -> None:
    code = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "edl_torch").rglob("*.py"))
    page = (REFERENCE / "environment.md").read_text(encoding="utf-8")
    names = set(re.findall(r"\bEDL_[A-Z_]*[A-Z]\b", code))
    assert len(names) > 10
    assert set(re.findall(r"`(EDL_\w+)`", page)) == names


def test_copies_of_the_site_are_files_of_the_root() -> None:
    copies = runpy.run_path(str(DOCS / "conf.py"))["COPIES"]
    for copy, original in copies.items():
        assert (ROOT / original).is_file()
        assert f"](../{original})" in (DOCS / f"{copy}.md").read_text(encoding="utf-8")


def test_every_claim_of_the_comparison_has_a_source() -> None:
    text = (DOCS / "comparison.md").read_text(encoding="utf-8")
    claims, _, sources = text.partition("## Sources")
    numbered = re.findall(r"^(\d+)\. (.*?)(?=^\d+\. |\Z)", sources, re.S | re.M)
    assert set(re.findall(r"\[(\d+)\]", claims)) == {number for number, _ in numbered}
    assert [number for number, source in numbered if "](https://" not in source] == []
    assert re.search(r"^As of \d+ \w+ 20\d\d\.", text, re.M)


@pytest.mark.parametrize("picture", sorted(DOCS.glob("*.svg")), ids=lambda path: path.name)
def test_drawings_are_drawn_for_light_and_dark_and_say_what_they_show(picture: Path) -> None:
    root = ElementTree.parse(picture).getroot()
    named = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert {"title", "desc", "style"} <= named
    assert "prefers-color-scheme: dark" in picture.read_text(encoding="utf-8")
