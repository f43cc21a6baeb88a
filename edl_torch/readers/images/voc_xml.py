"""One Pascal VOC annotation file to arrays.

Entities and document types are refused: an annotation needs none, and they can read other files or blow up
memory. It must not know where images are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NoReturn
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

import numpy as np

from edl_torch.errors import BadRecord

_CORNERS = ("xmin", "ymin", "xmax", "ymax")


def parse_xml(data: bytes, path: str) -> Element:
    """The root element. Raises BadRecord, naming the path, for broken XML and for any DTD or entity."""
    builder = TreeBuilder()
    parser = expat.ParserCreate()

    def refuse(*_: Any) -> NoReturn:
        raise BadRecord(
            f"'{path}' declares a document type or entity, which annotations must not: remove <!DOCTYPE …>"
        )

    parser.StartElementHandler = builder.start
    parser.EndElementHandler = builder.end
    parser.CharacterDataHandler = builder.data
    parser.StartDoctypeDeclHandler = refuse
    parser.EntityDeclHandler = refuse
    try:
        parser.Parse(data, True)
    except (expat.ExpatError, ValueError, LookupError) as exc:
        raise BadRecord(
            f"'{path}' is not valid XML: {exc}; repair it or take the image out of the split"
        ) from exc
    return builder.close()


def parse_target(root: Element, classes: Mapping[str, int], path: str) -> dict[str, Any]:
    """The objects of an annotation as described in `VocReader`. Raises BadRecord, naming path and object."""
    objects = root.findall("object")
    names = [(entry.findtext("name") or "").strip() for entry in objects]
    for number, name in enumerate(names):
        if name not in classes:
            raise BadRecord(f"'{path}' object {number} is of the class {name!r}: pass classes=… that has it")
    boxes = [
        [_coordinate(entry, corner, number, path) for corner in _CORNERS]
        for number, entry in enumerate(objects)
    ]
    return {
        "boxes": np.array(boxes, dtype=np.float32).reshape(-1, 4),
        "labels": np.array([classes[name] for name in names], dtype=np.int64),
        "names": names,
        "difficult": np.array([_flag(entry, "difficult") for entry in objects], dtype=np.bool_),
        "truncated": np.array([_flag(entry, "truncated") for entry in objects], dtype=np.bool_),
        "poses": [(entry.findtext("pose") or "Unspecified").strip() for entry in objects],
    }


def _coordinate(entry: Element, corner: str, number: int, path: str) -> float:
    text = entry.findtext(f"bndbox/{corner}")
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise BadRecord(f"'{path}' object {number} has {corner}={text!r}, expected a number")
    return value


def _flag(entry: Element, key: str) -> bool:
    return (entry.findtext(key) or "0").strip() not in ("0", "", "Unspecified")
