"""Draw the demo's dataset: scenes of one or two coloured shapes, with captions, in COCO's format.

    python examples/coco/generate.py OUT --images 2000 --val 200 --size 96 --seed 0

It makes `images/train/`, `images/val/`, `captions_train.json`, `captions_val.json` and, for whoever wants
to check captions, `scenes_val.json`: what was really drawn. The same arguments give the same files. It
must not know who trains on them, or how.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]
Points = npt.NDArray[np.float64]

VERSION = 1  # of what is drawn: a dataset of another version is made anew
MANIFEST = "dataset.json"
CAPTIONS_PER_IMAGE = 5
OVERSAMPLING = 2  # draw larger, then shrink: smoother edges than line anti-aliasing alone

# Hue in degrees, its jitter, and the ranges of saturation and brightness.
COLOURS: dict[str, tuple[float, float, tuple[float, float], tuple[float, float]]] = {
    "red": (0, 6, (0.85, 1.0), (0.75, 0.95)),
    "orange": (29, 4, (0.85, 1.0), (0.92, 1.0)),
    "yellow": (55, 4, (0.8, 1.0), (0.9, 1.0)),
    "green": (122, 15, (0.75, 1.0), (0.5, 0.8)),
    "turquoise": (177, 7, (0.6, 0.9), (0.75, 0.95)),
    "blue": (222, 9, (0.75, 1.0), (0.7, 1.0)),
    "purple": (281, 9, (0.65, 0.95), (0.5, 0.8)),
    "pink": (335, 8, (0.3, 0.5), (0.95, 1.0)),
}
SIZES = {"small": (0.105, 0.13), "large": (0.175, 0.205)}  # radius as a share of the picture's side
COLUMNS = (0.24, 0.5, 0.76)
PLACES = (
    ("in the top left corner", "at the top", "in the top right corner"),
    ("on the left", "in the middle", "on the right"),
    ("in the bottom left corner", "at the bottom", "in the bottom right corner"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One drawn shape; `row` and `column` count thirds of the picture, lengths are shares of its side."""

    shape: str
    colour: str
    size: str
    row: int
    column: int
    x: float
    y: float
    radius: float
    angle: float  # degrees

    @property
    def place(self) -> str:
        """Where it is, in words."""
        return PLACES[self.row][self.column]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One or two items before a background that is `light` or `dark`."""

    items: tuple[Item, ...]
    background: str


# --- shapes, as polygons around the origin with radius 1, y pointing down ---


def _regular(corners: int, start: float = -90.0) -> Points:
    angles = np.radians(start + np.arange(corners) * 360.0 / corners)
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def _square() -> Points:
    return _regular(4, start=-45.0) * 1.1


def _triangle() -> Points:
    return _regular(3) * 1.15


def _star() -> Points:
    points = _regular(10) * 1.15
    points[1::2] *= 0.42
    return points


def _cross() -> Points:
    arm = 0.33
    corner = [(-arm, -1.0), (arm, -1.0), (arm, -arm)]
    turns = [[(x, y), (-y, x), (-x, -y), (y, -x)] for x, y in corner]
    return np.array([turns[i][quarter] for quarter in range(4) for i in range(3)])


def _heart() -> Points:
    t = np.linspace(0.0, 2 * math.pi, 48, endpoint=False)
    x = 16 * np.sin(t) ** 3
    y = -(13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t))
    return np.stack([x, y], axis=1) / 16.5


SHAPES: dict[str, Callable[[], Points]] = {
    "circle": lambda: _regular(48),
    "ring": lambda: _regular(48),  # and a hole, see `_draw_item`
    "square": _square,
    "triangle": _triangle,
    "star": _star,
    "cross": _cross,
    "heart": _heart,
}


# --- from a random generator to a scene, its picture and its captions ---


def draw_scene(rng: np.random.Generator) -> Scene:
    """Choose what a picture shows."""
    cells = _one_cell(rng) if rng.random() < 0.6 else _two_cells(rng)
    looks = [(str(rng.choice(list(SHAPES))), str(rng.choice(list(COLOURS)))) for _ in cells]
    while len(looks) == 2 and looks[0][1] == looks[1][1]:  # two colours, so that each phrase means one shape
        looks[1] = (str(rng.choice(list(SHAPES))), str(rng.choice(list(COLOURS))))
    items = tuple(_item(rng, look, cell) for look, cell in zip(looks, cells, strict=True))
    return Scene(items=items, background="light" if rng.random() < 0.5 else "dark")


def _one_cell(rng: np.random.Generator) -> list[tuple[int, int]]:
    return [(int(rng.integers(3)), int(rng.integers(3)))]


def _two_cells(rng: np.random.Generator) -> list[tuple[int, int]]:
    """Opposite sides along one axis, close along the other: one clear relation, and no overlap."""
    first = int(rng.integers(3))
    second = int(np.clip(first + rng.integers(-1, 2), 0, 2))
    if rng.random() < 0.5:
        return [(first, 0), (second, 2)]  # the left one first
    return [(0, first), (2, second)]  # the upper one first


def _item(rng: np.random.Generator, look: tuple[str, str], cell: tuple[int, int]) -> Item:
    size = "small" if rng.random() < 0.5 else "large"
    row, column = cell
    return Item(
        shape=look[0],
        colour=look[1],
        size=size,
        row=row,
        column=column,
        x=COLUMNS[column] + float(rng.uniform(-0.04, 0.04)),
        y=COLUMNS[row] + float(rng.uniform(-0.04, 0.04)),
        radius=float(rng.uniform(*SIZES[size])),
        angle=float(rng.uniform(-12, 12)),
    )


def render(scene: Scene, size: int, rng: np.random.Generator) -> Pixels:
    """The picture as (size, size, 3) uint8 in OpenCV's BGR order."""
    side = size * OVERSAMPLING
    canvas = _background(scene.background, side, rng)
    for item in scene.items:
        _draw_item(canvas, item, rng)
    small = cv2.resize(canvas, (size, size), interpolation=cv2.INTER_AREA).astype(np.float32)
    small += rng.standard_normal(small.shape, dtype=np.float32) * float(rng.uniform(2, 7))
    return np.clip(small, 0, 255).astype(np.uint8)


