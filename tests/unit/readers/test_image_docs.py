"""The Python of docs/images.md runs as it stands, and its commands open what they name."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from image_files import (
    encode,
    render,
    write_coco,
    write_image_folder,
    write_manifest,
    write_voc,
)

from edl_torch.cli.main import main

PAGE = Path(__file__).parents[3] / "docs" / "images.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.S)
COMMANDS = re.findall(r"^`edl-torch (check .*?)`", TEXT, re.M)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder with all that the page names."""
    write_image_folder(tmp_path / "photos", ("cat", "dog"), per_class=5)
    write_manifest(tmp_path / "labels")
    write_coco(tmp_path / "coco")
    write_voc(tmp_path / "voc")
    (tmp_path / "coco" / "annotations" / "notes.txt").write_text("")
    monkeypatch.chdir(tmp_path)
    for name in ("EDL_MASTER_ADDR", "MASTER_ADDR", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_each_reader_has_its_example_and_its_command():
    readers = re.findall(r"import (\w+Reader)\n", TEXT)
    assert len(readers) == len(set(readers)) == len(BLOCKS) == len(COMMANDS) == 5


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_block_runs(number, monkeypatch):
    module = ModuleType(f"images_block_{number}")  # so that what a block defines can be pickled
    monkeypatch.setitem(sys.modules, module.__name__, module)
    if "masks=True" not in BLOCKS[number]:  # those have the size of their image
        make_sizes_differ()
    exec(compile(BLOCKS[number], f"images.md, block {number}", "exec"), module.__dict__)


def make_sizes_differ():
    """Another image in the place of one, in each dataset of the page."""
    for pattern in ("photos/cat/*", "labels/images/*", "coco/images/*", "voc/**/*.jpg"):
        image = sorted(Path().glob(pattern))[1]
        image.write_bytes(encode(render(5, height=50, width=40), image.suffix))


@pytest.mark.parametrize("command", COMMANDS)
def test_command_finds_clean_data_through_the_reader_of_the_page(command, capsys):
    assert main([*command.split(), "--workers", "0"]) == 0
    shown = capsys.readouterr().out
    assert shown.partition(":")[0] in TEXT
