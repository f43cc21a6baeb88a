"""The example's small parts: deliveries, split, batches, checkpoints, progress line, judgement."""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path

import checkpoint
import numpy as np
import pytest
import torch
from batches import Encode, Fit, collate
from deliveries import Deliveries
from evaluate import judge, looks_named, read_scenes
from progress import ProgressLine, Standing
from split import hold_out, read_captions
from terminal import Terminal
from vocabulary import BOS, EOS, PAD, Vocabulary

from edl_torch.errors import DataFormatError, InvalidArgument
from edl_torch.testing import FakeClock

# --- deliveries ---


def test_each_annotation_of_each_epoch_once_is_exact() -> None:
    deliveries = Deliveries(4)
    for epoch in (0, 1):
        deliveries.add(epoch, torch.tensor([2, 0]))
        deliveries.add(epoch, torch.tensor([3, 1]))
    assert deliveries.exact(2)
    assert deliveries.verdict(2) == "delivered 8 of 8 annotations, each once"
    assert not deliveries.exact(3)


def test_missing_and_repeated_annotations_are_counted() -> None:
    deliveries = Deliveries(4)
    deliveries.add(0, torch.tensor([0, 0, 1]))
    deliveries.add(0, torch.tensor([0]))
    assert (deliveries.delivered, deliveries.repeated) == (2, 2)
    assert not deliveries.exact(1)
    assert deliveries.verdict(1) == "delivered 2 of 4 annotations, 2 deliveries too many"


# --- split ---


