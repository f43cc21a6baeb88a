"""The ranks of jobs, for `test_process_group.py`: train with DDP or FSDP2 and compare each window's gradients
with those of one process over the same union of batches. Each rank writes JSON to a file.

The ranks are forked, so that torch is imported once for all of them. With `--device cuda` all that a model
does goes over nccl, which takes no tensor of the processor's. With `--elsewhere` models are on the processor,
but the default group and the loader's take no tensor of its either.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from edl_torch import AbstractDataReader, DataShardService, ElasticDataLoader, ShardedDataset

FEATURES = 5
INITIAL_SCALE = 2.0**16  # of a GradScaler


class VectorReader(AbstractDataReader):
    """Record `i` is `(i, x, y)`, made from `i`."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def create_shards(self, mode: Any = None) -> dict[str, int]:
        return {"vectors": self.count}

    def read_records(self, task: Any) -> Iterator[tuple[int, np.ndarray, float]]:
        return (self.read_record(task.shard_name, index) for index in range(task.start, task.end))

    def read_record(self, name: str, index: int) -> tuple[int, Any, float]:
        values = np.random.default_rng(index).standard_normal(FEATURES + 1)
        return index, values[:FEATURES], float(values[FEATURES])


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x)[:, 0], y)


def weighted_loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A mean that is not one over records, as of tokens or with class weights."""
    return (shares_of(y) * (model(x)[:, 0] - y).square()).sum() / shares_of(y).sum()


def shares_of(y: torch.Tensor) -> torch.Tensor:
    return 0.3 + (y > 0) + y.abs()


def full_gradients(model: nn.Module) -> list[torch.Tensor]:
    gradients = [parameter.grad for parameter in model.parameters()]
    return [g.full_tensor() if isinstance(g, DTensor) else g.clone() for g in gradients if g is not None]


def worst_difference(
    model: nn.Module,
    reader: VectorReader,
    records: list[int],
    found: list[torch.Tensor],
    loss_of: Callable[..., torch.Tensor],
) -> float:
    """How far `found` is from the gradients of the mean over `records`, relative to their norm."""
    rows = [reader.read_record("", index) for index in records]
    device = next(model.parameters()).device
    x = torch.from_numpy(np.stack([row[1] for row in rows])).to(device)
    y = torch.tensor([row[2] for row in rows], dtype=torch.float64, device=device)
    model.zero_grad()
    loss_of(model, x, y).backward()
    wanted = [parameter.grad for parameter in model.parameters()]
    pairs = [(a, b) for a, b in zip(found, wanted, strict=True) if b is not None]
    differences = [float((a - b).norm() / b.norm()) for a, b in pairs]
    return max(differences) if all(map(math.isfinite, differences)) else math.inf  # of NaN, max is blind


def wrap(model: nn.Module, kind: str, group: dist.ProcessGroup) -> nn.Module:
    if kind == "fsdp2":
        mesh = dist.device_mesh.DeviceMesh.from_group(group, next(model.parameters()).device.type)
        return fully_shard(model, mesh=mesh)  # type: ignore[return-value]
    return DistributedDataParallel(model, process_group=group)


def train(
    options: argparse.Namespace, size: int, group: dist.ProcessGroup, loaders: dist.ProcessGroup
) -> dict[str, Any]:
    """One job of the first `size` ranks; what it found. The loader gets a group of its own."""
    rank, device = dist.get_rank(), options.device
    reader = VectorReader(options.records)
    model = wrap(new_model().to(device), options.wrap, group)
    if options.compile:
        model.compile(backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler(device, enabled=options.amp)
    service = DataShardService(
        3, reader=reader, dataset_name=f"size{size}", num_epochs=2, records_per_shard=7, shuffle_shards=True
    )
    worst, steps, poisoned, trained = 0.0, 0, 0, list[int]()
    window: list[int] = []
    compare = partial(update, model, optimizer, scaler, reader=reader, group=group)
    criterion = weighted_loss_of if options.count else loss_of
    compare = partial(compare, reference=new_model().to(device), loss_of=criterion)
    with service:
        service.attach(optimizer)
        loader = ElasticDataLoader(
            ShardedDataset(service, reader, shuffle=True),
            synchronous=True,
            process_group=loaders,
            pin_memory=device == "cuda",
        )
        service.load_state_dict(None)
        while not service.finished:
            for index, x, y in loader:
                if rank == size - 1:
                    time.sleep(options.slow_s)
                steps += 1
                closes = steps % options.accumulate == 0
                hold = nullcontext if closes or options.wrap != "ddp" else model.no_sync
                x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
                with hold():
                    loss = criterion(model, x, y)
                    if options.poison and not loader.weight:
                        loss = (loss - loss.detach()).sqrt()  # 0, with an infinite derivative
                        poisoned += 1
                    weighed = loader.weigh(loss, count=shares_of(y).sum() if options.count else None)
                    scaler.scale(weighed).backward()
                window += index.tolist() if loader.weight else []
                trained += index.tolist() if loader.weight else []
                if closes:
                    worst = max(worst, compare(loader, window))
            if window_is_open := steps % options.accumulate:
                steps += options.accumulate - window_is_open
                if options.wrap == "ddp":
                    reduce_by_hand(model, group)
                worst = max(worst, compare(loader, window))
    found = {"rank": rank, "size": size, "worst": worst, "steps": steps, "trained": trained}
    return {**found, "poisoned": poisoned, "overflows": options.amp and scaler.get_scale() < INITIAL_SCALE}


def reduce_by_hand(model: nn.Module, group: dist.ProcessGroup) -> None:
    """What DDP leaves undone where a window ends after `no_sync`."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= dist.get_world_size(group)


