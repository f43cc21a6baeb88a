"""Weights of a mixture that follow from losses: each component gets its part of all losses.

A rule such as DoReMi's, ADO's or Aioli's takes the place of `shares`. With several ranks reduce the losses to
rank 0, which alone calls `set_weights`.
"""

from __future__ import annotations

from collections import defaultdict

import torch

from edl_torch import ElasticDataLoader


def train(
    loader: ElasticDataLoader, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, every: int = 50
) -> None:
    """Train on a mixture of (inputs, labels), and change its weights each `every` steps."""
    losses: defaultdict[str, list[float]] = defaultdict(list)
    for step, (inputs, labels) in enumerate(loader, 1):
        per_sample = torch.nn.functional.cross_entropy(model(inputs), labels, reduction="none")
        per_sample.mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        for (name, _), loss in zip(loader.records, per_sample.tolist(), strict=True):
            losses[name.partition(":")[0]].append(loss)
        if step % every == 0:
            loader.set_weights(shares(losses))
            losses.clear()


def shares(losses: dict[str, list[float]]) -> dict[str, float]:
    """Return the mean loss of each component as a part of their sum."""
    means = {name: sum(each) / len(each) for name, each in losses.items()}
    total = sum(means.values())
    # With two decimals the order repeats after 100 turns; with more the table of turns is longer.
    return {name: round(mean / total, 2) for name, mean in means.items()}
