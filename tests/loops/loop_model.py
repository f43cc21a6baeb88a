"""A small regression whose gradients can be computed again, in float64, without the package.

One head for each optimizer of a loop; a record's features and targets are functions of its number. Below each
head lies a part that learns nothing, and in whose backward pass, the last, an error may come.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from learning_kit import Fails


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
        self.below = [torch.nn.Parameter(torch.zeros(2, dtype=torch.float64)) for _ in range(heads)]
        self.fails = False

    def parameters(self) -> list[torch.nn.Parameter]:
        return [*self.heads, *self.below]

    def mean_loss(self, numbers: torch.Tensor) -> torch.Tensor:
        """Of one batch, over all heads."""
        nothing = torch.stack([(below - below.detach()).sum() for below in self.below]).sum()
        if self.fails:
            nothing = Fails.apply(nothing)
        losses = [_loss(numbers, number, head) for number, head in enumerate(self.heads)]
        return nothing + torch.stack(losses).sum()

    def copy(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.parameters()]

    def load(self, copy: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for parameter, values in zip(self.parameters(), copy, strict=True):
                parameter.copy_(values)
                parameter.grad = None

    def gradient(self, head: int, numbers: Iterable[int]) -> torch.Tensor:
        """Of the mean over these records, as one process would have it at the weights of now."""
        weight = self.heads[head].detach().clone().requires_grad_()
        _loss(torch.tensor(list(numbers)), head, weight).backward()
        assert weight.grad is not None
        return weight.grad
