"""The JPEG files that are decoded: a given folder, real COCO photographs beside the checkout, or made here.

It does not know who decodes them.
"""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import numpy.typing as npt

COCO = Path(__file__).parents[2] / "shared" / "data" / "coco_mini" / "images"

_HEIGHT, _WIDTH = 480, 640  # what most photographs of COCO have
_QUALITY = 92


def find_pictures(given: Path | None, scratch: Path, count: int) -> Path:
    """The folder to decode: `given`, COCO's, or `scratch` with `count` generated photographs."""
    if given is not None:
        return given
    if COCO.is_dir():
        return COCO
    write_pictures(scratch, count)
    return scratch


def write_pictures(folder: Path, count: int) -> None:
    """Write so many generated photographs."""
    for number in range(count):
        path = str(folder / f"{number:03d}.jpg")
        cv2.imwrite(path, photograph(number), [cv2.IMWRITE_JPEG_QUALITY, _QUALITY])


def write_photograph(path: Path, height: int, width: int) -> None:
    """Write a large photograph: a generated one, enlarged, with the grain of a camera."""
    grain = np.random.default_rng(0).normal(0, 4, (height, width, 3)).astype(np.float32)
    picture = cv2.resize(photograph(0), (width, height), interpolation=cv2.INTER_CUBIC) + grain
    cv2.imwrite(str(path), np.clip(picture, 0, 255).astype(np.uint8), [cv2.IMWRITE_JPEG_QUALITY, _QUALITY])


def photograph(seed: int) -> npt.NDArray[np.uint8]:
    """Noise of many scales, as coarse shapes and fine texture: takes as long to decode as a photograph."""
    rng = np.random.default_rng(seed)
    total = np.zeros((_HEIGHT, _WIDTH, 3), np.float32)
    for cells, strength in ((4, 60.0), (16, 30.0), (64, 15.0), (256, 8.0)):
        coarse = rng.normal(0, strength, (cells, cells, 3)).astype(np.float32)
        total += cv2.resize(coarse, (_WIDTH, _HEIGHT), interpolation=cv2.INTER_CUBIC)
    picture: npt.NDArray[np.uint8] = np.clip(total + 128, 0, 255).astype(np.uint8)
    return picture
