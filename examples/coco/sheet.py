"""A sheet of pictures with the captions that a model wrote, as one image.

It must not know the model: it gets pictures and words.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
from batches import Image, fit_square

PICTURE, GAP, LINE = 232, 18, 21  # pixels
FONT, SCALE = cv2.FONT_HERSHEY_SIMPLEX, 0.5
MOST_LINES = 3
PAPER, INK, GREY = (250, 250, 248), (34, 34, 38), (140, 140, 146)  # RGB, as everything here
GREEN, RED = (24, 140, 60), (200, 40, 40)
OVERSAMPLING = 2  # text is drawn twice as large and shrunk: OpenCV's fonts are thin lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One picture (H, W, 3) RGB uint8, the model's caption, a person's, and whether the model is right."""

    picture: Image
    caption: str
    reference: str = ""
    right: bool | None = None


def draw_sheet(cells: Sequence[Cell], title: str, columns: int = 5) -> Image:
    """The cells in rows under a title, as (H, W, 3) RGB uint8."""
    columns = max(1, min(columns, len(cells)))
    rows = -(-len(cells) // columns)
    lines = max((len(_lines(cell.caption)) + len(_lines(cell.reference)) for cell in cells), default=0)
    step_x, step_y = PICTURE + GAP, PICTURE + (lines + 1) * LINE + GAP
    top = 2 * GAP + LINE
    sheet = np.full((top + rows * step_y, GAP + columns * step_x, 3), PAPER, dtype=np.uint8)
    pen = Pen(sheet)
    pen.write(title, GAP, GAP + LINE // 2, INK)
    for number, cell in enumerate(cells):
        row, column = divmod(number, columns)
        _draw_cell(pen, cell, GAP + column * step_x, top + row * step_y)
    return pen.sheet()


class Pen:
    """Draws on an enlarged copy of a sheet."""

    def __init__(self, sheet: Image) -> None:
        self._size = sheet.shape[1], sheet.shape[0]
        self.canvas: Image = np.repeat(np.repeat(sheet, OVERSAMPLING, axis=0), OVERSAMPLING, axis=1)

    def write(self, text: str, x: int, y: int, colour: tuple[int, int, int]) -> None:
        """One line of text whose baseline is at `y`; what is not ASCII becomes `?`."""
        plain = text.encode("ascii", "replace").decode()
        at, scale = (x * OVERSAMPLING, y * OVERSAMPLING), SCALE * OVERSAMPLING
        cv2.putText(self.canvas, plain, at, FONT, scale, colour, OVERSAMPLING, cv2.LINE_AA)

    def paste(self, picture: Image, x: int, y: int) -> None:
        """A square picture of `PICTURE` pixels a side."""
        large = fit_square(picture, PICTURE * OVERSAMPLING, fill=235)
        top, left = y * OVERSAMPLING, x * OVERSAMPLING
        self.canvas[top : top + large.shape[0], left : left + large.shape[1]] = large

    def frame(self, x: int, y: int, colour: tuple[int, int, int]) -> None:
        """A border around a picture."""
        corner = (x + PICTURE) * OVERSAMPLING, (y + PICTURE) * OVERSAMPLING
        cv2.rectangle(self.canvas, (x * OVERSAMPLING, y * OVERSAMPLING), corner, colour, 3 * OVERSAMPLING)

    def sheet(self) -> Image:
        """The sheet in its own size."""
        return np.asarray(cv2.resize(self.canvas, self._size, interpolation=cv2.INTER_AREA), dtype=np.uint8)


def _draw_cell(pen: Pen, cell: Cell, x: int, y: int) -> None:
    pen.paste(cell.picture, x, y)
    colour = INK if cell.right is None else GREEN if cell.right else RED
    if cell.right is not None:
        pen.frame(x, y, colour)
    y += PICTURE + LINE
    for line in _lines(cell.caption):
        pen.write(line, x, y, colour)
        y += LINE
    y += LINE // 4
    for line in _lines(cell.reference):
        pen.write(line, x, y, GREY)
        y += LINE


def _lines(text: str) -> list[str]:
    return wrap(text, PICTURE)


def wrap(text: str, width: int) -> list[str]:
    """The text in at most three lines no wider than `width` pixels; what does not fit becomes `...`."""
    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and _width(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(_cut(word, width))
    if len(lines) > MOST_LINES:
        lines = [*lines[: MOST_LINES - 1], _cut(f"{lines[MOST_LINES - 1]} ...", width)]
    return lines


def _cut(line: str, width: int) -> str:
    if _width(line) <= width:
        return line
    kept = line.removesuffix("...").rstrip()
    while kept and _width(f"{kept}...") > width:
        kept = kept[:-1]
    return f"{kept}..."


def _width(text: str) -> int:
    (width, _), _ = cv2.getTextSize(text, FONT, SCALE * OVERSAMPLING, OVERSAMPLING)
    return -(-int(width) // OVERSAMPLING)


def save_png(path: Path, sheet: Image) -> None:
    """Write an RGB image as PNG, whole or not at all."""
    done, encoded = cv2.imencode(".png", cv2.cvtColor(sheet, cv2.COLOR_RGB2BGR))
    if not done:
        raise OSError(f"cannot encode {path}")
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_bytes(encoded.tobytes())
    os.replace(scratch, path)