def _background(kind: str, side: int, rng: np.random.Generator) -> Pixels:
    """A muted tint with a gradient, and now and then stripes."""
    low, high = (165, 225) if kind == "light" else (28, 85)
    corners = rng.uniform(low, high, size=(2, 2, 1)) + rng.uniform(-14, 14, size=(1, 1, 3))
    canvas = cv2.resize(corners.astype(np.float32), (side, side), interpolation=cv2.INTER_LINEAR)
    if rng.random() < 0.35:
        period, angle = float(rng.uniform(0.08, 0.25)) * side, float(rng.uniform(0, math.pi))
        y, x = np.mgrid[0:side, 0:side].astype(np.float32)
        waves = np.sin((x * math.cos(angle) + y * math.sin(angle)) * (2 * math.pi / period))
        canvas += waves[..., None] * float(rng.uniform(4, 12))
    return np.clip(canvas, 0, 255).astype(np.uint8)


def _draw_item(canvas: Pixels, item: Item, rng: np.random.Generator) -> None:
    side = canvas.shape[0]
    turn = math.radians(item.angle)
    rotation = np.array([[math.cos(turn), math.sin(turn)], [-math.sin(turn), math.cos(turn)]])
    shape = SHAPES[item.shape]() @ rotation * item.radius
    outlines = [shape, shape[::-1] * 0.55] if item.shape == "ring" else [shape]
    centre = np.array([item.x, item.y])
    _fill(canvas, [(outline + centre) * side for outline in outlines], _bgr(item.colour, rng))


