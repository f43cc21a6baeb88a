"""A rank of a DDP job over gloo whose models remember, one after the other; torchrun starts it.

    torchrun … ddp_counts.py FOLDER

For each of CASES a model gathers three batches for a step, all but the last in `no_sync()`; `view` lets
gradients be views of DDP's buckets. `zero` makes them 0 before each batch, `unweighed` trains on padding
batches, `ignored` does so and asks what they weigh, and `back` trains on batches that it gave back: all are
wrong. The model and the audit are in FOLDER/CASE.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from edl_torch import ElasticDataLoader
from edl_torch.client.torchrun import init_process_group

RECORDS, EVERY = 50, 3
CASES = [*product(["copy", "view"], ["keep", "zero", "unweighed"]), ("copy", "ignored"), ("view", "back")]


class Counts(torch.nn.Module):
    """Each record adds 1 to a weight of its own; a layer below and one above learn nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.below = torch.nn.Parameter(torch.zeros(RECORDS))
        self.learnt = torch.nn.Parameter(torch.zeros(RECORDS))
        self.above = torch.nn.Parameter(torch.zeros(1))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        nothing = (self.below - self.below.detach())[batch].sum() + (self.above - self.above.detach()).sum()
        return nothing - self.learnt[batch].sum()


def train(folder: Path, gradients: str, before: str) -> None:
    """Train one epoch; rank 0 writes the model down."""
    ranks = dist.get_world_size()
    model = DistributedDataParallel(Counts(), gradient_as_bucket_view=gradients == "view")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with ElasticDataLoader(
        torch.arange(RECORDS),
        batch_size=4,
        dataset_name=folder.name,
        records_per_shard=4,  # an odd number of batches: two ranks never have equally many
        shuffle=True,
        synchronous=True,
        audit_dir=folder / "audit",
    ) as loader:
        loader.attach(optimizer)
        for _ in loader.epochs():
            number = 0
            for number, batch in enumerate(loader, 1):
                if before == "zero":
                    optimizer.zero_grad(set_to_none=False)
                with nullcontext() if number % EVERY == 0 else model.no_sync():
                    counts = before == "unweighed" or bool(loader.weight) or before == "ignored"
                    if before == "back" and number == 2:
                        loader.give_back()
                    (model(batch) * counts * ranks).backward()
                if number % EVERY == 0:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
                    optimizer.step()
                    optimizer.zero_grad()
            if number % EVERY:
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= ranks
                optimizer.step()
                optimizer.zero_grad()
    if not dist.get_rank():
        torch.save(model.module.learnt.detach(), folder / "learnt.pt")


if __name__ == "__main__":
    init_process_group("gloo")
    for gradients, before in CASES:
        train(Path(sys.argv[1], f"{gradients}-{before}"), gradients, before)
    dist.destroy_process_group()
