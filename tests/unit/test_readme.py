"""The README's Python blocks run as they stand, in order, in a folder that has what they name."""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest

from edl_torch.testing.images import write_image_folder

README = Path(__file__).parents[2] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.S)


def test_the_readme_has_its_examples() -> None:
    assert len(BLOCKS) >= 5


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_readme_block_runs(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_image_folder(tmp_path / "photos", ("cat", "dog"), per_class=7)
    monkeypatch.chdir(tmp_path)
    for name in ("EDL_MASTER_ADDR", "MASTER_ADDR", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Lazy modules are a new feature")
        module = ModuleType(f"readme_block_{number}")  # so that what a block defines can be pickled
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(compile(BLOCKS[number], f"README.md, block {number}", "exec"), module.__dict__)
