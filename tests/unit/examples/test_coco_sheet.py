"""The sheet of pictures and captions."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
from sheet import GREEN, INK, MOST_LINES, PAPER, PICTURE, RED, Cell, _width, draw_sheet, save_png, wrap

SENTENCE = "a small turquoise triangle to the left of a large orange star on a light background"


def picture(height: int = 40, width: int = 40) -> np.ndarray:
    return np.full((height, width, 3), 90, dtype=np.uint8)


def has(sheet: np.ndarray, colour: tuple[int, int, int]) -> bool:
    return bool((np.abs(sheet.astype(int) - colour).max(axis=-1) < 12).any())


def test_wrapped_lines_keep_the_words_and_fit() -> None:
    lines = wrap(SENTENCE, 240)
    assert 1 < len(lines) <= MOST_LINES
    assert " ".join(lines) == SENTENCE
    assert all(_width(line) <= 240 for line in lines)


def test_what_does_not_fit_is_cut_visibly() -> None:
    lines = wrap(" ".join([SENTENCE] * 3), 240)
    assert len(lines) == MOST_LINES
    assert lines[-1].endswith("...")
    assert all(_width(line) <= 240 for line in [*lines, *wrap("x" * 200, 240)])


def test_empty_caption_has_no_line() -> None:
    assert wrap("", 240) == []


def test_right_is_green_and_wrong_is_red_and_unknown_is_neither() -> None:
    right, wrong, unknown = (
        draw_sheet([Cell(picture=picture(), caption=SENTENCE, right=verdict)], "title")
        for verdict in (True, False, None)
    )
    assert has(right, GREEN)
    assert not has(right, RED)
    assert has(wrong, RED)
    assert not has(wrong, GREEN)
    assert has(unknown, INK)
    assert not has(unknown, GREEN)
    assert not has(unknown, RED)


@pytest.mark.parametrize(
    ("count", "columns", "rows"), [(1, 1, 1), (4, 4, 1), (5, 5, 1), (6, 5, 2), (20, 5, 4)]
)
def test_cells_stand_in_rows_of_five(count: int, columns: int, rows: int) -> None:
    sheet = draw_sheet([Cell(picture=picture(), caption="a star")] * count, "title")
    assert sheet.dtype == np.uint8
    assert columns * PICTURE < sheet.shape[1] < (columns + 1) * PICTURE
    assert rows * PICTURE < sheet.shape[0] < (rows + 1) * PICTURE + rows * 60


def test_pictures_of_any_shape_and_captions_of_any_script_are_drawn() -> None:
    cells = [
        Cell(picture=picture(*size), caption="un café ☕ très noir")
        for size in ((10, 400), (400, 10), (1, 1))
    ]
    sheet = draw_sheet(cells, "title")
    assert has(sheet, (90, 90, 90))


def test_no_cells_is_a_sheet_with_its_title() -> None:
    sheet = draw_sheet([], "nothing here")
    assert has(sheet, INK)
    assert has(sheet, PAPER)


def test_png_holds_the_sheet_and_nothing_else_is_left(tmp_path: Path) -> None:
    sheet = draw_sheet([Cell(picture=picture(), caption="a star", right=True)], "title")
    save_png(tmp_path / "captions.png", sheet)
    read = cv2.imread(str(tmp_path / "captions.png"))
    assert read is not None
    assert (read[..., ::-1] == sheet).all()
    assert [path.name for path in tmp_path.iterdir()] == ["captions.png"]
