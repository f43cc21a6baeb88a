"""What a model's wrapper does to gradients, for ranks that are threads: the mean over all, on every rank."""

from __future__ import annotations

import threading
from typing import Any

import torch


class Exchange:
    """All ranks put something at the same point and take what all have put."""

    def __init__(self, size: int, timeout_s: float = 30.0) -> None:
        self._values: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=timeout_s)

    def of(self, rank: int, value: Any) -> list[Any]:
        """The values of all ranks, by rank. Raises BrokenBarrierError when a rank is gone."""
        self._values[rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values

    def leave(self) -> None:
        """A rank is gone: nobody waits for it."""
        self._barrier.abort()


def mean(gradients: list[torch.Tensor | None], like: torch.Tensor) -> torch.Tensor:
    """As DDP makes it: a rank without a gradient counts as zeros."""
    return torch.stack([torch.zeros_like(like) if g is None else g for g in gradients]).mean(0)
