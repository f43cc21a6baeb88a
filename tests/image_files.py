"""Small deterministic image datasets on disk, and the odd image files that real datasets contain.

It must not know any reader.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Image = npt.NDArray[np.uint8]
Path = str | os.PathLike[str]


def render(seed: int, height: int = 24, width: int = 32) -> Image:
    """A smooth RGB image, uint8 [height, width, 3], that differs for each seed and survives JPEG well."""
    rows = np.linspace(0, 160, height)[:, None]
    columns = np.linspace(0, 90, width)[None, :]
    channels = [(rows * (1 + c % 2) + columns + 37 * seed + 71 * c) % 512 for c in range(3)]
    folded = [np.abs(255 - channel) for channel in channels]
    return np.stack(folded, axis=-1).round().clip(0, 255).astype(np.uint8)


def encode(image: npt.NDArray[Any], ending: str = ".jpg") -> bytes:
    """RGB, RGBA or grayscale (uint8, for PNG also uint16) as the bytes of an image file."""
    import cv2

    codes = {3: cv2.COLOR_RGB2BGR, 4: cv2.COLOR_RGBA2BGRA}
    pixels = cv2.cvtColor(image, codes[image.shape[2]]) if image.ndim == 3 else image
    written, data = cv2.imencode(ending, pixels)
    assert written, f"OpenCV cannot write {ending}"
    return bytes(data.tobytes())


def with_exif_orientation(jpeg: bytes, orientation: int) -> bytes:
    """The JPEG with an EXIF block that gives its orientation, 1 … 8 (6: turn it right by 90 degrees)."""
    entry = struct.pack("<HHIHH", 0x0112, 3, 1, orientation, 0)
    tiff = b"II*\x00" + struct.pack("<IH", 8, 1) + entry + struct.pack("<I", 0)
    block = b"Exif\x00\x00" + tiff
    return jpeg[:2] + b"\xff\xe1" + struct.pack(">H", len(block) + 2) + block + jpeg[2:]


def odd_images() -> dict[str, bytes]:
    """Valid but unusual files by name: each must decode to uint8 [24, 32, 3] (`rotated.jpg`: [32, 24, 3])."""
    image = render(7)
    gray = image[..., 0].copy()
    alpha = np.dstack([image, np.full(gray.shape, 128, np.uint8)])
    return {
        "gray.jpg": encode(gray),
        "gray16.png": encode(gray.astype(np.uint16) * 257, ".png"),
        "rgb16.png": encode(image.astype(np.uint16) * 257, ".png"),
        "rgba.png": encode(alpha, ".png"),
        "rotated.jpg": with_exif_orientation(encode(image), 6),
        "trailing.jpg": encode(image) + b"bytes after the end",
        "trailing.png": encode(image, ".png") + b"bytes after the end",
    }


def broken_images() -> dict[str, bytes]:
    """Files by name that no reader may take for images: empty, cut off, text."""
    image = render(7)
    jpeg, png = encode(image), encode(image, ".png")
    thumbnail = encode(image[::2, ::2])
    inner = jpeg[:2] + b"\xff\xe1" + struct.pack(">H", len(thumbnail) + 2) + thumbnail + jpeg[2:]
    return {
        "empty.jpg": b"",
        "half.jpg": jpeg[: len(jpeg) // 2],
        "half.png": png[: len(png) // 2],
        "no_end.jpg": jpeg[:-2],
        "padded.jpg": jpeg[: len(jpeg) // 2] + bytes(len(jpeg) // 2),
        "text.jpg": b"not an image at all",
        "thumbnail.jpg": inner[:-40],
    }


def write_image_folder(
    root: Path, classes: Sequence[str] = ("ant", "bee"), per_class: int = 3, ending: str = ".png"
) -> str:
    """`root/<class>/<number><ending>`; with no classes `per_class` images directly in `root`."""
    for number, name in enumerate(classes or ("",)):
        folder = os.path.join(root, name)
        os.makedirs(folder, exist_ok=True)
        for image in range(per_class):
            _write(os.path.join(folder, f"{image:04d}{ending}"), encode(render(10 * number + image), ending))
    return os.fspath(root)


def write_manifest(root: Path, labels: Sequence[object] = (0, 1, 0, 2), header: bool = True) -> str:
    """`root/images/*.png` and `root/manifest.csv`, whose path is returned."""
    write_image_folder(os.path.join(root, "images"), (), len(labels))
    lines = ["file,label"] if header else []
    lines += [f"images/{number:04d}.png,{label}" for number, label in enumerate(labels)]
    return _write(os.path.join(root, "manifest.csv"), "\n".join([*lines, ""]).encode())


def write_coco(root: Path, images: int = 4) -> tuple[str, str, str]:
    """`root/images/*.jpg`, captions and instances; returns the folder and the two JSON files.

    Image i has i captions and i objects (polygon, crowd run lengths, three keypoints), so the first has none.
    """
    folder = write_image_folder(os.path.join(root, "images"), (), images, ".jpg")
    listed = [
        {"id": 100 + i, "file_name": f"{i:04d}.jpg", "height": 24, "width": 32}
        for i in reversed(range(images))
    ]
    owners = [image for image in range(images) for _ in range(image)]
    captions = [
        {"id": 900 + n, "image_id": 100 + i, "caption": f"caption {n} of image {i}: “été”"}
        for n, i in enumerate(owners)
    ]
    objects = [coco_object(n, 100 + i) for n, i in enumerate(owners)]
    categories = [{"id": 3, "name": "three"}, {"id": 17, "name": "seventeen"}]
    os.makedirs(os.path.join(root, "annotations"), exist_ok=True)
    paths = [os.path.join(root, "annotations", name) for name in ("captions.json", "instances.json")]
    _write(paths[0], json.dumps({"images": listed, "annotations": captions}).encode())
    instances = {"images": listed, "annotations": objects, "categories": categories}
    _write(paths[1], json.dumps(instances).encode())
    return folder, paths[0], paths[1]


def coco_object(number: int, image_id: int) -> dict[str, Any]:
    """One instance annotation of a 24 × 32 image: a box, polygon or (every third) a crowd's run lengths."""
    x, y, w, h = number % 8, number % 6, 10, 8
    crowd = number % 3 == 2
    polygon = [x, y, x + w, y, x + w, y + h, x, y + h]
    column = [24 * x + y, h, *[24 - h, h] * (w - 1)]
    counts = [*column, 24 * 32 - sum(column)]
    return {
        "id": 500 + number,
        "image_id": image_id,
        "category_id": (3, 17)[number % 2],
        "bbox": [x, y, w, h],
        "area": w * h,
        "iscrowd": int(crowd),
        "segmentation": {"size": [24, 32], "counts": counts} if crowd else [polygon],
        "keypoints": [x, y, 2, x + 1, y + 1, 1, 0, 0, 0],
        "num_keypoints": 2,
    }


