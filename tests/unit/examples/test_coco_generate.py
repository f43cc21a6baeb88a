"""The demo's dataset: valid COCO, the same every time, never half written."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import cv2
import generate
import numpy as np
import pytest
from evaluate import looks_named
from generate import SHAPES, Recipe, captions_of, draw_scene, render

SMALL = Recipe(images=30, val=10, size=48, seed=3)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated") / "data"
    assert generate.generate(folder, SMALL)
    return folder


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_same_recipe_gives_the_same_bytes(dataset: Path, tmp_path: Path) -> None:
    generate.generate(tmp_path / "again", SMALL)
    assert files_of(tmp_path / "again") == files_of(dataset)


def test_another_seed_gives_other_pictures_and_captions(dataset: Path, tmp_path: Path) -> None:
    generate.generate(tmp_path / "other", Recipe(images=30, val=10, size=48, seed=4))
    ours, theirs = files_of(dataset), files_of(tmp_path / "other")
    assert ours.keys() == theirs.keys()
    assert all(ours[name] != theirs[name] for name in ours)


@pytest.mark.parametrize(("split", "count"), [("train", 30), ("val", 10)])
def test_captions_file_is_coco(dataset: Path, split: str, count: int) -> None:
    coco = read(dataset / f"captions_{split}.json")
    assert set(coco) == {"info", "licenses", "images", "annotations"}
    assert len({image["id"] for image in coco["images"]}) == len(coco["images"]) == count
    assert len({a["id"] for a in coco["annotations"]}) == len(coco["annotations"]) == 5 * count
    licences = {licence["id"] for licence in coco["licenses"]}
    for image in coco["images"]:
        picture = cv2.imread(str(dataset / "images" / split / image["file_name"]))
        assert picture is not None
        assert picture.shape == (image["height"], image["width"], 3) == (48, 48, 3)
        assert image["license"] in licences


def test_captions_of_one_image_do_not_stand_together(dataset: Path) -> None:
    owners = [a["image_id"] for a in read(dataset / "captions_train.json")["annotations"]]
    assert sum(a == b for a, b in pairwise(owners)) < 20  # of 149; 120 if they did


def test_training_and_held_out_images_have_no_id_in_common(dataset: Path) -> None:
    ids = [
        {image["id"] for image in read(dataset / f"captions_{split}.json")["images"]}
        for split in ("train", "val")
    ]
    assert not ids[0] & ids[1]


def test_every_caption_names_what_the_scene_shows(dataset: Path) -> None:
    scenes = {scene["image_id"]: scene for scene in read(dataset / "scenes_val.json")}
    for annotation in read(dataset / "captions_val.json")["annotations"]:
        shown = {(item["colour"], item["shape"]) for item in scenes[annotation["image_id"]]["items"]}
        assert looks_named(annotation["caption"]) == shown


def test_relations_and_places_are_true() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        scene = draw_scene(rng)
        if len(scene.items) == 1:
            continue
        first, second = scene.items
        for caption in captions_of(scene, rng):
            named = [caption.lower().index(f"{item.colour} {item.shape}") for item in scene.items]
            assert named[0] < named[1]
            if "to the left of" in caption or "to its right" in caption:
                assert first.x < second.x - 0.3
            if " above " in caption or " below it" in caption:
                assert first.y < second.y - 0.3


def test_shapes_lie_inside_and_apart() -> None:
    rng = np.random.default_rng(1)
    for _ in range(500):
        items = draw_scene(rng).items
        assert all(min(item.x, item.y) - 0.8 * item.radius >= 0.0 for item in items)
        assert all(max(item.x, item.y) + 0.8 * item.radius <= 1.0 for item in items)
        if len(items) == 2:
            gap = np.hypot(items[0].x - items[1].x, items[0].y - items[1].y)
            assert gap > items[0].radius + items[1].radius


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_shape_is_drawn_in_its_colour(shape: str) -> None:
    item = generate.Item(
        shape=shape, colour="red", size="large", row=1, column=1, x=0.5, y=0.5, radius=0.2, angle=0.0
    )
    scene = generate.Scene(items=(item,), background="dark")
    picture = render(scene, 96, np.random.default_rng(0)).astype(int)
    blue, green, red = picture[..., 0], picture[..., 1], picture[..., 2]
    is_red = (red > 150) & (green < 100) & (blue < 100)
    assert 200 < is_red.sum() < 1600  # of 9216 pixels
    assert bool(is_red[48, 48]) is (shape != "ring")
    assert not is_red[:20].any()


def test_dataset_of_another_recipe_is_replaced(tmp_path: Path) -> None:
    out = tmp_path / "data"
    generate.generate(out, Recipe(images=5, val=2, size=32))
    assert generate.generate(out, Recipe(images=3, val=2, size=32))
    assert len(read(out / "captions_train.json")["images"]) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_failure_leaves_no_half_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, picture: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(generate, "save_jpeg", fail)
    with pytest.raises(OSError, match="disk full"):
        generate.generate(tmp_path / "data", SMALL)
    assert list(tmp_path.iterdir()) == []


def test_foreign_folder_is_not_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "precious.txt").write_text("keep")
    assert generate.main([str(tmp_path), "--images", "2", "--val", "1"]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]


def test_command_line_makes_the_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(tmp_path / "data"), "--images", "3", "--val", "2", "--size", "32", "--seed", "1"]
    assert generate.main(arguments) == 0
    assert "made" in capsys.readouterr().out
    assert generate.main(arguments) == 0
    assert "already" in capsys.readouterr().out
