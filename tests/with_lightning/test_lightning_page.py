"""docs/lightning.md: its program runs before and after the change, and its table has tests."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from lightning_model import Remembers
from memory_model import EPOCHS, RECORDS, each

PAGE = (Path(__file__).parents[2] / "docs" / "lightning.md").read_text("utf-8")
(DIFF,) = re.findall(r"```diff\n(.*?)```", PAGE, re.S)
LINES = DIFF.splitlines()


def program(sign: str) -> str:
    """The program with, or without, the change."""
    return "\n".join(line[1:] for line in LINES if not line or line[0] in (" ", sign))


def test_five_lines_at_most_are_another() -> None:
    assert 0 < sum(line.startswith("+") for line in LINES) <= 5
    assert sum(line.startswith("-") for line in LINES) <= 5


@pytest.mark.parametrize("sign", ["-", "+"])
def test_the_program_runs(sign: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EDL_MASTER_ADDR", "MASTER_ADDR", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    models: list[Remembers] = []
    module = ModuleType("model")
    module.photos = torch.arange(RECORDS)  # type: ignore[attr-defined]

    def make() -> Remembers:
        models.append(Remembers())
        return models[-1]

    module.Model = make  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "model", module)
    monkeypatch.chdir(tmp_path)
    found: dict[str, object] = {"__name__": "script"}
    exec(compile(program(sign), f"the program, {sign}", "exec"), found)
    assert models[0].learnt == each(EPOCHS + 1)
    if sign == "+":
        found["loader"].close()  # type: ignore[attr-defined]


def test_what_the_page_says_is_refused_has_a_test() -> None:
    rows = re.findall(r"^\| (.*?) \| `(ForeignLoop|InvalidArgument|CheckpointError)`", PAGE, re.M)
    tests = Path(__file__).with_name("test_lightning.py").read_text("utf-8")
    refusals = tests[tests.index("# Refused") :].count("\ndef test_")
    assert len(rows) == refusals
