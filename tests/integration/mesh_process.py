"""The ranks of a job that holds models in parts, for `test_mesh_ranks.py`: gradients as one process has.

    python mesh_process.py STORE FOLDER

Four ranks over gloo, forked, train in meshes of 2 x 2: one with tensor parallelism in FSDP2 (`tp`), and one
with hybrid-sharded FSDP2 (`hsdp`). Each trains an epoch, saves, takes a step more, goes back to what was
saved, and trains the other epoch. Each writes JSON into the folder.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lockstep_process import VectorReader, full_gradients, loss_of, new_model, worst_difference
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from edl_torch import ElasticDataLoader, load_checkpoint, save_checkpoint

WORLD, RECORDS = 4, 29
DIMENSIONS = {"tp": ("dp", "tp"), "hsdp": ("replicate", "shard")}


def wrap(model: nn.Module, kind: str, mesh: DeviceMesh) -> nn.Module:
    if kind == "hsdp":
        return fully_shard(model, mesh=mesh)  # type: ignore[return-value]
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["dp"])  # type: ignore[return-value]


class Job:
    """One rank's model, data, and what it found."""

    def __init__(self, kind: str, folder: Path) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=DIMENSIONS[kind])
        self.checkpoints = folder / kind
        self.reader = VectorReader(RECORDS)
        self.model = wrap(new_model(), kind, mesh)
        self.reference = new_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.loader = ElasticDataLoader(
            *(self.reader, 3),
            dataset_name=kind,
            num_epochs=2,
            shuffle=True,
            mesh=mesh,
            dp="dp" if kind == "tp" else DIMENSIONS[kind],
        )
        self.loader.attach(self.optimizer)
        self.worst = 0.0
        self.trained: dict[str, list[int]] = {"first": [], "again": []}
        self.trainers = 0

    def run(self) -> dict[str, Any]:
        """Train."""
        service = self.loader.service
        load_checkpoint(self.checkpoints, self.model, self.optimizer, service)
        self.epoch("first")
        save_checkpoint(self.checkpoints, self.model, self.optimizer, service)
        self.epoch("left", steps=1)
        load_checkpoint(self.checkpoints, self.model, self.optimizer, service)
        self.epoch("again")
        assert service.finished
        return {"worst": self.worst, "trained": self.trained, "trainers": self.trainers}

    def epoch(self, name: str, steps: int = RECORDS) -> None:
        """Train on the epoch that runs, or on its first steps."""
        for step, (index, x, y) in enumerate(self.loader, 1):
            records = index.tolist() if self.loader.weight else []
            self.trained.setdefault(name, []).extend(records)
            self.trainers = self.loader.progress().trainers
            self.optimizer.zero_grad()
            self.loader.weigh(loss_of(self.model, x, y)).backward()
            self.loader.scale_gradients(self.optimizer)
            self.compare(records)
            self.optimizer.step()
            if step == steps:
                break

    def compare(self, records: list[int]) -> None:
        """With one process over the records of all ranks, each once."""
        for mine, theirs in zip(self.reference.parameters(), self.model.parameters(), strict=True):
            assert isinstance(theirs, DTensor)
            mine.data.copy_(theirs.full_tensor())
        found = full_gradients(self.model)
        union: list[Any] = [None] * WORLD
        dist.all_gather_object(union, records)
        each = sorted({number for part in union for number in part})
        worst = worst_difference(self.reference, self.reader, each, found, loss_of)
        self.worst = max(self.worst, worst)


def run_rank(rank: int, store: str, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    found = {}
    for kind in DIMENSIONS:
        job = Job(kind, folder)
        with job.loader:
            found[kind] = job.run()
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main(store: str, folder: str) -> int:
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run_rank, args=(rank, store, Path(folder))) for rank in range(WORLD)]
    for rank in ranks:
        rank.start()
    failed = False
    while not failed and (running := [rank.sentinel for rank in ranks if rank.is_alive()]):
        wait(running)
        failed = any(rank.exitcode for rank in ranks)
    for rank in ranks:
        rank.kill()  # where one has failed: the others would wait for it
    return failed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
