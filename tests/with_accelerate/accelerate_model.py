"""A module that learns each record by heart."""

from __future__ import annotations

from collections import Counter

import torch
from memory_model import RECORDS, fresh_counts, learnt


class Remembers(torch.nn.Module):
    """Counts what it learns."""

    def __init__(self, records: int = RECORDS) -> None:
        super().__init__()
        self.counts = fresh_counts(records)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return -self.counts[batch]

    @property
    def learnt(self) -> Counter[int]:
        """How often each record was learnt."""
        return learnt(self.counts)
