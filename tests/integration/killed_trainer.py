"""The README's loop without `attach()`, with a checkpoint, as a process that dies at one of its calls.

    python killed_trainer.py FOLDER CALL

It kills itself as `kill -9` does, when Python makes its CALL-th call in the loop (0: never). The model
remembers: each record adds 1 to a weight of its own.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from edl_torch import ElasticDataLoader, load_checkpoint, save_checkpoint

RECORDS, EPOCHS, BATCH, EVERY = 60, 2, 4, 3


class Counts(torch.nn.Module):
    """At a rate of 1 each record adds 1 to its own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.learnt = torch.nn.Parameter(torch.zeros(RECORDS))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return -self.learnt[batch].sum()


def dies_at(call: int) -> Any:
    """What Python tells of each call."""
    left = call

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return count if call else None


def main(folder: Path, call: int) -> None:
    """Train to the end, or die."""
    model = Counts()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    options: dict[str, Any] = {"batch_size": BATCH, "num_epochs": EPOCHS, "shuffle": True, "seed": 5}
    checkpoints = str(folder / "checkpoints")
    with ElasticDataLoader(torch.arange(RECORDS), audit_dir=folder / "audit", **options) as loader:
        load_checkpoint(checkpoints, model, optimizer, loader.service)
        sys.setprofile(dies_at(call))
        step = 0
        for _ in loader.epochs():
            for batch in loader:
                optimizer.zero_grad()
                model(batch).backward()
                optimizer.step()
                step += 1
                if step % EVERY == 0:
                    save_checkpoint(checkpoints, model, optimizer, loader.service)
        sys.setprofile(None)
        save_checkpoint(checkpoints, model, optimizer, loader.service)
    torch.save(model.state_dict(), folder / "model.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
