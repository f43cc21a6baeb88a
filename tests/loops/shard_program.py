"""A rank with a model in shards (FSDP2), for `test_loops_of_shards.py`: what the audit says of its loops.

    python shard_program.py FOLDER RANK

Two ranks over gloo, each with a loader of its own; each writes its outcomes as JSON into the folder.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from edl_torch import ElasticDataLoader
from edl_torch.audit.verdict import audit

WORLD, RECORDS = 2, 32

Write = Callable[[nn.Module], None]


def nothing(model: nn.Module) -> None:
    """Write none."""


def other_weights_and_back(model: nn.Module) -> None:
    """As for an evaluation."""
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter, values in zip(model.parameters(), before, strict=True):
            parameter.mul_(0.5)
            parameter.copy_(values)


def other_weights(model: nn.Module) -> None:
    with torch.no_grad():
        next(model.parameters()).mul_(0.5)


def other_weights_unseen_by_torch(model: nn.Module) -> None:
    next(model.parameters()).to_local().data.mul_(0.5)  # type: ignore[attr-defined]


WRITES: list[Write] = [nothing, other_weights_and_back, other_weights, other_weights_unseen_by_torch]


def outcome(folder: Path, write: Write) -> str:
    """Of a loop that writes once, after its sixth step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 1))
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.rand(RECORDS, 4)
    with ElasticDataLoader(data, batch_size=2, audit_dir=folder, synchronous=False) as loader:
        loader.attach(optimizer)
        for number, batch in enumerate(loader, 1):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            if number == 6:
                write(model)
    return audit([folder])[0].outcome.name


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    found = {write.__name__: outcome(folder / f"{write.__name__}.{rank}", write) for write in WRITES}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
