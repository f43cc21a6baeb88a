"""Settings of the documentation site: `make docs` builds it, offline, from the pages beside this file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import edl_torch

project = "edl_torch"
author = "the edl_torch authors"
copyright = author
version = release = edl_torch.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4  # the anchors that code hosts make, so that links lead to the same places here
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"edl_torch {version}"
html_show_sourcelink = False

default_role = "literal"  # docstrings write `code` with single backticks
maximum_signature_line_length = 90
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
napoleon_numpy_docstring = False
# Each framework is large, and no two want the same packages: their classes stand in by name.
autodoc_mock_imports = [
    "accelerate",
    "deepspeed",
    "lightning",
    "ray",
    "tensorflow",
    "torchft",
    "torchtitan",
    "transformers",
    "tyro",
]

# Pages that stay where code hosts look for them, and are copied here.
ROOT = Path(__file__).parents[1]
COPIES = {
    "changelog": "CHANGELOG.md",
    "contributing": "CONTRIBUTING.md",
}


def setup(app: Any) -> None:
    """Let Sphinx read the copies, and links lead to them."""
    app.connect("source-read", _read)


def _read(_app: Any, name: str, source: list[str]) -> None:
    text = source[0]
    if name in COPIES:
        text = (ROOT / COPIES[name]).read_text(encoding="utf-8").replace("](docs/", "](")
    for copy, original in COPIES.items():
        text = re.sub(rf"\]\((\.\./)?{re.escape(original)}", f"]({copy}.md", text)
    text = re.sub(r"\]\((\.\./)?README\.md", "](index.md", text)
    # Files to download, which have no headings.
    text = re.sub(r"\]\((?:\.\./)?(CODE_OF_CONDUCT|SECURITY)\.md\)", r"](path:../\1.md)", text)
    source[0] = re.sub(r"\]\((\.\./(?:examples|benchmarks)/[^)#]*)(#[^)]*)?\)", r"](path:\1)", text)
