"""A small regression whose gradients can be computed again, in float64, without the package.

One head for each optimizer of a loop; a record's features and targets are functions of its number.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


def _features(numbers: torch.Tensor) -> torch.Tensor:
    x = numbers.to(torch.float64)
    return torch.stack([torch.ones_like(x), torch.sin(x), torch.cos(2 * x)], dim=-1)


def _loss(numbers: torch.Tensor, head: int, weight: torch.Tensor) -> torch.Tensor:
    """The mean over the records."""
    target = (head + 1) + numbers.to(torch.float64) / 10
    return (_features(numbers) @ weight - target).square().mean()


class Model:
    """`heads` weights of 3 numbers each."""

    def __init__(self, heads: int) -> None:
        self.heads = [torch.nn.Parameter(torch.zeros(3, dtype=torch.float64)) for _ in range(heads)]

    def mean_loss(self, numbers: torch.Tensor) -> torch.Tensor:
        """Of one batch, over all heads."""
        losses = [_loss(numbers, number, head) for number, head in enumerate(self.heads)]
        return torch.stack(losses).sum()

    def copy(self) -> list[torch.Tensor]:
        return [head.detach().clone() for head in self.heads]

    def load(self, copy: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for head, values in zip(self.heads, copy, strict=True):
                head.copy_(values)
                head.grad = None

    def gradient(self, head: int, numbers: Iterable[int]) -> torch.Tensor:
        """Of the mean over these records, as one process would have it at the weights of now."""
        weight = self.heads[head].detach().clone().requires_grad_()
        _loss(torch.tensor(list(numbers)), head, weight).backward()
        assert weight.grad is not None
        return weight.grad