def write_voc(root: Path, images: int = 4) -> str:
    """`root/VOCdevkit/VOC2012` with the splits train (all but the last image) and val; returns `root`."""
    base = os.path.join(root, "VOCdevkit", "VOC2012")
    write_image_folder(os.path.join(base, "JPEGImages"), (), images, ".jpg")
    names = [f"{i:04d}" for i in range(images)]
    for number, name in enumerate(names):
        _write(os.path.join(base, "Annotations", f"{name}.xml"), voc_xml(number).encode())
    for split, chosen in (("train", names[:-1]), ("val", names[-1:])):
        _write(
            os.path.join(base, "ImageSets", "Main", f"{split}.txt"),
            "".join(f"{n}\n" for n in chosen).encode(),
        )
    return os.fspath(root)


def voc_xml(objects: int) -> str:
    """An annotation with so many objects; the boxes have fractions, every second object is difficult."""
    entries = [
        f"<object><name>{('dog', 'cat')[n % 2]}</name><pose>Left</pose><truncated>{n % 3 % 2}</truncated>"
        f"<difficult>{n % 2}</difficult><bndbox><xmin>{n + 1.5}</xmin><ymin>{n + 2}</ymin>"
        f"<xmax>{n + 12.25}</xmax><ymax>{n + 14}</ymax></bndbox>"
        "<part><name>head</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>2</xmax><ymax>2</ymax></bndbox></part>"
        "</object>"
        for n in range(objects)
    ]
    return f"<annotation><folder>VOC2012</folder>{''.join(entries)}</annotation>"


def _write(path: str, data: bytes) -> str:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(data)
    return path