def _fill(canvas: Pixels, outlines: list[Points], bgr: tuple[int, int, int]) -> None:
    """Fill by the even-odd rule (so an inner outline is a hole), in sixteenths of a pixel."""
    shift = 4
    fixed = [np.round(outline * (1 << shift)).astype(np.int32) for outline in outlines]
    cv2.fillPoly(canvas, fixed, bgr, lineType=cv2.LINE_AA, shift=shift)


def _bgr(colour: str, rng: np.random.Generator) -> tuple[int, int, int]:
    hue, jitter, saturation, brightness = COLOURS[colour]
    hsv = [(hue + rng.uniform(-jitter, jitter)) % 360, rng.uniform(*saturation), rng.uniform(*brightness)]
    b, g, r = (cv2.cvtColor(np.array([[hsv]], dtype=np.float32), cv2.COLOR_HSV2BGR)[0, 0] * 255).tolist()
    return int(b), int(g), int(r)


def captions_of(scene: Scene, rng: np.random.Generator) -> list[str]:
    """Five different sentences about the scene; each names every shape with its colour."""
    sentences = _about_one(scene) if len(scene.items) == 1 else _about_two(scene)
    chosen = rng.permutation(len(sentences))[:CAPTIONS_PER_IMAGE]
    return [sentences[i][0].upper() + sentences[i][1:] + "." for i in chosen]


def _about_one(scene: Scene) -> list[str]:
    (item,) = scene.items
    plain, sized = f"{item.colour} {item.shape}", f"{item.size} {item.colour} {item.shape}"
    return [
        f"{_a(sized)} {item.place}",
        f"there is {_a(plain)} {item.place}",
        f"{_a(sized)} on a {scene.background} background",
        f"{_a(plain)} {item.place} of the picture",
        f"the picture shows {_a(sized)}",
        f"{item.place} of a {scene.background} picture is {_a(plain)}",
        f"a picture of {_a(sized)} {item.place}",
    ]


def _about_two(scene: Scene) -> list[str]:
    """Every sentence begins with the left or upper one, as people who read from there do."""
    first, second = (f"{item.colour} {item.shape}" for item in scene.items)
    if scene.items[1].column - scene.items[0].column == 2:
        ahead, behind, near, far = "to the left of", "to its right", "on the left", "on the right"
    else:
        ahead, behind, near, far = "above", "below it", "at the top", "at the bottom"
    sized_first, sized_second = (f"{item.size} {item.colour} {item.shape}" for item in scene.items)
    return [
        f"{_a(first)} {ahead} {_a(second)}",
        f"{_a(first)} with {_a(second)} {behind}",
        f"{_a(sized_first)} {near} and {_a(sized_second)} {far}",
        f"there is {_a(first)} {near} and {_a(second)} {far}",
        f"two shapes on a {scene.background} background, {_a(first)} and {_a(second)}",
        f"the picture shows {_a(sized_first)} {ahead} {_a(sized_second)}",
        f"{_a(first)} and {_a(second)}",
    ]


def _a(phrase: str) -> str:
    return f"{'an' if phrase[0] in 'aeiou' else 'a'} {phrase}"


# --- files ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What fixes the dataset: equal recipes give equal files."""

    images: int = 2000
    val: int = 200
    size: int = 96
    seed: int = 0
    version: int = VERSION

    def __post_init__(self) -> None:
        if self.images < 1 or self.val < 1:
            raise ValueError(
                f"a dataset needs at least 1 image and 1 held-out image: got {self.images}, {self.val}"
            )
        if not 16 <= self.size <= 4096:
            raise ValueError(f"the side of a picture is 16 to 4096 pixels: got {self.size}")


