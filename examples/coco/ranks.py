"""This process among those that train one model together; alone where torchrun has not started it.

It knows torch.distributed, and neither the model nor the data.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from edl_torch.client.torchrun import init_process_group


class Ranks:
    """`rank` of `size`; `together` is false without torchrun, also where torchrun has started just one."""

    def __init__(self, rank: int = 0, size: int = 1, *, together: bool = False) -> None:
        self.rank = rank
        self.size = size
        self.together = together

    @property
    def first(self) -> bool:
        """Whether this one speaks and writes for all."""
        return self.rank == 0

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """The first rank does it before the others, who then find it done."""
        if self.together and not self.first:
            dist.barrier()
        yield
        if self.together and self.first:
            dist.barrier()

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        """The model, with its gradients averaged over all ranks."""
        if not self.together:
            return model
        return DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)

    def sum(self, numbers: Tensor) -> Tensor:
        """The sum over all ranks, on each."""
        if self.together:
            device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
            on_device = numbers.to(device)
            dist.all_reduce(on_device)
            return on_device.to(numbers.device)
        return numbers


@contextmanager
def join_ranks(device: torch.device) -> Iterator[Ranks]:
    """All ranks of this job, until the end of the block."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield Ranks()
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), together=True)
    finally:
        dist.destroy_process_group()
