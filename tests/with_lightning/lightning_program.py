"""A program of one rank that trains with Lightning, and its model."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch._dynamo  # else the first optimizer does, in every attempt
from framework_jobs import Death, note_step
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from memory_model import BATCH, RECORDS, Tally, fresh_counts, learnt
from memory_program import Settings, join_ranks, loader_of, note_result

from edl_torch.integrations.lightning import ElasticCallback


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


class Dies(Callback):
    """Dies where it is said."""

    def __init__(self, death: Death) -> None:
        self.death = death

    def setup(self, *args: Any, **kwargs: Any) -> None:
        self.death.at("start")

    def on_train_batch_start(self, *args: Any) -> None:
        self.death.at("batch")

    def on_after_backward(self, *args: Any) -> None:
        self.death.at("backward")

    def on_before_optimizer_step(self, *args: Any) -> None:
        self.death.at("step")

    def on_train_batch_end(self, *args: Any) -> None:
        self.death.at("batch over")

    def on_validation_batch_end(self, *args: Any) -> None:
        self.death.at("validation")

    def on_train_epoch_end(self, *args: Any) -> None:
        self.death.at("epoch over")


class Steps(Callback):
    """Takes its time, and notes steps."""

    def __init__(self, folder: Path, step_s: float) -> None:
        self.folder = folder
        self.step_s = step_s
        self.step = 0

    def on_train_batch_start(self, *args: Any) -> None:
        time.sleep(self.step_s)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.step = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.global_step != self.step:
            self.step = trainer.global_step
            note_step(self.folder, self.step)


class Validates(Remembers):
    """With a validation step, which learns nothing."""

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        assert len(batch)


def run(folder: Path, settings: Settings) -> None:
    join_ranks(settings)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    with loader_of(folder, settings) as loader:
        model = Validates(loader if settings.synchronous else None, settings.records)
        every = (
            {"every_n_train_steps": settings.every} if settings.every else {"save_on_train_epoch_end": True}
        )
        saves = ModelCheckpoint(str(folder / "checkpoints"), save_last=True, **every)
        death = settings.death.of(int(os.environ.get("RANK", "0")), ranks)
        trainer = pl.Trainer(
            max_epochs=-1,
            accelerator="cpu",
            devices=ranks,
            strategy="ddp" if ranks > 1 else "auto",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=str(folder),
            accumulate_grad_batches=settings.accumulate,
            callbacks=[ElasticCallback(loader), saves, Dies(death), Steps(folder, settings.step_s)],
        )
        held_out = torch.utils.data.DataLoader(torch.arange(6), batch_size=BATCH)
        trainer.fit(model, loader, held_out, ckpt_path="last")
        if trainer.global_rank == 0:
            note_result(folder, model.counts, loader)


if __name__ == "__main__":
    first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    death = Death("batch", 6) if first_life else Death()
    run(Path(sys.argv[1]), Settings(ranks=2, accumulate=2, every=1, death=death))
