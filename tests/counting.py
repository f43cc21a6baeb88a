"""A model that remembers which records it learnt, and how often: its parameter is a count of each."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset


class Records(Dataset[dict[str, Any]]):
    """Records that know their numbers."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"index": index, "labels": float(index % 7)}


class Counting(nn.Module):
    """One number for each record; its gradient is not 0 where the record was in the batch."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(size, dtype=torch.float64))

    def forward(self, index: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": -self.counts[index].mean()}


class CountingItems(Counting):
    """The same, with a loss that is divided by the items of the whole step, as language models do it."""

    def forward(
        self, index: torch.Tensor, labels: torch.Tensor, num_items_in_batch: Any = None, **_: Any
    ) -> dict[str, torch.Tensor]:
        items = len(labels) if num_items_in_batch is None else num_items_in_batch
        return {"loss": -self.counts[index].sum() / items}


class CountingOptimizer(torch.optim.Optimizer):
    """Adds 1 to the count of each record that is in the gradient of this step.

    With `even`, where all records of a step weigh the same, it adds how often the record is there.
    """

    def __init__(self, parameters: Any, *, even: bool) -> None:
        super().__init__(parameters, {"lr": 1.0})
        self._even = even

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for counts in group["params"]:
                found = counts.grad.abs()
                if not math.isclose(float(found.sum()), 1.0, rel_tol=1e-5):
                    raise AssertionError(f"gradients of {float(found.sum())} records are no mean")
                least = found[found > 0].min()
                counts += (found / least).round() if self._even else found > 0
