"""The program of a page that shows it as a diff: with the change, and without."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"


class PageProgram:
    """`page` is its text. At most five lines of the program may be other ones."""

    def __init__(self, name: str) -> None:
        self.page = (DOCS / name).read_text("utf-8")
        (diff,) = re.findall(r"```diff\n(.*?)```", self.page, re.S)
        self._lines = diff.splitlines()

    def text(self, sign: str) -> str:
        """The program with the change, "+", or without, "-"."""
        return "\n".join(line[1:] for line in self._lines if not line or line[0] in (" ", sign))

    def run(self, text: str, names: dict[str, Any] | None = None) -> dict[str, Any]:
        """Run one of its texts as a script; return what its names are then, which `names` are too."""
        names = {} if names is None else names
        names["__name__"] = "script"
        exec(compile(text, "the program of the page", "exec"), names)
        return names

    def check_five_lines_at_most_are_another(self) -> None:
        assert 0 < sum(line.startswith("+") for line in self._lines) <= 5
        assert sum(line.startswith("-") for line in self._lines) <= 5
