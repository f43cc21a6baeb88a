"""The Python of docs/images.md runs as it stands, and its commands open what they name."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from image_files import (
    encode,
    render,
    write_coco,
    write_image_folder,
    write_manifest,
    write_voc,
)

from edl_torch import ElasticDataLoader, readers
from edl_torch.cli.main import main

PAGE = Path(__file__).parents[3] / "docs" / "images.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.S)
READERS = re.findall(r"^\| [^|]+ \| `(\w+Reader\(.*?\))` \|", TEXT, re.M)
COMMANDS = re.findall(r"^\$ edl-torch (check .*?)$", TEXT, re.M)


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


def test_each_reader_has_its_row_and_its_command():
    assert len(READERS) == len(COMMANDS) == 5
    assert len(BLOCKS) == 1


def test_the_program_runs():
    make_sizes_differ()
    exec(compile(BLOCKS[0], "images.md", "exec"), {})


@pytest.mark.parametrize("row", READERS)
def test_the_reader_of_a_row_gives_what_the_row_says(row):
    if "masks=True" not in row:  # those have the size of their image
        make_sizes_differ()
    reader = eval(row, {name: getattr(readers, name) for name in readers.__all__})
    with ElasticDataLoader(reader, batch_size=4, collate_fn=list) as loader:
        records = [record for batch in loader for record in batch]
    assert len(records) == reader.count > 0
    for image, target in records:
        assert image.dtype == np.uint8
        if isinstance(reader, readers.CocoDetectionReader):
            assert len(target["boxes"]) == len(target["labels"]) == len(target["masks"])
            assert {*target["labels"].tolist()} <= reader.categories.keys()
        elif isinstance(reader, readers.VocReader):
            assert [reader.classes[label] for label in target["labels"]] == target["names"]
        else:
            assert isinstance(target, str if isinstance(reader, readers.CocoCaptionsReader) else int)


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
