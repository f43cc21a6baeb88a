"""Pages of frameworks: the program before and after the change that they show, and its model.

It knows no framework.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from memory_model import EPOCHS, RECORDS, each


class Page:
    """One of docs; `text` is all of it."""

    def __init__(self, name: str) -> None:
        self.text = (Path(__file__).parents[1] / "docs" / name).read_text("utf-8")
        (diff,) = re.findall(r"```diff\n(.*?)```", self.text, re.S)
        self._lines = diff.splitlines()

    def program(self, sign: str) -> str:
        """The program with, or without, the change."""
        return "\n".join(line[1:] for line in self._lines if not line or line[0] in (" ", sign))

    def check_five_lines_at_most_are_another(self) -> None:
        assert 0 < sum(line.startswith("+") for line in self._lines) <= 5
        assert sum(line.startswith("-") for line in self._lines) <= 5

    def check_program_runs(self, sign: str, models: list[Any]) -> None:
        found: dict[str, Any] = {"__name__": "script"}
        exec(compile(self.program(sign), f"the program, {sign}", "exec"), found)
        assert models[0].learnt == each(EPOCHS + 1)
        if sign == "+":
            found["loader"].close()


def models_of(patch: pytest.MonkeyPatch, folder: Path, make: Callable[[], Any], **more: Any) -> list[Any]:
    """Let programs run in the folder, and import a module `model`. Returns the models that they make."""
    made: list[Any] = []

    def remembered() -> Any:
        made.append(make())
        return made[-1]

    module = ModuleType("model")
    vars(module).update(photos=torch.arange(RECORDS), Model=remembered, **more)
    patch.setitem(sys.modules, "model", module)
    patch.chdir(folder)
    leave_other_jobs(patch)
    return made


def leave_other_jobs(patch: pytest.MonkeyPatch) -> None:
    """Take out of the environment what belongs to a job around this one."""
    for name in ("EDL_MASTER_ADDR", "MASTER_ADDR", "WORLD_SIZE"):
        patch.delenv(name, raising=False)