def update(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    loader: ElasticDataLoader,
    window: list[int],
    *,
    reference: nn.Module,
    loss_of: Callable[..., torch.Tensor],
    reader: VectorReader,
    group: dist.ProcessGroup,
) -> float:
    """Step, and compare with one process."""
    scaler.unscale_(optimizer)
    loader.scale_gradients(optimizer)
    found = full_gradients(model)
    union: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(union, window, group=group)
    worst = worst_difference(reference, reader, [n for part in union for n in part], found, loss_of)
    scaler.step(optimizer)
    scaler.update()
    if scaler.is_enabled():
        loader.service.report_batch_done()  # a step may have been skipped
    optimizer.zero_grad()
    with torch.no_grad():
        for mine, theirs in zip(reference.parameters(), model.parameters(), strict=True):
            mine.copy_(theirs.full_tensor() if isinstance(theirs, DTensor) else theirs)
    window.clear()
    return worst


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--store")
    parser.add_argument("--world", type=int)
    parser.add_argument("--records", type=int, default=47)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--slow_s", type=float, default=0.0)
    parser.add_argument("--wrap", choices=["ddp", "fsdp2"], default="ddp")
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--count", action="store_true")
    parser.add_argument("--poison", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--elsewhere", action="store_true")
    options = parser.parse_args(arguments)
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run_rank, args=(options, rank)) for rank in range(options.world)]
    for rank in ranks:
        rank.start()
    failed = False
    while not failed and (running := [rank.sentinel for rank in ranks if rank.is_alive()]):
        wait(running)
        failed = any(rank.exitcode for rank in ranks)
    for rank in ranks:
        rank.kill()  # where one has failed: the others would wait for it
    sys.exit(failed)


def run_rank(options: argparse.Namespace, rank: int) -> None:
    """Train the jobs of 1, 2, … ranks that this one belongs to."""
    torch.set_num_threads(1)
    backend = "nccl" if options.device == "cuda" else "gloo"
    if options.device == "cuda":
        torch.cuda.set_device(rank)
    dist.Backend.register_backend("elsewhere", elsewhere, devices=["meta"])
    default = "elsewhere" if options.elsewhere else backend
    dist.init_process_group(
        default, init_method=f"file://{options.store}", rank=rank, world_size=options.world
    )
    jobs: list[Callable[[], dict[str, Any]]] = []
    for size in range(1, options.world + 1):
        groups = [dist.new_group(list(range(size)), backend=which) for which in (backend, default)]
        if rank < size:
            jobs.append(partial(train, options, size, *groups))
    Path(f"{options.store}.{rank}").write_text(json.dumps([job() for job in jobs]))
    dist.barrier(groups[0])
    dist.destroy_process_group()


def elsewhere(store: Any, rank: int, size: int, timeout: Any) -> Any:
    """A backend that takes no tensor of the processor's, as nccl takes none."""
    return FakeProcessGroup._create_internal(rank, size)


if __name__ == "__main__":
    main(sys.argv[1:])
