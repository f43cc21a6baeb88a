"""train.py as a whole on a tiny dataset: it learns, stops, goes on, and counts its deliveries."""

from __future__ import annotations

import json
import os
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import cv2
import options
import pytest
import torch
import train
from coco_kit import TINY, arguments, differing, weights


def interrupt_at(step: int, monkeypatch: pytest.MonkeyPatch, number: int = signal.SIGINT) -> None:
    """Send a signal to this process while batch `step` is trained on."""
    original = train.Trainer.step
    taken = 0

    def counted(self: train.Trainer, batch: Any, batches_in_epoch: int) -> None:
        nonlocal taken
        original(self, batch, batches_in_epoch)
        taken += 1
        if taken == step:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(train.Trainer, "step", counted)


def test_run_delivers_every_annotation_once_and_writes_its_results_again_when_it_is_resumed(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main(arguments(dataset, tmp_path)) == 0
    printed = capsys.readouterr().out
    assert "delivered 300 of 300 annotations, each once" in printed
    assert "held-out loss" in printed
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert [epoch["records"] for epoch in metrics["epochs"]] == [150, 150]
    assert metrics["epochs"][1]["loss"] < metrics["epochs"][0]["loss"]
    assert metrics["deliveries"] == {"expected": 300, "delivered": 300, "repeated": 0}
    assert metrics["held_out"]["pictures"] == 4
    assert cv2.imread(str(tmp_path / "captions.png")) is not None
    before = weights(tmp_path)
    (tmp_path / "captions.png").unlink()
    assert train.main(arguments(dataset, tmp_path, "--resume")) == 0
    assert "delivered 300 of 300 annotations, each once" in capsys.readouterr().out
    assert (tmp_path / "captions.png").exists()
    assert differing(before, weights(tmp_path)) == []


def test_another_seed_gives_other_weights(
    dataset: Path, tmp_path: Path, uninterrupted: dict[str, torch.Tensor]
) -> None:
    assert train.main(arguments(dataset, tmp_path, "--seed", "1")) == 0
    assert "words.weight" in differing(uninterrupted, weights(tmp_path))


@pytest.mark.parametrize("step", [1, *(pytest.param(step, marks=pytest.mark.long) for step in (8, 19)), 25])
def test_interrupted_run_goes_on_to_the_same_weights(
    step: int,
    dataset: Path,
    tmp_path: Path,
    uninterrupted: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with monkeypatch.context() as patch:
        interrupt_at(step, patch)
        assert train.main(arguments(dataset, tmp_path)) == 130
    error = capsys.readouterr().err
    assert error.startswith("stopped: go on with --resume")
    assert error.count("\n") == 1
    assert train.main(arguments(dataset, tmp_path, "--resume")) == 0
    assert "delivered 300 of 300 annotations, each once" in capsys.readouterr().out
    assert differing(uninterrupted, weights(tmp_path)) == []


def test_signal_before_the_first_batch_leaves_a_checkpoint_to_go_on_from(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        original = train.make_loader

        def interrupted(*given: Any) -> Any:
            os.kill(os.getpid(), signal.SIGINT)
            return original(*given)

        patch.setattr(train, "make_loader", interrupted)
        assert train.main(arguments(dataset, tmp_path)) == 130
    assert train.main(arguments(dataset, tmp_path, "--resume")) == 0
    assert "delivered 300 of 300 annotations, each once" in capsys.readouterr().out


def test_a_second_signal_does_not_wait_for_the_checkpoint(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def twice(*_: Any) -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(train.Trainer, "look_around", twice)
        assert train.main(arguments(dataset, tmp_path)) == 130
    assert "interrupted" in capsys.readouterr().err


def test_loader_processes_change_nothing_in_the_count_when_interrupted(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        interrupt_at(7, patch, signal.SIGTERM)
        assert train.main(arguments(dataset, tmp_path, "--workers", "2")) == 143
    assert train.main(arguments(dataset, tmp_path, "--workers", "2", "--resume")) == 0
    assert "delivered 300 of 300 annotations, each once" in capsys.readouterr().out


def test_images_are_held_out_where_no_validation_file_is_named(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--images", str(dataset / "images/train"), "--annotations", str(dataset / "captions_train.json")]
    more = ["--val-share", "0.2", "--output", str(tmp_path)]
    assert train.main([*files, *TINY, *more]) == 0
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    held = metrics["held_out"]["pictures"]
    assert 0 < held < 30
    assert metrics["held_out"]["right"] is None
    assert metrics["deliveries"]["delivered"] == 2 * 5 * (30 - held)


def test_missing_picture_is_named_in_one_line(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert train.main(arguments(dataset, tmp_path, "--images", str(empty))) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "the file is missing" in error


# Wrong input to train.py is one line on stderr and status 2, before anything is trained ---------------------


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
    files = ("--images", str(images), "--annotations", str(captions), "--output", str(tmp_path / "out"))
    return [*files, "--device", "cpu"]


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


CAPTIONS = {
    "images": [{"id": 1, "file_name": "1.jpg"}],
    "annotations": [{"image_id": 1, "caption": "a star"}],
}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--images", "nowhere"], "nowhere does not exist"),
        (["--annotations", "nothing.json"], "nothing.json does not exist"),
        (["--val-annotations", "val.json"], "val.json does not exist"),
        (["--val-images", "x"], "--val-images needs --val-annotations"),
        (["--annotations", "boxes.json"], "boxes.json is not a COCO captions file"),
        (["--annotations", "nameless.json"], "its images need a number 'id' each"),
        (["--annotations", "ownerless.json"], "its annotations need a number 'image_id' each"),
        (["--annotations", "junk"], "junk is not JSON"),
        (["--output", "junk/out"], "cannot write into the output folder"),
        (["--resume"], "checkpoint.pt does not exist"),
        (["--resume", "gone.pt"], "gone.pt does not exist"),
        (["--resume", "junk"], "junk is not a checkpoint"),
    ],
)
def test_files_that_cannot_be_used(
    more: list[str],
    message: str,
    given: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    wrong = {
        "boxes.json": {"images": [], "annotations": [{"id": 1, "bbox": [0, 0, 1, 1]}], "categories": []},
        "nameless.json": CAPTIONS | {"images": [{"file_name": "1.jpg"}]},
        "ownerless.json": CAPTIONS | {"annotations": [{"caption": "a star"}]},
    }
    for name, content in wrong.items():
        (tmp_path / name).write_text(json.dumps(content))
    (tmp_path / "junk").write_text("file_name,caption\n")
    monkeypatch.chdir(tmp_path)
    assert message in error_of([*given, *more], capsys)


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


def test_learning_rate_warms_up_and_falls() -> None:
    rates = [train.schedule(step / 100) for step in range(101)]
    assert rates[0] < 0.1
    assert max(rates) > 0.9
    assert rates[-1] < 0.02
    assert all(a >= b for a, b in pairwise(rates[5:]))
