"""What is drawn of records, and that it is drawn."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checked_readers import Numbers
from image_files import render, write_image_folder

from edl_torch.checking.check import found
from edl_torch.checking.sheet import SheetCell, View, cells, draw, save, view
from edl_torch.errors import OutputError
from edl_torch.readers import ImageFolderReader, read_image
from edl_torch.shard import Source, TaskType

IMAGE = render(3)


class Classes:
    classes = ("ant", "bee")


BOXES = {"boxes": np.array([[1, 2, 9, 9.5], [0, 0, 4, 4]], np.float32), "labels": np.array([1, 7])}


@pytest.mark.parametrize(
    ("record", "lines"),
    [
        (IMAGE, []),
        ((IMAGE, 1), ["1 bee"]),
        ((IMAGE, 5), ["5"]),
        ((IMAGE, "a caption"), ["a caption"]),
        ((IMAGE, ["one", "two"]), ["one", "two"]),
        ((IMAGE, BOXES), ["2 box(es): 1 x 1 bee, 1 x 7"]),
        ((IMAGE, {"image_id": 3}), ["image_id: 3"]),
        ({"a": 1, "b": None}, ["a: 1", "b: None"]),
        ("line", ["line"]),
        ("", [""]),
        (b"text", ["text"]),
        (b"\x00\x01", ["2 bytes: 00 01"]),
        ((1, "x"), ["1", "x"]),
        (7, ["7"]),
        (np.arange(3), ["int64 [3] [0 1 2]"]),
    ],
)
def test_what_is_shown_of_a_record(record: Any, lines: list[str]) -> None:
    shown = view(record, Classes)
    assert list(shown.lines) == lines
    assert (shown.image is not None) == (
        record is IMAGE or (isinstance(record, tuple) and record[0] is IMAGE)
    )


def test_boxes_have_their_class() -> None:
    assert view((IMAGE, BOXES), Classes).boxes == [(1, 2, 9, 9.5, "1 bee"), (0, 0, 4, 4, "7")]


def test_a_sheet_shows_the_image_itself_and_text_below() -> None:
    plain, labelled = (
        draw([SheetCell(heading="0", view=View(image=IMAGE, lines=text))]) for text in ([], ["label"])
    )
    top, left = 20, 6
    height, width = 244 * 24 // 32, 244
    shown = plain[top : top + height, left : left + width]
    assert (shown[0, 0] == IMAGE[0, 0]).all()
    assert (shown[-1, -1] == IMAGE[-1, -1]).all()
    assert np.allclose(shown.mean(axis=(0, 1)), IMAGE.mean(axis=(0, 1)), atol=2)
    assert (plain[: top + height] == labelled[: top + height]).all()
    assert (plain != labelled).any()


@pytest.mark.parametrize(
    "change",
    [
        lambda: SheetCell(heading="0", error="broken"),
        lambda: SheetCell(heading="0", view=View(lines=["text"])),
        lambda: SheetCell(heading="0", view=View(lines=["ça – “été” …", "x" * 5000, ""])),
        lambda: SheetCell(heading="0", view=View(image=IMAGE[:1, :1], lines=[])),
        lambda: SheetCell(heading="0", view=View(image=IMAGE, lines=[], boxes=[(-9e9, 0, 9e9, 5, "é")])),
    ],
)
def test_each_kind_of_cell_leaves_ink(change: Callable[[], SheetCell]) -> None:
    empty = draw([SheetCell(heading="0", view=View(lines=[]))])
    assert (draw([change()]) != empty).any()


def test_a_bad_record_is_drawn_as_its_reason_and_not_read_again() -> None:
    class Once(Numbers):
        def fail(self, number: int) -> None:
            raise AssertionError("it was read")

    reader = Once(10, bad=tuple(range(10)))
    bad = [found("unreadable", "n", number, "it kills") for number in range(10)]
    made = cells(reader, [Source(name="n", count=10)], TaskType.TRAINING, 3, bad)
    assert [(cell.heading, cell.error) for cell in made] == [(f"{n}  n", "it kills") for n in (1, 5, 8)]


def test_a_sheet_of_a_folder_is_a_png_on_disk(tmp_path: Path) -> None:
    reader = ImageFolderReader(write_image_folder(tmp_path / "f"))
    (tmp_path / "f" / "ant" / "0001.png").write_bytes(b"no image")
    sources = [Source(name=reader.name, count=6)]
    made = cells(reader, sources, TaskType.TRAINING, 12, [])
    assert [bool(cell.error) for cell in made] == [False, True, False, False, False, False]
    save(draw(made), tmp_path / "sheet.png")
    assert (read_image(str(tmp_path / "sheet.png")) == draw(made)).all()
    assert sorted(os.listdir(tmp_path)) == ["f", "sheet.png"]


def test_a_sheet_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot be written"):
        save(draw([SheetCell(heading="0")]), tmp_path / "no" / "sheet.png")
