"""A job over tars whose model counts what it was trained on, and which kills itself where it is told.

`python tar_program.py DATA FOLDER RECORDS WORKERS PLACE BATCH`: it trains two epochs and saves at each third
batch; at the batch of that number (0: none) it dies at PLACE: "read", "backward", "step" or "saved".
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

from edl_torch import ElasticDataLoader, load_checkpoint, save_checkpoint
from edl_torch.readers import TarReader

EPOCHS = 2


def main(data: str, folder: Path, records: int, workers: int, place: str, last: int) -> None:
    """Train until the end, or death."""
    counter = torch.nn.Embedding(records, 1)
    torch.nn.init.zeros_(counter.weight)
    optimizer = torch.optim.SGD(counter.parameters(), lr=1.0)
    batches = 0

    def come_to(here: str) -> None:
        if batches == last and here == place:
            os.kill(os.getpid(), signal.SIGKILL)

    with ElasticDataLoader(
        TarReader(data, fields=("cls", "txt")),
        batch_size=4,
        shuffle=True,
        num_epochs=EPOCHS,
        num_workers=workers,
        audit_dir=folder / "audit",
    ) as loader:
        load_checkpoint(folder / "checkpoints", counter, optimizer, loader.service)
        for _ in loader.epochs():
            for numbers, texts in loader:
                batches += 1
                assert [int(text) for text in texts] == numbers.tolist()
                come_to("read")
                optimizer.zero_grad()
                (-counter(numbers).sum()).backward()
                come_to("backward")
                optimizer.step()
                come_to("step")
                if batches % 3 == 0:
                    save_checkpoint(folder / "checkpoints", counter, optimizer, loader.service)
                    come_to("saved")
    torch.save(counter.weight.detach().flatten(), folder / "counts.pt")


if __name__ == "__main__":
    data, folder, records, workers, place, last = sys.argv[1:]
    main(data, Path(folder), int(records), int(workers), place, int(last))
