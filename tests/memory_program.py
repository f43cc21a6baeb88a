"""What programs of one rank have in common whose model remembers what it learns, whatever trains it."""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from framework_jobs import Death
from memory_model import BATCH, EPOCHS, RECORDS

from edl_torch import ElasticDataLoader
from edl_torch.client.torchrun import init_process_group


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a job is. Its ranks step together if `ranks`, which is how many there are at most, is not 1."""

    ranks: int = 1
    workers: int = 0
    accumulate: int = 1
    every: int = 0  # batches or steps between checkpoints; 0: an epoch
    records: int = RECORDS
    step_s: float = 0.0  # how long a batch takes at least
    death: Death = field(default_factory=Death)

    @property
    def synchronous(self) -> bool:
        return self.ranks > 1


def join_ranks(settings: Settings) -> None:
    """Begin, quietly and on one processor; with the other ranks, where they step together."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if settings.synchronous:
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
            os.environ.setdefault(name, value)
        init_process_group("gloo")


def loader_of(folder: Path, settings: Any) -> ElasticDataLoader:
    """The loader of a job's records."""
    return ElasticDataLoader(
        torch.arange(settings.records),
        batch_size=BATCH,
        shuffle=True,
        num_epochs=EPOCHS,
        num_workers=settings.workers,
        synchronous=settings.ranks > 1,
        records_per_shard=5,
        audit_dir=folder / "audit",
    )


def note_result(folder: Path, counts: torch.Tensor, loader: ElasticDataLoader) -> None:
    """Note, on rank 0, what its model has learnt."""
    found = {"learnt": [int(count) for count in counts], "finished": loader.progress().finished}
    (folder / "result.json").write_text(json.dumps(found))
