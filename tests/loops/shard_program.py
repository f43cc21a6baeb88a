"""A rank with a model in shards, for `test_loops_of_shards.py`: what the audit says of its loops.

FSDP2, or FSDP1 that keeps the original parameters.

    python shard_program.py FOLDER RANK

Two ranks over gloo, each with a loader of its own; each writes its outcomes as JSON into the folder.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from edl_torch import ElasticDataLoader, save_checkpoint
from edl_torch.audit.verdict import audit
from edl_torch.errors import InvalidArgument

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
    model = sharded("FSDP2")
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


def sharded(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 1))
    if kind == "FSDP1":
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    fully_shard(model)
    return model


def outcome_by_itself(folder: Path, kind: str, *, restored: bool) -> str:
    """Of a loop that attaches nothing, after what a resume does to its optimizer."""
    model = sharded(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with ElasticDataLoader(
        torch.rand(RECORDS, 4), batch_size=2, audit_dir=folder, synchronous=False
    ) as loader:
        if restored:
            states = get_state_dict(model, optimizer)
            set_state_dict(model, optimizer, model_state_dict=states[0], optim_state_dict=states[1])
        for batch in loader:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    return audit([folder])[0].outcome.name


def outcome_of_two(folder: Path) -> str:
    """Of a loop that attaches one of its two optimizers."""
    models = sharded("FSDP2"), sharded("FSDP2")
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    with ElasticDataLoader(
        torch.rand(RECORDS, 4), batch_size=2, audit_dir=folder, synchronous=False
    ) as loader:
        loader.attach(optimizers[0])
        for batch in loader:
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                for _ in range(2):
                    model(batch).square().mean().backward()
                    optimizer.step()
    return audit([folder])[0].outcome.name


def refusal(folder: Path) -> str:
    """What saving FSDP1 says."""
    model = sharded("FSDP1")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with ElasticDataLoader(torch.rand(RECORDS, 4), batch_size=2, synchronous=False) as loader:
        try:
            save_checkpoint(folder, model, optimizer, loader.service)
        except InvalidArgument as exc:
            return str(exc)
    return ""


def main(folder: Path, rank: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    found = {write.__name__: outcome(folder / f"{write.__name__}.{rank}", write) for write in WRITES}
    for kind in ("FSDP1", "FSDP2"):
        for restored in (False, True):
            name = f"{kind} restored" if restored else kind
            found[name] = outcome_by_itself(folder / f"{name}.{rank}", kind, restored=restored)
    found["two optimizers"] = outcome_of_two(folder / f"two.{rank}")
    found["refusal"] = refusal(folder / "checkpoints")
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
