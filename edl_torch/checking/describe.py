"""What of a record a person wants to see: its image, boxes in it, and some lines of text.

It must not know how they are drawn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

_MOST_BOXES = 100
_LONGEST = 400  # characters of one value
_BYTES = 24

Box = tuple[float, float, float, float, str]  # x1 y1 x2 y2 in pixels, label


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
        return View(image=image, lines=[_label(target, reader)] if _is_number(target) else _lines(target))
    return View(lines=_lines(record))


def _image(value: Any) -> npt.NDArray[np.uint8] | None:
    is_one = isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 3 and value.size > 0
    return value if is_one and value.shape[2] == 3 else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


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
