"""A job that is told to end, saves, and leaves its loop: one trainer, or ranks that step together.

The model has a weight for each record of each epoch, and a step takes 1 off for each time that the record
is in a batch. So the weights say what the model was trained on, through all incarnations. FOLDER gets
`checkpoints/`, `audit/`, a file of notes for each rank, and at the end `weights.json`.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from edl_torch import AbstractDataReader, ElasticDataLoader, load_checkpoint, save_checkpoint

RECORDS, EPOCHS, BATCH, FAILED = 800, 2, 4, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a job trains; the same in each incarnation but for `ranks`."""

    folder: Path
    ranks: int = 1
    num_workers: int = 0
    method: str = "fork"
    persistent: bool = False
    step_s: float = 0.01
    master: str = ""  # its address; empty: each incarnation has one of its own
    status: int = 0  # with which a trainer ends that was told to


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


class Notes:
    """What a rank writes down, a line for each event."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = open(folder / f"notes-{time.time_ns()}-{rank}", "w")  # noqa: SIM115
        self._about = {"pid": os.getpid(), "rank": rank}

    def note(self, event: str, step: int) -> None:
        self._file.write(json.dumps(self._about | {"event": event, "step": step, "at": time.time()}) + "\n")
        self._file.flush()


def start(settings: Settings) -> int:
    """Fork an incarnation into a session of its own; returns its process, which leads the group."""
    settings.folder.mkdir(parents=True, exist_ok=True)
    leader = os.fork()
    if leader == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os._exit(_guarded(lambda: _lead(settings)))
    return leader


def _guarded(run: Any) -> int:
    try:
        return int(run())
    except Exception:  # noqa: BLE001  the top of a process
        import traceback

        traceback.print_exc()
        return FAILED


def _lead(settings: Settings) -> int:
    torch.set_num_threads(1)
    for name in ("MASTER_ADDR", "WORLD_SIZE", "RANK", "EDL_MASTER_ADDR"):
        os.environ.pop(name, None)
    if settings.master:
        os.environ["EDL_MASTER_ADDR"] = settings.master
    if settings.ranks == 1:
        return train(settings, 0)
    store = settings.folder / f"store-{os.getpid()}"
    children = []
    for rank in range(settings.ranks):
        children.append(os.fork())
        if children[-1] == 0:
            os._exit(_guarded(lambda rank=rank: _join(settings, rank, store)))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is for the ranks
    return max(abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) for child in children)


def _join(settings: Settings, rank: int, store: Path) -> int:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=settings.ranks)
    return train(settings, rank)


def train(settings: Settings, rank: int) -> int:
    """Go on from the last checkpoint until the data is finished, or a notice comes."""
    notes = Notes(settings.folder, rank)
    together = dist.is_initialized()
    counter = Counter()
    model: nn.Module = DistributedDataParallel(counter) if together else counter
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    checkpoints = settings.folder / "checkpoints"
    with ElasticDataLoader(
        Numbers(),
        BATCH,
        num_epochs=EPOCHS,
        shuffle="shards",
        audit_dir=settings.folder / "audit",
        synchronous=together,
        num_workers=settings.num_workers,
        multiprocessing_context=settings.method if settings.num_workers else None,
        persistent_workers=settings.persistent and settings.num_workers > 0,
    ) as loader:
        loader.attach(optimizer)
        extra = load_checkpoint(checkpoints, model, optimizer, loader.service)
        step = extra["step"] if extra else 0
        notes.note("loaded", step)
        for _ in loader.epochs():
            for records in loader:
                _step(model, optimizer, loader, records)
                time.sleep(settings.step_s)
                step += 1
                notes.note("stepped", step)
                if loader.preempted:
                    save_checkpoint(checkpoints, model, optimizer, loader.service, step=step)
                    notes.note("saved", step)
                    break
        if not loader.service.finished:
            return settings.status
        # Still in the block: a signal that comes now is only noted.
        if rank == 0:
            (settings.folder / "weights.json").write_text(json.dumps(counter.weights.tolist()))
        notes.note("finished", step)
    return 0


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, loader: ElasticDataLoader, records: torch.Tensor
) -> None:
    optimizer.zero_grad()
    loader.weigh(model(loader.epoch, records)).backward()
    loader.scale_gradients(optimizer)  # the mean over all records of the step …
    everywhere = torch.tensor(float(loader.weight))
    if dist.is_initialized():
        dist.all_reduce(everywhere)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad *= everywhere  # … and their sum
    optimizer.step()
