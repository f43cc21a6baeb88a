"""Runs of train.py on a tiny dataset: its arguments, and the weights that come out."""

from __future__ import annotations

from pathlib import Path

import torch


def arguments(dataset: Path, output: Path, *more: str) -> list[str]:
    """Two epochs of 19 batches."""
    return [
        *("--images", str(dataset / "images/train"), "--annotations", str(dataset / "captions_train.json")),
        *("--val-images", str(dataset / "images/val")),
        *("--val-annotations", str(dataset / "captions_val.json")),
        *("--scenes", str(dataset / "scenes_val.json"), "--output", str(output)),
        *TINY,
        *("--workers", "0", *more),
    ]


TINY = (
    *("--epochs", "2", "--batch-size", "8", "--width", "16", "--image-size", "32"),
    *("--device", "cpu", "--threads", "1"),
)


def weights(output: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(output / "checkpoint.pt", weights_only=True)["model"]
    return found


def differing(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    """The weights that are not bit for bit the same."""
    assert ours.keys() == theirs.keys()
    return [name for name in ours if not torch.equal(ours[name], theirs[name])]
