"""A trainer that may be killed at any moment: images from a store, a model that remembers what it learnt.

    python store_trainer.py FOLDER < settings.json

It begins again from its last checkpoint. Each batch is one line of its output.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from edl_torch import ElasticDataLoader

EPOCHS, BATCH, EVERY = 3, 8, 3


class Counts(nn.Module):
    """How often each record was in a step."""

    def __init__(self, records: int) -> None:
        super().__init__()
        self.learnt = nn.Parameter(torch.zeros(records))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return -self.learnt[numbers].sum()


def numbers_of(batch: Any) -> torch.Tensor:
    """The numbers of a batch's records: of rows their column `n`, of samples their class, of lines and
    bytes the first word, of pictures the first pixel."""
    if isinstance(batch, dict):
        return torch.as_tensor(batch["n" if "n" in batch else "cls"]).long()
    if isinstance(batch[0], str | bytes):
        return torch.tensor([int(record.split()[0]) for record in batch])
    pixels = batch[0][:, 0, 0].long()
    return pixels[:, 0] + 250 * pixels[:, 1]


def main(folder: Path, settings: dict[str, Any]) -> None:
    """Run to the end of the job, from the checkpoint where there is one."""
    model = Counts(settings["records"])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    saved = folder / "checkpoint.pt"
    loader = ElasticDataLoader(
        settings["url"],
        batch_size=BATCH,
        num_epochs=EPOCHS,
        shuffle=True,
        storage_options=settings["options"],
        num_workers=settings["workers"],
        num_threads=settings["threads"] or None,
        on_bad_record="quarantine",
        max_bad_records=settings["records"],
        audit_dir=folder / "audit",
    )

    def save() -> None:
        state = {"model": model.state_dict(), "loader": json.dumps(loader.state_dict())}
        torch.save(state, folder / "part")
        os.replace(folder / "part", saved)

    with loader:
        loader.attach(optimizer)
        if saved.exists():
            state = torch.load(saved, weights_only=True)
            model.load_state_dict(state["model"])
            loader.load_state_dict(json.loads(state["loader"]))
        else:  # a kill may come before the first batch's, and a new model would lack what the master knows of
            save()
        for _ in loader.epochs():
            for number, batch in enumerate(loader):
                optimizer.zero_grad()
                model(numbers_of(batch)).backward()
                optimizer.step()
                print(number, flush=True)
                if number % EVERY == 0:
                    save()
        assert loader.service.progress().quarantined == 0
    torch.save(model.state_dict(), folder / "model.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.load(sys.stdin))
