"""One worker of a torchrun job, for `test_torchrun.py`: synchronous ranks train a model that counts.

    torchrun … torchrun_worker.py FOLDER

The model has a weight for each record of each epoch, and a step takes 1 off for each time that the record is
in a batch. So the final weights say what the model was trained on, whatever was killed on the way. FOLDER
gets `checkpoints/`, `audit/`, a line a step in `steps/`, and at the end `weights.json`. While there is no
file `go` a step takes long. With a variable LATE the service is made only after this job's master is there;
with NOTICES a worker that is told to end saves, and ends with TOLD. SHUFFLE_WINDOW, LOADER_WORKERS and
NUM_THREADS are the loader's.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import quick_imports
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from edl_torch import (
    AbstractDataReader,
    DataShardService,
    ElasticDataLoader,
    ShardedDataset,
    load_checkpoint,
    save_checkpoint,
)
from edl_torch.client.torchrun import init_process_group
from edl_torch.testing import wait_until

RECORDS, EPOCHS, BATCH = 750, 2, 4
SAVE_EVERY = int(os.environ.get("SAVE_EVERY", 5))  # steps
SLOW_S = 0.25
TOLD = 143  # as if the signal had ended it: it has not finished


class Numbers(AbstractDataReader):
    """Record `i` is `i`."""

    def create_shards(self, mode: Any = None) -> dict[str, int]:
        return {"a": RECORDS // 3, "b": RECORDS - RECORDS // 3}

    def read_records(self, task: Any) -> Iterator[int]:
        first = 0 if task.shard_name == "a" else RECORDS // 3
        return iter(range(first + task.start, first + task.end))


class Counter(nn.Module):
    """The mean of the weights of the records in a batch, of one epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(EPOCHS, RECORDS))

    def forward(self, epoch: int, records: torch.Tensor) -> torch.Tensor:
        return self.weights[epoch, records].mean()


class Diary:
    """What a test can watch of this worker."""

    def __init__(self, folder: Path) -> None:
        self._file = open(folder / f"{os.getpid()}.jsonl", "a")  # noqa: SIM115
        self._about = {name.lower(): int(os.environ[name]) for name in ("RANK", "WORLD_SIZE")}
        self._about |= {"pid": os.getpid(), "agent": os.getppid()}

    def note(self, **what: Any) -> None:
        self._file.write(json.dumps(self._about | what) + "\n")
        self._file.flush()


def main(folder: Path) -> None:
    quick_imports.over()
    torch.set_num_threads(1)
    init_process_group("gloo")
    diary = Diary(folder / "steps")
    counter = Counter()
    model = DistributedDataParallel(counter)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if "LATE" in os.environ:
        wait_until(lambda: any(folder.glob("logs/*/*/edl_torch_master.address")), timeout_s=60)
    reader = Numbers()
    service = DataShardService(
        BATCH,
        reader=reader,
        num_epochs=EPOCHS,
        shuffle_shards=True,
        shuffle_window=number_from("SHUFFLE_WINDOW"),
        audit_dir=folder / "audit",
    )
    with service:
        workers = number_from("LOADER_WORKERS") or 0
        loader = ElasticDataLoader(
            ShardedDataset(service, reader),
            synchronous=True,
            num_workers=workers,
            persistent_workers=workers > 0,
            num_threads=number_from("NUM_THREADS"),
        )
        service.attach(optimizer)
        extra = load_checkpoint(folder / "checkpoints", model, optimizer, service)
        step = extra["step"] if extra else 0
        diary.note(master=service.session.master.address, from_step=step)
        while not service.finished:
            for records in loader:
                train(model, optimizer, loader, records)
                step += 1
                diary.note(step=step, epoch=loader.epoch)
                if step % SAVE_EVERY == 0:
                    save_checkpoint(folder / "checkpoints", model, optimizer, service, step=step)
                if "NOTICES" in os.environ and loader.preempted:
                    save_checkpoint(folder / "checkpoints", model, optimizer, service, step=step)
                    diary.note(told_at=step)
                    sys.exit(TOLD)
                if not (folder / "go").exists():
                    time.sleep(SLOW_S)
    if dist.get_rank() == 0:
        (folder / "weights.json").write_text(json.dumps(counter.weights.tolist()))
    dist.destroy_process_group()


def number_from(variable: str) -> int | None:
    """A number that a test gives."""
    text = os.environ.get(variable)
    return int(text) if text else None


def train(model: nn.Module, optimizer: Any, loader: ElasticDataLoader, records: torch.Tensor) -> None:
    optimizer.zero_grad()
    loader.weigh(model(loader.epoch, records)).backward()
    loader.scale_gradients(optimizer)  # the mean over all records of the step …
    everywhere = torch.tensor(float(loader.weight))
    dist.all_reduce(everywhere)
    for parameter in model.parameters():
        parameter.grad *= everywhere  # … and their sum
    optimizer.step()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
