"""Train a small classifier with a Trainer. Started again, it goes on from its last checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class Points(torch.utils.data.Dataset):
    """Points of the plane, and whether they lie inside of a circle."""

    def __init__(self, size: int) -> None:
        self.points = torch.rand(size, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        point = self.points[index]
        return {"points": point, "labels": (point.norm() < 0.8).long()}


class Classifier(torch.nn.Module):
    """Two layers and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))

    def forward(self, points: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(points)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def main(output: str) -> None:
    Path(output).mkdir(parents=True, exist_ok=True)
    args = TrainingArguments(
        output, per_device_train_batch_size=16, num_train_epochs=4, save_steps=20, report_to=[]
    )
    points = Points(1000)
    trainer = Trainer(model=Classifier(), args=args, train_dataset=points)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(output))


if __name__ == "__main__":
    main(sys.argv[1])
