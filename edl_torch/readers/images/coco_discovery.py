"""Which annotation file and which image folder a bare path to COCO data means.

It looks at names and at a few bytes; it must not parse the file.
"""

from __future__ import annotations

import json
import mmap
import os
import re

from edl_torch.errors import DataFormatError

_FIRST_FILE = re.compile(rb'"file_name"\s*:\s*("(?:[^"\\]|\\.)*")')


def find_annotations(data: str, key: str) -> str | None:
    """The JSON file that `data` is, or the one in `data/annotations/`, if its entries have `key`; else None.

    Raises DataFormatError if the folder holds several.
    """
    if os.path.isfile(data):
        return data if data.lower().endswith(".json") and _mentions(data, key) else None
    folder = os.path.join(data, "annotations")
    if not os.path.isdir(folder):
        return None
    files = sorted(
        os.path.join(folder, name) for name in os.listdir(folder) if name.lower().endswith(".json")
    )
    if len(files) > 1:
        raise DataFormatError(f"'{folder}' holds several annotation files: name one of {', '.join(files)}")
    return files[0] if files and _mentions(files[0], key) else None


def find_image_folder(annotations: str) -> str:
    """The folder beside the annotation file that holds its first image: as COCO and its copies lay them out.

    Raises DataFormatError that lists the folders which were tried.
    """
    here = os.path.dirname(annotations)
    first = _first_file(annotations)
    if first is None:
        return here  # it names no image: whoever parses it says what is wrong
    above = os.path.join(here, os.pardir)
    split = os.path.splitext(os.path.basename(annotations))[0].rpartition("_")[2]
    places = [
        (here, "images"),
        (above, "images"),
        (above, split),
        (above, "images", split),
        (here, split),
        (here,),
    ]
    folders = [os.path.normpath(os.path.join(*place)) for place in places]
    for folder in folders:
        if os.path.isfile(os.path.join(folder, first)):
            return folder
    raise DataFormatError(
        f"the images of '{annotations}' are not found: no {first!r} in {', '.join(folders)}; "
        "pass images=<folder>"
    )


def _mentions(path: str, key: str) -> bool:
    return _search(path, re.compile(rb'"' + key.encode() + rb'"\s*:')) is not None


def _first_file(path: str) -> str | None:
    found = _search(path, _FIRST_FILE)
    try:
        return None if found is None else str(json.loads(found))
    except ValueError:
        return None


def _search(path: str, pattern: re.Pattern[bytes]) -> bytes | None:
    """The pattern's last group in the file, mapped rather than read: annotation files have hundreds of MB."""
    if not os.path.getsize(path):
        return None
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        match = pattern.search(content)
        return None if match is None else bytes(match.group(match.lastindex or 0))
