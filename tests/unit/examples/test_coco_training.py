"""train.py as a whole on a tiny dataset: it learns, stops, goes on, and counts its deliveries."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import cv2
import generate
import pytest
import torch
import train

TINY = [
    "--epochs",
    "2",
    "--batch-size",
    "8",
    "--width",
    "16",
    "--image-size",
    "32",
    "--device",
    "cpu",
    "--threads",
    "1",
]


@pytest.fixture(autouse=True)
def no_master(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EDL_MASTER_ADDR", "MASTER_ADDR", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("training") / "data"
    generate.generate(folder, generate.Recipe(images=30, val=4, size=32))
    return folder


def arguments(dataset: Path, output: Path, *more: str) -> list[str]:
    files = [
        *("--images", str(dataset / "images/train"), "--annotations", str(dataset / "captions_train.json")),
        *(
            "--val-images",
            str(dataset / "images/val"),
            "--val-annotations",
            str(dataset / "captions_val.json"),
        ),
        *("--scenes", str(dataset / "scenes_val.json"), "--output", str(output)),
    ]
    return [*files, *TINY, *more]


def weights(output: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(output / "checkpoint.pt", weights_only=True)["model"]
    return found


def assert_same_weights(left: Path, right: Path) -> None:
    ours, theirs = weights(left), weights(right)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def interrupt_at(step: int, monkeypatch: pytest.MonkeyPatch, number: int = signal.SIGINT) -> None:
    """Send a signal to this process while batch `step` is trained on."""
    original = train.Trainer._step
    taken = 0

    def counted(self: train.Trainer, batch: Any, batches_in_epoch: int) -> None:
        nonlocal taken
        original(self, batch, batches_in_epoch)
        taken += 1
        if taken == step:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(train.Trainer, "_step", counted)


def test_run_delivers_every_annotation_once_and_writes_its_results(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main(arguments(dataset, tmp_path, "--workers", "0")) == 0
    printed = capsys.readouterr().out
    assert "delivered 300 of 300 annotations, each once" in printed
    assert "held-out loss" in printed
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert [epoch["records"] for epoch in metrics["epochs"]] == [150, 150]
    assert metrics["epochs"][1]["loss"] < metrics["epochs"][0]["loss"]
    assert metrics["deliveries"] == {"expected": 300, "delivered": 300, "repeated": 0}
    assert metrics["held_out"]["pictures"] == 4
    assert cv2.imread(str(tmp_path / "captions.png")) is not None


def test_same_seed_gives_the_same_weights_and_another_seed_others(dataset: Path, tmp_path: Path) -> None:
    for name, seed in (("a", "0"), ("b", "0"), ("c", "1")):
        assert train.main(arguments(dataset, tmp_path / name, "--workers", "0", "--seed", seed)) == 0
    assert_same_weights(tmp_path / "a", tmp_path / "b")
    assert not torch.equal(weights(tmp_path / "a")["words.weight"], weights(tmp_path / "c")["words.weight"])


@pytest.mark.parametrize("step", [1, *(pytest.param(step, marks=pytest.mark.long) for step in (8, 19)), 25])
def test_interrupted_run_goes_on_to_the_same_weights(
    step: int,
    dataset: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train.main(arguments(dataset, tmp_path / "whole", "--workers", "0")) == 0
    with monkeypatch.context() as patch:
        interrupt_at(step, patch)
        assert train.main(arguments(dataset, tmp_path / "parts", "--workers", "0")) == 130
    error = capsys.readouterr().err
    assert error.startswith("stopped: go on with --resume")
    assert error.count("\n") == 1
    assert train.main(arguments(dataset, tmp_path / "parts", "--workers", "0", "--resume")) == 0
    assert "delivered 300 of 300 annotations, each once" in capsys.readouterr().out
    assert_same_weights(tmp_path / "whole", tmp_path / "parts")


def test_signal_before_the_first_batch_leaves_a_checkpoint_to_go_on_from(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        original = train._make_loader

        def interrupted(*given: Any) -> Any:
            os.kill(os.getpid(), signal.SIGINT)
            return original(*given)

        patch.setattr(train, "_make_loader", interrupted)
        assert train.main(arguments(dataset, tmp_path, "--workers", "0")) == 130
    assert train.main(arguments(dataset, tmp_path, "--workers", "0", "--resume")) == 0
    assert "delivered 300 of 300 annotations, each once" in capsys.readouterr().out


def test_a_second_signal_does_not_wait_for_the_checkpoint(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def twice(*_: Any) -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(train.Trainer, "_look_around", twice)
        assert train.main(arguments(dataset, tmp_path, "--workers", "0")) == 130
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.slow
def test_loader_processes_change_nothing_in_the_count_when_interrupted(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        interrupt_at(7, patch, signal.SIGTERM)
        assert train.main(arguments(dataset, tmp_path, "--workers", "2")) == 143
    assert train.main(arguments(dataset, tmp_path, "--workers", "2", "--resume")) == 0
    assert "delivered 300 of 300 annotations, each once" in capsys.readouterr().out


def test_resuming_a_finished_run_only_evaluates_it(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main(arguments(dataset, tmp_path, "--workers", "0")) == 0
    before = weights(tmp_path)
    (tmp_path / "captions.png").unlink()
    capsys.readouterr()
    assert train.main(arguments(dataset, tmp_path, "--workers", "0", "--resume")) == 0
    assert "delivered 300 of 300 annotations, each once" in capsys.readouterr().out
    assert (tmp_path / "captions.png").exists()
    assert torch.equal(before["words.weight"], weights(tmp_path)["words.weight"])


def test_images_are_held_out_where_no_validation_file_is_named(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--images", str(dataset / "images/train"), "--annotations", str(dataset / "captions_train.json")]
    more = ["--val-share", "0.2", "--workers", "0", "--output", str(tmp_path)]
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
    assert train.main(arguments(dataset, tmp_path, "--workers", "0", "--images", str(empty))) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "the file is missing" in error
