"""COCO caption files: read one, and hold out a share of its images where there is no validation file."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from edl_torch.errors import DataFormatError, InvalidArgument


def read_captions(path: Path) -> dict[str, Any]:
    """A COCO captions file as a dict. Raises DataFormatError where it is something else."""
    try:
        content = json.loads(path.read_bytes())
    except ValueError as exc:
        raise DataFormatError(f"{path} is not JSON: {exc}") from exc
    lists = content if isinstance(content, dict) else {}
    if not all(isinstance(lists.get(key), list) for key in ("images", "annotations")):
        raise DataFormatError(f"{path} is not a COCO file: it needs the lists 'images' and 'annotations'")
    annotations = lists["annotations"]
    if not annotations or not all(
        isinstance(a, dict) and isinstance(a.get("caption"), str) for a in annotations
    ):
        raise DataFormatError(f"{path} is not a COCO captions file: its annotations need a 'caption' each")
    for key, needed in (("images", "id"), ("annotations", "image_id")):
        if not all(isinstance(entry, dict) and isinstance(entry.get(needed), int) for entry in lists[key]):
            raise DataFormatError(f"{path} is not a COCO file: its {key} need a number {needed!r} each")
    return lists


def hold_out(annotations: Path, folder: Path, share: float) -> tuple[Path, Path]:
    """Write two caption files into `folder`, of about `1 - share` and `share` of the images; their paths.

    An image's id alone decides, so every trainer and every run holds out the same images.
    """
    content = read_captions(annotations)
    held = {image["id"] for image in content["images"] if _is_held_out(image["id"], share)}
    if not held or len(held) == len(content["images"]):
        raise InvalidArgument(f"{annotations} has too few images to hold some out: give --val-annotations")
    folder.mkdir(parents=True, exist_ok=True)
    train, val = folder / "captions_train.json", folder / "captions_val.json"
    _write(train, _part(content, held, wanted=False))
    _write(val, _part(content, held, wanted=True))
    return train, val


def _is_held_out(image_id: int, share: float) -> bool:
    digest = hashlib.blake2b(str(image_id).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def _part(content: dict[str, Any], held: set[int], *, wanted: bool) -> dict[str, Any]:
    return content | {
        "images": [image for image in content["images"] if (image["id"] in held) is wanted],
        "annotations": [a for a in content["annotations"] if (a["image_id"] in held) is wanted],
    }


def _write(path: Path, content: dict[str, Any]) -> None:
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(json.dumps(content))
    os.replace(scratch, path)
