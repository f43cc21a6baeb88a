"""How often each record was delivered: the example's own proof that the sharding is exact.

It counts what the training loop was given, by epoch and record number, and knows nothing of leases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Deliveries:
    """One small counter for every record of every epoch that has begun."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.epochs: dict[int, Tensor] = {}
        self._gathered: dict[int, Tensor] = {}  # what of it all ranks know

    def add(self, epoch: int, numbers: Tensor) -> None:
        """Count a batch's record numbers (int64)."""
        counts = self.epochs.setdefault(epoch, torch.zeros(self.size, dtype=torch.int16))
        counts.index_add_(0, numbers, torch.ones(len(numbers), dtype=torch.int16))

    def gather(self, epoch: int, sum_over_ranks: Callable[[Tensor], Tensor]) -> None:
        """Add what the other ranks were given in the epoch; all ranks call it together."""
        known = self._gathered.get(epoch, torch.zeros(self.size, dtype=torch.int16))
        mine = self.epochs.get(epoch, known) - known
        total = known + sum_over_ranks(mine.int()).to(torch.int16)
        self.epochs[epoch], self._gathered[epoch] = total, total.clone()

    @property
    def delivered(self) -> int:
        """Records delivered at least once, over all epochs."""
        return sum(int((counts > 0).sum()) for counts in self.epochs.values())

    @property
    def repeated(self) -> int:
        """Deliveries beyond the first of their record and epoch."""
        return sum(int((counts - 1).clamp(min=0).sum()) for counts in self.epochs.values())

    def exact(self, num_epochs: int) -> bool:
        """Whether every record of `num_epochs` epochs was delivered once."""
        return self.delivered == self.size * num_epochs and not self.repeated

    def verdict(self, num_epochs: int, *, shared: bool = False) -> str:
        """The count in words; `shared` where other trainers got the rest."""
        repeats = f"{self.repeated} deliveries too many" if self.repeated else "each once"
        whose = "delivered to this trainer:" if shared else "delivered"
        return f"{whose} {self.delivered} of {self.size * num_epochs} annotations, {repeats}"

    def state_dict(self) -> dict[str, Any]:
        """Tensors for a checkpoint."""
        return {"size": self.size, "epochs": {epoch: counts.clone() for epoch, counts in self.epochs.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting from a checkpoint."""
        self.size, self.epochs = state["size"], dict(state["epochs"])
        self._gathered = {epoch: counts.clone() for epoch, counts in self.epochs.items()}
