"""The program of docs/lightning.md with several ranks, under torchrun; rank 1 is killed in its first life."""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from memory import BATCH, EPOCHS, RECORDS, Remembers

from edl_torch import ElasticDataLoader
from edl_torch.client.torchrun import init_process_group
from edl_torch.integrations.lightning import ElasticCallback


class Dies(Callback):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if first_life and trainer.global_rank == 1 and batch_idx == 6:
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    init_process_group("gloo")
    loader = ElasticDataLoader(
        torch.arange(RECORDS),
        batch_size=BATCH,
        num_epochs=EPOCHS,
        lookahead="told",
        synchronous=True,
        audit_dir=folder / "audit",
    )
    with loader:
        saves = ModelCheckpoint(str(folder / "checkpoints"), every_n_train_steps=1, save_last=True)
        trainer = pl.Trainer(
            max_epochs=-1,
            accelerator="cpu",
            strategy="ddp",
            devices=2,
            accumulate_grad_batches=2,
            logger=False,
            enable_progress_bar=False,
            callbacks=[saves, ElasticCallback(loader), Dies()],
        )
        model = Remembers(loader)
        trainer.fit(model, loader, ckpt_path="last")
        if trainer.global_rank == 0:
            restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
            (folder / "learnt.json").write_text(json.dumps({"learnt": model.learnt, "restarts": restarts}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
