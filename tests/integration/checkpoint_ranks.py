"""Ranks of a job that saves, or loads, model and data position with `torch.distributed.checkpoint` over gloo.

    python checkpoint_ranks.py save|load WORLD STORE SAVED OUT SIZE EPOCHS

The ranks are forked, so that torch is imported once. The model counts how often each record was trained on;
`save` trains in lock-step on a few batches each, saves, trains on one more, and is gone without a goodbye.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from edl_torch import DataShardService, ElasticDataLoader, ShardedDataset
from edl_torch.readers import MapDatasetReader

STEPS = 5


def main(what: str, world: str, *arguments: str) -> int:
    """Fork the ranks; 0 when all of them ended well."""
    torch.set_num_threads(1)
    children = []
    for rank in range(int(world)):
        child = os.fork()
        if child == 0:
            os._exit(run(what, rank, int(world), *arguments))
        children.append(child)
    ends = [os.waitpid(child, 0)[1] for child in children]
    return int(any(ends))


def run(what: str, rank: int, world: int, store: str, saved: str, out: str, size: str, epochs: str) -> int:
    """One rank."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    os.environ.pop("WORLD_SIZE", None)
    reader = MapDatasetReader(range(int(size)))
    service = DataShardService(
        4, reader=reader, num_epochs=int(epochs), num_minibatches_per_shard=2, shuffle_shards=True
    )
    loader = ElasticDataLoader(ShardedDataset(service, reader, shuffle=True), synchronous=False)
    model = torch.nn.Module()
    model.register_buffer("counts", torch.zeros(int(size), dtype=torch.int64))
    said = (save if what == "save" else load)(rank, service, loader, model, saved)
    if rank == 0:
        Path(out).write_text(json.dumps(said))
    dist.barrier()
    if what == "load":
        service.close()
    return 0


def save(
    rank: int, service: DataShardService, loader: ElasticDataLoader, model: torch.nn.Module, saved: str
) -> dict[str, object]:
    """The checkpoint of two ranks in lock-step."""
    batches = iter(loader)
    for step in range(STEPS + 1):
        if step == STEPS:
            service.state_dict()  # what this rank trained on is told …
            dist.barrier()  # … before any rank takes the token
            dcp.save({"model": model, "data": service}, checkpoint_id=saved)
            counted = int(model.counts.sum())
        together = torch.bincount(next(batches), minlength=len(model.counts))
        dist.all_reduce(together)
        model.counts += together
    return {"counted": counted}


def load(
    rank: int, service: DataShardService, loader: ElasticDataLoader, model: torch.nn.Module, saved: str
) -> dict[str, object]:
    """One rank takes the data back; the others join its lineage. Then each trains on what it gets."""
    dcp.load({"model": model, "data": service} if rank == 0 else {"model": model}, checkpoint_id=saved)
    dist.barrier()
    found = int(model.counts.sum())
    mine = torch.zeros_like(model.counts)
    while not service.finished:
        for batch in loader:
            mine[batch] += 1
    dist.all_reduce(mine)
    lineage = service.session.lineage
    return {"found": found, "lineage": lineage, "counts": (model.counts + mine).tolist()}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