def generate(out: Path, recipe: Recipe) -> bool:
    """Write the dataset into the folder `out`; False when it is there already, complete and of this recipe.

    It is written beside `out` and renamed, so `out` is never half a dataset. A folder that is neither
    empty nor a dataset made by this program is left alone: FileExistsError.
    """
    if _recipe_in(out) == asdict(recipe):
        return False
    if out.exists() and _recipe_in(out) is None and not (out.is_dir() and not any(out.iterdir())):
        raise FileExistsError(f"{out} exists and is not a dataset made by generate.py: choose another folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        made = Path(scratch, "made")
        _write(made, recipe)
        if out.exists():
            os.replace(out, Path(scratch, "old"))
        os.replace(made, out)
    return True


def _recipe_in(out: Path) -> dict[str, Any] | None:
    try:
        found = json.loads((out / MANIFEST).read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _write(folder: Path, recipe: Recipe) -> None:
    _write_split(folder, "train", range(1, recipe.images + 1), recipe)
    scenes = _write_split(folder, "val", range(recipe.images + 1, recipe.images + recipe.val + 1), recipe)
    _dump(folder / "scenes_val.json", scenes)
    _dump(folder / MANIFEST, asdict(recipe))


def _write_split(folder: Path, split: str, ids: range, recipe: Recipe) -> list[dict[str, Any]]:
    pictures = folder / "images" / split
    pictures.mkdir(parents=True)
    images, annotations, scenes = [], [], []
    for image_id in ids:
        rng = np.random.default_rng([recipe.seed, image_id])
        scene = draw_scene(rng)
        file_name = f"{image_id:012d}.jpg"
        save_jpeg(pictures / file_name, render(scene, recipe.size, rng))
        images.append(_image_entry(image_id, file_name, recipe.size))
        for number, caption in enumerate(captions_of(scene, rng), start=1):
            annotation_id = (image_id - 1) * CAPTIONS_PER_IMAGE + number
            annotations.append({"image_id": image_id, "id": annotation_id, "caption": caption})
        scenes.append({"image_id": image_id, "file_name": file_name, **asdict(scene)})
    # As in COCO's own files, the captions of one image do not stand together: a shard then sees many images.
    order = np.random.default_rng([recipe.seed, len(ids)]).permutation(len(annotations))
    _dump(folder / f"captions_{split}.json", _coco(split, images, [annotations[i] for i in order]))
    return scenes


def _image_entry(image_id: int, file_name: str, size: int) -> dict[str, Any]:
    return {"license": 1, "file_name": file_name, "height": size, "width": size, "id": image_id}


def _coco(split: str, images: list[dict[str, Any]], annotations: list[dict[str, Any]]) -> dict[str, Any]:
    info = {
        "description": f"Coloured shapes with captions ({split}), drawn by examples/coco/generate.py",
        "version": str(VERSION),
        "year": 2025,
        "contributor": "edl_torch",
    }
    licenses = [{"id": 1, "name": "Apache-2.0", "url": "https://www.apache.org/licenses/LICENSE-2.0"}]
    return {"info": info, "licenses": licenses, "images": images, "annotations": annotations}


def save_jpeg(path: Path, picture: Pixels) -> None:
    if not cv2.imwrite(str(path), picture, [cv2.IMWRITE_JPEG_QUALITY, 92]):
        raise OSError(f"cannot write {path}")


def _dump(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 2 for arguments or folders that cannot be used."""
    parser = argparse.ArgumentParser(description="Draw a captions dataset in COCO's format.")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to make")
    meanings = {"images": "pictures", "val": "held-out pictures", "size": "side in pixels", "seed": "seed"}
    for name, meaning in meanings.items():
        default = getattr(Recipe(), name)
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{meaning} ({default})")
    args = parser.parse_args(argv)
    try:
        recipe = Recipe(images=args.images, val=args.val, size=args.size, seed=args.seed)
        made = generate(args.out, recipe)
    except (OSError, ValueError) as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2
    print(f"{args.out}: {args.images} + {args.val} images {'made' if made else 'are there already'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