def coco_file(path: Path, images: int = 200) -> Path:
    content = {
        "info": {"year": 2017},
        "images": [{"id": 7 * i, "file_name": f"{i}.jpg"} for i in range(images)],
        "annotations": [{"id": i, "image_id": 7 * (i // 5), "caption": "a star"} for i in range(5 * images)],
    }
    path.write_text(json.dumps(content))
    return path


def test_held_out_images_and_their_captions_leave_the_training_file(tmp_path: Path) -> None:
    parts = [
        json.loads(p.read_text()) for p in hold_out(coco_file(tmp_path / "all.json"), tmp_path / "split", 0.2)
    ]
    ids = [{image["id"] for image in part["images"]} for part in parts]
    assert not ids[0] & ids[1]
    assert len(ids[0] | ids[1]) == 200
    assert 20 <= len(ids[1]) <= 60
    for part, own in zip(parts, ids, strict=True):
        assert {a["image_id"] for a in part["annotations"]} == own
        assert len(part["annotations"]) == 5 * len(own)
        assert part["info"] == {"year": 2017}


def test_the_same_images_are_held_out_whatever_else_the_file_holds(tmp_path: Path) -> None:
    _, small = hold_out(coco_file(tmp_path / "a.json", 100), tmp_path / "a", 0.3)
    _, large = hold_out(coco_file(tmp_path / "b.json", 200), tmp_path / "b", 0.3)
    few = {image["id"] for image in json.loads(small.read_text())["images"]}
    many = {image["id"] for image in json.loads(large.read_text())["images"]}
    assert few == {number for number in many if number < 700}


def test_a_single_image_cannot_be_split(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="--val-annotations"):
        hold_out(coco_file(tmp_path / "one.json", 1), tmp_path / "split", 0.5)


@pytest.mark.parametrize(
    "content",
    ["{", "[]", "3", "{}", '{"images": {}, "annotations": []}', '{"images": [], "annotations": []}',
     '{"images": [], "annotations": [{"bbox": []}]}', '{"images": [], "annotations": [3]}'],
)  # fmt: skip
def test_what_is_no_captions_file_is_refused_by_name(content: str, tmp_path: Path) -> None:
    path = tmp_path / "captions.json"
    path.write_text(content)
    with pytest.raises(DataFormatError, match=r"captions\.json"):
        read_captions(path)


# --- batches ---


@pytest.mark.parametrize("shape", [(30, 60, 3), (60, 30, 3), (7, 7, 3), (200, 3, 3)])
def test_fitted_image_keeps_its_proportions_on_grey(shape: tuple[int, int, int]) -> None:
    fitted = Fit(32)(np.full(shape, 200, dtype=np.uint8))
    assert (fitted.shape, fitted.dtype) == ((3, 32, 32), torch.uint8)
    coloured = fitted[0] == 200
    long, short = max(shape[:2]), min(shape[:2])
    assert int(coloured.sum()) == 32 * max(1, round(32 * short / long))
    assert set(fitted[0][~coloured].tolist()) <= {127}


def test_batch_stacks_images_pads_captions_and_keeps_numbers() -> None:
    vocabulary = Vocabulary(["a", "red", "star"])
    encode = Encode(vocabulary, max_tokens=9)
    image = torch.zeros(3, 8, 8, dtype=torch.uint8)
    batch = collate([(image, encode((4, "a star"))), (image, encode((9, "a red star")))])
    assert batch.images.shape == (2, 3, 8, 8)
    assert batch.captions.tolist() == [[BOS, 4, 6, EOS, PAD], [BOS, 4, 5, 6, EOS]]
    assert batch.numbers.tolist() == [4, 9]


def test_long_caption_is_cut_to_what_the_model_reads() -> None:
    _, tokens = Encode(Vocabulary(["a"]), max_tokens=5)((0, "a " * 50))
    assert len(tokens) == 6  # the model reads all but the last


# --- checkpoints ---


def test_failed_save_keeps_the_checkpoint_of_before(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "c.pt", {"model": {}, "data": 1})
    with pytest.raises((AttributeError, pickle.PicklingError)):
        checkpoint.save(tmp_path / "c.pt", {"model": lambda: None, "data": 2})
    assert checkpoint.load(tmp_path / "c.pt")["data"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["c.pt"]


@pytest.mark.parametrize("content", [b"", b"junk", b"PK\x03\x04junk", pickle.dumps({"model": 1}), None])
def test_damaged_or_foreign_checkpoint_is_refused_by_name(content: bytes | None, tmp_path: Path) -> None:
    if content is None:
        torch.save({"weights": torch.zeros(1)}, tmp_path / "c.pt")
    else:
        (tmp_path / "c.pt").write_bytes(content)
    with pytest.raises(InvalidArgument, match=r"c\.pt"):
        checkpoint.load(tmp_path / "c.pt")


# --- progress line ---


STANDING = Standing(epoch=1, num_epochs=6, done=500, total=1000, rate=250.0, loss=0.5, shards_left=3)


def test_line_shows_records_a_second_loss_and_shards_left() -> None:
    stream, clock = io.StringIO(), FakeClock()
    line = ProgressLine(stream, clock)
    line.count(200)  # this rank's own; the line shows those of all ranks
    clock.advance(2.0)
    line.draw(STANDING)
    text = stream.getvalue()
    assert text.endswith("500/1000  250 records/s  loss 0.500  shards left 3\n")
    assert text.startswith("epoch 1/6 [############------------]")


def test_terminal_line_is_drawn_over_and_ended_by_a_whole_line() -> None:
    stream = Terminal()
    line = ProgressLine(stream, FakeClock())
    line.draw(STANDING)
    line.draw(STANDING)
    assert "\n" not in stream.getvalue()
    line.say("done")
    last = stream.getvalue().split("\r")[-1]
    assert last.rstrip() == "done"
    assert last.endswith("\n")
    assert len(last) > 60  # blanks cover what was there


# --- judgement ---


@pytest.mark.parametrize(
    ("caption", "right"),
    [
        ("A red star above a blue ring.", True),
        ("a small blue ring and a large red star", True),
        ("a red star", False),
        ("a red ring and a blue star", False),
        ("a red star, a blue ring and a green heart", False),
        ("", False),
    ],
)
def test_caption_is_right_when_it_names_exactly_what_is_there(caption: str, right: bool) -> None:
    assert judge([caption], [frozenset({("red", "star"), ("blue", "ring")})]) == [right]


def test_colour_belongs_to_the_shape_behind_it() -> None:
    assert looks_named("a red and blue star") == {("blue", "star")}


def test_scenes_follow_the_order_of_the_captions_file(tmp_path: Path) -> None:
    scenes = [
        {"image_id": n, "items": [{"colour": c, "shape": "star"}]} for n, c in ((1, "red"), (2, "blue"))
    ]
    (tmp_path / "scenes.json").write_text(json.dumps(scenes))
    looks = read_scenes(tmp_path / "scenes.json", {"images": [{"id": 2}, {"id": 1}]})
    assert looks == [{("blue", "star")}, {("red", "star")}]


@pytest.mark.parametrize("content", ["{", "[]", "3", '[{"image_id": 1}]'])
def test_unusable_scenes_are_refused_by_name(content: str, tmp_path: Path) -> None:
    (tmp_path / "scenes.json").write_text(content)
    with pytest.raises(DataFormatError, match=r"scenes\.json"):
        read_scenes(tmp_path / "scenes.json", {"images": [{"id": 1}]})
