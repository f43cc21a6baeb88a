"""Wrong input to train.py is one line on stderr and status 2, before anything is trained."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import options
import pytest
import torch
import train


@pytest.fixture(autouse=True)
def no_master(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EDL_MASTER_ADDR", "MASTER_ADDR", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def given(tmp_path: Path) -> list[str]:
    """Arguments that are right."""
    images = tmp_path / "images"
    images.mkdir()
    captions = tmp_path / "captions.json"
    content = {
        "images": [{"id": i, "file_name": f"{i}.jpg"} for i in range(40)],
        "annotations": [{"id": i, "image_id": i, "caption": "a star"} for i in range(40)],
    }
    captions.write_text(json.dumps(content))
    return [
        "--images",
        str(images),
        "--annotations",
        str(captions),
        "--output",
        str(tmp_path / "out"),
        "--device",
        "cpu",
    ]


def error_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert train.main(arguments) == 2
    captured = capsys.readouterr().err
    assert captured.startswith("error: ")
    assert captured.count("\n") == 1
    return captured


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--images DIR and --annotations JSON, or --demo"),
        (["--images", "x"], "--images DIR and --annotations JSON, or --demo"),
        (["--demo", "--images", "x"], "--demo draws its own dataset"),
        (["--epochs", "0"], "'0' is not a whole number from 1"),
        (["--batch-size", "many"], "'many' is not a whole number from 1"),
        (["--workers", "-1"], "'-1' is not a whole number from 0"),
        (["--lr", "nan"], "'nan' is not a positive number"),
        (["--lr", "-1"], "'-1' is not a positive number"),
        (["--val-share", "1"], "'1' is not a share between 0 and 1"),
        (["--width", "20"], "'20' is not a multiple of 8"),
        (["--image-size", "2"], "'2' is not a whole number from 16"),
        (["--device", "abacus"], "--device abacus"),
        (["--frobnicate"], "--frobnicate"),
    ],
)
def test_arguments_that_cannot_be_used(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in error_of(arguments, capsys)


def test_missing_image_folder(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "nowhere does not exist" in error_of([*given, "--images", "nowhere"], capsys)


def test_missing_annotations(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "nothing.json does not exist" in error_of([*given, "--annotations", "nothing.json"], capsys)


def test_missing_held_out_annotations(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "val.json does not exist" in error_of([*given, "--val-annotations", "val.json"], capsys)


def test_held_out_images_without_captions(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "--val-images needs --val-annotations" in error_of([*given, "--val-images", "x"], capsys)


def test_annotations_of_another_kind(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = tmp_path / "instances.json"
    wrong.write_text('{"images": [], "annotations": [{"id": 1, "bbox": [0, 0, 1, 1]}], "categories": []}')
    assert "instances.json is not a COCO captions file" in error_of(
        [*given, "--annotations", str(wrong)], capsys
    )


@pytest.mark.parametrize(
    ("images", "annotation", "message"),
    [
        ([{"file_name": "1.jpg"}], {"image_id": 1}, "its images need a number 'id' each"),
        ([{"id": 1, "file_name": "1.jpg"}], {}, "its annotations need a number 'image_id' each"),
    ],
)
def test_annotations_without_numbers(
    images: list[dict[str, Any]],
    annotation: dict[str, Any],
    message: str,
    given: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    wrong = tmp_path / "captions.json"
    wrong.write_text(json.dumps({"images": images, "annotations": [{"caption": "a star"} | annotation]}))
    assert message in error_of([*given, "--annotations", str(wrong)], capsys)


def test_annotations_that_are_no_json(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = tmp_path / "captions.csv"
    wrong.write_text("file_name,caption\n")
    assert "captions.csv is not JSON" in error_of([*given, "--annotations", str(wrong)], capsys)


def test_output_that_cannot_be_written(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot write into the output folder" in error_of(
        [*given, "--output", str(tmp_path / "file/out")], capsys
    )


def test_checkpoint_that_is_missing(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "checkpoint.pt does not exist" in error_of([*given, "--resume"], capsys)
    assert "gone.pt does not exist" in error_of([*given, "--resume", "gone.pt"], capsys)


def test_checkpoint_that_is_none(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.pt").write_bytes(b"junk")
    assert "c.pt is not a checkpoint" in error_of([*given, "--resume", str(tmp_path / "c.pt")], capsys)


def test_help_lists_every_argument(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        train.main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    wanted = "images annotations epochs batch-size workers device output resume master demo"
    for argument in wanted.split():
        assert f"--{argument}" in text


def test_resume_without_a_file_means_the_last_checkpoint() -> None:
    parsed = options.parse(["--demo", "--output", "here", "--resume"])
    assert parsed.resume == Path("here/checkpoint.pt")


@pytest.mark.parametrize(
    ("variables", "shared"),
    [
        ({}, False),
        ({"EDL_MASTER_ADDR": "h:1"}, True),
        ({"MASTER_ADDR": "h"}, False),
        ({"MASTER_ADDR": "h:1"}, True),
        ({"MASTER_ADDR": "fd00::1", "TORCHELASTIC_RUN_ID": "run"}, False),
        ({"EDL_MASTER_ADDR": "h:1", "TORCHELASTIC_RUN_ID": "run"}, True),
    ],
)
def test_master_of_the_environment_means_shared_data(
    variables: dict[str, str], shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert options.parse(["--demo"]).shared is shared


def test_device_is_chosen_where_none_is_named() -> None:
    assert isinstance(options.parse(["--demo"]).device, torch.device)


def test_learning_rate_warms_up_and_falls() -> None:
    rates = [train.schedule(step / 100) for step in range(101)]
    assert rates[0] < 0.1
    assert max(rates) > 0.9
    assert rates[-1] < 0.02
    assert all(a >= b for a, b in pairwise(rates[5:]))
