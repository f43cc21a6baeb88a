"""How much each batch counts, so that unequal ranks together give the mean over all their records.

Losses that are weighed by their batches' records add up to the sum over all records of all ranks; gradients
are then divided by how many those were. It does not know where the counts come from.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


class Weights:
    """The counts of the batch in hand, and of the steps since gradients were last scaled.

    `ranks` is how many ranks' gradients the model's wrapper averages.
    """

    def __init__(self, ranks: int = 1) -> None:
        self._ranks = ranks
        self._own = 0
        self._window = 0

    def __repr__(self) -> str:
        return f"<Weights own={self._own} window={self._window}>"

    @property
    def own(self) -> int:
        """Records of the batch in hand; 0 for one that stands in."""
        return self._own

    def step(self, own: int, everywhere: int) -> None:
        """A batch of `own` records goes to the loop, and `everywhere` to all ranks together."""
        self._own = own
        self._window += everywhere

    def restart(self) -> None:
        """Another pass, or another model: no gradient has been gathered."""
        self._own = self._window = 0

    def weigh(self, mean_loss: torch.Tensor) -> torch.Tensor:
        """The batch's mean loss as the sum over its records. Of one that stands in: 0, whatever it was.

        Shape and dtype are kept. `where`, not a product: 0 times NaN is NaN.
        """
        if self._own:
            return mean_loss * self._own
        return torch.where(torch.zeros_like(mean_loss, dtype=torch.bool), mean_loss, 0.0)

    def scale(self, parameters: Iterable[nn.Parameter]) -> None:
        """Make means over ranks of weighed losses' gradients means over records, since the last time."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        if self._window:
            for gradient in gradients:
                gradient.mul_(self._ranks / self._window)
        self._window = 0
