"""Some records as one picture: a grid of cells with images, boxes in them and text. Needs OpenCV.

OpenCV's letters are ASCII: others lose their accents, or become `?`.
"""

from __future__ import annotations

import os
import textwrap
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edl_torch.checking.check import Flaw, reason_of, spread
from edl_torch.errors import OutputError
from edl_torch.readers.base import AbstractDataReader
from edl_torch.readers.shared.packages import required
from edl_torch.shard import Shard, Source, Task, TaskType
from edl_torch.system.whole_files import whole_file

Picture = npt.NDArray[np.uint8]

_CELL, _MARGIN, _LINE = 256, 6, 14  # pixels
_TEXT_LINES = 4  # below an image
_MOST_COLUMNS = 6
_FONT_SCALE = 0.38
_LETTERS = (_CELL - 2 * _MARGIN) // 6
_PAPER, _INK, _BAD, _BOX = (250, 250, 250), (30, 30, 30), (190, 20, 20), (0, 200, 0)
_MOST_BOXES = 100
_LONGEST = 400  # characters of one value
_BYTES = 24

Box = tuple[float, float, float, float, str]  # x1 y1 x2 y2 in pixels, label


@dataclass(frozen=True, slots=True, kw_only=True)
class SheetCell:
    """One record: its heading, and what is to be seen, or why nothing is."""

    heading: str
    view: View | None = None
    error: str = ""


def cells(
    reader: AbstractDataReader, sources: Sequence[Source], mode: TaskType, count: int, bad: Sequence[Flaw]
) -> list[SheetCell]:
    """At most `count` records, evenly over the dataset. Those in `bad` are not read again: they may kill."""
    return [_cell(reader, mode, name, number, bad) for name, number in spread(sources, count)]


def _cell(
    reader: AbstractDataReader, mode: TaskType, name: str, number: int, bad: Sequence[Flaw]
) -> SheetCell:
    heading = f"{number}  {name if len(name) <= 24 else '...' + name[-21:]}"
    for finding in bad:
        if finding.name == name and finding.start <= number < finding.end:
            return SheetCell(heading=heading, error=finding.reason)
    try:
        (record,) = reader.read_records(Task(shard=Shard(name=name, start=number, end=number + 1), type=mode))
        return SheetCell(heading=heading, view=view(record, reader))
    except Exception as exc:  # noqa: BLE001  a reader is the user's code, and so is what its records are
        return SheetCell(heading=heading, error=reason_of(exc))


