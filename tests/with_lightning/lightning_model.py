"""A LightningModule that learns each record by heart."""

from __future__ import annotations

from collections import Counter
from typing import Any

import lightning.pytorch as pl
import torch
from memory_model import RECORDS, Tally, fresh_counts, learnt


class Remembers(pl.LightningModule):
    """Counts what it learns. `loader` is a synchronous one, whose losses are weighed."""

    def __init__(self, loader: Any = None, records: int = RECORDS) -> None:
        super().__init__()
        self.counts = fresh_counts(records)
        self.loader = loader

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        """A sum over records: their shares in a window's gradient are equal."""
        if self.loader is None:
            return -self.counts[batch].sum()
        return self.loader.weigh(-self.counts[batch].mean())

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return Tally(self.counts, mean=self.loader is not None)

    @property
    def learnt(self) -> Counter[int]:
        """How often each record was learnt."""
        return learnt(self.counts)
