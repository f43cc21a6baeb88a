"""A memory of what a model has learnt: how often each record was in a step of its optimizer.

The counts are the model's one parameter, moved by its gradient alone, so they lie in every checkpoint. They
do not know the loader, nor how a job runs.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

RECORDS = 53  # no multiple of a batch, a window or the ranks
BATCH = 3
EPOCHS = 2


class Tally(torch.optim.Optimizer):
    """Adds to each record's count how often it is in the gradient, where the smallest share is once.

    With `mean` the gradient must be that of the mean over all of them.
    """

    def __init__(self, counts: torch.nn.Parameter, *, mean: bool = False) -> None:
        super().__init__([counts], {})
        self.mean = mean

    def step(self, closure: Any = None) -> Any:
        result = None if closure is None else closure()
        (counts,) = self.param_groups[0]["params"]
        if counts.grad is not None and counts.grad.any():
            shares = -counts.grad
            times = shares / shares[shares > 0].min()
            assert torch.allclose(times, times.round(), atol=1e-6), times
            assert not self.mean or abs(float(shares.sum()) - 1) < 1e-9, shares.sum()
            with torch.no_grad():
                counts += times.round()
        return result


def fresh_counts(records: int = RECORDS) -> torch.nn.Parameter:
    """The counts of a model that has learnt nothing."""
    return torch.nn.Parameter(torch.zeros(records, dtype=torch.float64))


def learnt(counts: torch.Tensor) -> Counter[int]:
    """How often each record was learnt."""
    return Counter({index: int(count) for index, count in enumerate(counts) if count})


def each(times: int = EPOCHS) -> Counter[int]:
    """Every record so often."""
    return Counter(dict.fromkeys(range(RECORDS), times))