def draw(cells: Sequence[SheetCell]) -> Picture:
    """The sheet, uint8 [height, width, 3], RGB."""
    cv2 = _opencv()
    columns = min(_MOST_COLUMNS, max(1, int(np.ceil(np.sqrt(len(cells))))))
    height = _CELL + _LINE * (_TEXT_LINES + 1) + 2 * _MARGIN
    rows = -(-len(cells) // columns)
    sheet = np.full((rows * height, columns * _CELL, 3), _PAPER, np.uint8)
    for number, cell in enumerate(cells):
        top, left = number // columns * height, number % columns * _CELL
        _draw_cell(cv2, sheet[top : top + height, left : left + _CELL], cell)
    return sheet


def save(sheet: Picture, path: str | os.PathLike[str]) -> None:
    """Write a PNG, whole or not at all. Raises OutputError."""
    encoded, data = _opencv().imencode(".png", sheet[..., ::-1])
    if not encoded:
        raise OutputError(f"'{os.fspath(path)}' cannot be written: OpenCV makes no PNG of {sheet.shape}")
    try:
        with whole_file(Path(path)) as file:
            file.write(data.tobytes())
    except OSError as exc:
        raise OutputError(
            f"'{os.fspath(path)}' cannot be written: {exc.strerror}; choose another path"
        ) from exc


def _draw_cell(cv2: Any, area: Picture, cell: SheetCell) -> None:
    cv2.rectangle(area, (0, 0), (area.shape[1] - 1, area.shape[0] - 1), (210, 210, 210), 1)
    _write(cv2, area, [cell.heading], _MARGIN, 1, _INK)
    top = _MARGIN + _LINE
    if cell.view is None:
        _write(cv2, area, [cell.error], top, _fitting(area, top), _BAD)
        return
    if cell.view.image is not None:
        top += _place(cv2, area[top : top + _CELL, _MARGIN:-_MARGIN], cell.view.image, cell.view.boxes)
    _write(cv2, area, cell.view.lines, top, _fitting(area, top), _INK)


def _fitting(area: Picture, top: int) -> int:
    return int((area.shape[0] - top) // _LINE)


def _place(cv2: Any, area: Picture, image: Picture, boxes: Sequence[Box]) -> int:
    """Returns the height that it takes."""
    scale = min(area.shape[0] / image.shape[0], area.shape[1] / image.shape[1])
    width, height = (max(1, int(side * scale)) for side in (image.shape[1], image.shape[0]))
    how = cv2.INTER_AREA if scale < 1 else cv2.INTER_NEAREST
    area[:height, :width] = cv2.resize(image, (width, height), interpolation=how)
    frame = np.ascontiguousarray(area[:height, :width])
    for *corners, label in boxes:
        x1, y1, x2, y2 = (int(np.clip(c * scale, -1e4, 1e4)) for c in corners)
        cv2.rectangle(frame, (x1, y1), (x2, y2), _BOX, 1)
        (wide, high), _ = cv2.getTextSize(_ascii(label), cv2.FONT_HERSHEY_SIMPLEX, 0.35, 1)
        cv2.rectangle(frame, (x1, y1), (x1 + wide + 2, y1 + high + 3), _INK, cv2.FILLED)
        at = (x1 + 1, y1 + high + 1)
        cv2.putText(frame, _ascii(label), at, cv2.FONT_HERSHEY_SIMPLEX, 0.35, _BOX, 1, cv2.LINE_AA)
    area[:height, :width] = frame
    return height


def _write(cv2: Any, area: Picture, lines: Sequence[str], top: int, most: int, colour: Sequence[int]) -> None:
    wrapped = [piece for line in lines for piece in textwrap.wrap(_ascii(line), _LETTERS) or [""]]
    if len(wrapped) > most:
        wrapped = [*wrapped[: most - 1], "..."]
    canvas = np.ascontiguousarray(area)
    for number, line in enumerate(wrapped):
        at = (_MARGIN, top + (number + 1) * _LINE - 4)
        cv2.putText(canvas, line, at, cv2.FONT_HERSHEY_SIMPLEX, _FONT_SCALE, tuple(colour), 1, cv2.LINE_AA)
    area[:] = canvas


def _ascii(text: str) -> str:
    plain = unicodedata.normalize("NFKD", text.replace("\t", "    ").translate(_QUOTES))
    plain = "".join(letter for letter in plain if not unicodedata.combining(letter))
    return plain.encode("ascii", "replace").decode()


_QUOTES = str.maketrans({"“": '"', "”": '"', "„": '"', "’": "'", "‘": "'", "–": "-", "—": "-", "…": "..."})


def _opencv() -> Any:
    return required("cv2", "--sample needs OpenCV: pip install opencv-python-headless")


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A record to be drawn. image: uint8 [height, width, 3], RGB, or None."""

    lines: Sequence[str]
    image: npt.NDArray[np.uint8] | None = None
    boxes: Sequence[Box] = field(default=())


def view(record: Any, reader: object) -> View:
    """A record of any reader. The reader's `classes` or `categories` name labels."""
    image = _image(record)
    if image is not None:
        return View(image=image, lines=[])
    if isinstance(record, tuple) and len(record) == 2 and (image := _image(record[0])) is not None:
        target = record[1]
        if isinstance(target, Mapping):
            boxes = _boxes(target, reader)
            return View(image=image, boxes=boxes, lines=[_summary(boxes)] if boxes else _lines(target))
        is_label = isinstance(target, int | np.integer) and not isinstance(target, bool)
        return View(image=image, lines=[_label(target, reader)] if is_label else _lines(target))
    return View(lines=_lines(record))


def _image(value: Any) -> npt.NDArray[np.uint8] | None:
    is_one = isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 3 and value.size > 0
    return value if is_one and value.shape[2] == 3 else None


def _label(number: Any, reader: object) -> str:
    names = getattr(reader, "categories", None) or getattr(reader, "classes", None)
    try:
        return f"{int(number)} {names[int(number)]}" if names else str(int(number))
    except (LookupError, TypeError):
        return str(int(number))


def _boxes(target: Mapping[str, Any], reader: object) -> list[Box]:
    boxes, labels = target.get("boxes"), target.get("labels")
    if not isinstance(boxes, np.ndarray) or boxes.ndim != 2 or boxes.shape[1] != 4:
        return []
    labels = labels if isinstance(labels, np.ndarray) and len(labels) == len(boxes) else None
    return [
        (*map(float, box), "" if labels is None else _label(labels[number], reader))  # type: ignore[misc]
        for number, box in enumerate(boxes[:_MOST_BOXES])
    ]


def _summary(boxes: list[Box]) -> str:
    counts = Counter(label for *_, label in boxes)
    return f"{len(boxes)} box(es): " + ", ".join(f"{count} x {name}" for name, count in counts.most_common())


def _lines(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [f"{key}: {_text(item)}" for key, item in value.items()]
    if isinstance(value, tuple | list):
        return [_text(item) for item in value]
    return _text(value).splitlines() or [""]


def _text(value: Any) -> str:
    if isinstance(value, bytes | bytearray | memoryview):
        return _bytes(bytes(value))
    if isinstance(value, np.ndarray):
        few = np.array2string(value, threshold=16, edgeitems=3)
        return f"{value.dtype} {list(value.shape)} {' '.join(few.split())}"[:_LONGEST]
    return str(value)[:_LONGEST]


def _bytes(value: bytes) -> str:
    head = value[:_LONGEST]
    try:
        text = head.decode("utf-8", "strict" if len(head) == len(value) else "ignore")
    except UnicodeDecodeError:
        text = ""
    if text.isprintable() and text:
        return text
    return f"{len(value)} bytes: {value[:_BYTES].hex(' ')}{' …' if len(value) > _BYTES else ''}"
