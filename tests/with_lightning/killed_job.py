"""A job of Lightning's that is killed again and again, and goes on from Lightning's own checkpoint.

One program runs all attempts of a job, each in forked processes, so that torch and Lightning are imported
once. An attempt dies where a random draw says; the last one lives. It writes what its model has learnt as
JSON. With several ranks the master is at `EDL_MASTER_ADDR`, else in the process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch._dynamo  # else the first optimizer does, in every attempt
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from memory import BATCH, EPOCHS, RECORDS, Remembers

from edl_torch import ElasticDataLoader
from edl_torch.integrations.lightning import ElasticCallback

PLACES = ("batch", "backward", "step", "batch over", "validation", "epoch over", "clock", "clock")


class Dies(Callback):
    """Kills its process at the `count`-th time that it comes to `place`.

    By the clock it is so many milliseconds after the start of `fit`, wherever that is.
    """

    def __init__(self, place: str, count: int) -> None:
        self.place = place
        self.count = count

    def _at(self, place: str) -> None:
        self.count -= place == self.place
        if not self.count:
            os.kill(os.getpid(), signal.SIGKILL)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self.place == "clock":
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # nothing of Python's runs when it comes
            signal.setitimer(signal.ITIMER_REAL, self.count / 1000)

    def on_train_batch_start(self, *args: Any) -> None:
        self._at("batch")

    def on_after_backward(self, *args: Any) -> None:
        self._at("backward")

    def on_before_optimizer_step(self, *args: Any) -> None:
        self._at("step")

    def on_train_batch_end(self, *args: Any) -> None:
        self._at("batch over")

    def on_validation_batch_end(self, *args: Any) -> None:
        self._at("validation")

    def on_train_epoch_end(self, *args: Any) -> None:
        self._at("epoch over")


class Validates(Remembers):
    """With a validation step, which learns nothing."""

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        assert len(batch)


def fit(options: argparse.Namespace, ranks: int, death: Dies | None, folder: Path) -> None:
    synchronous = options.ranks > 1
    with ElasticDataLoader(
        torch.arange(RECORDS),
        batch_size=BATCH,
        shuffle=True,
        num_epochs=EPOCHS,
        num_workers=options.workers,
        lookahead="told",
        synchronous=synchronous,
        records_per_shard=5,
        audit_dir=folder / "audit",
    ) as loader:
        model = Validates(loader if synchronous else None)
        every = {"every_n_train_steps": options.every} if options.every else {"save_on_train_epoch_end": True}
        saves = ModelCheckpoint(str(folder / "checkpoints"), save_last=True, **every)
        trainer = pl.Trainer(
            max_epochs=-1,
            accelerator="cpu",
            devices=ranks,
            strategy="ddp" if ranks > 1 else "auto",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=str(folder),
            accumulate_grad_batches=options.accumulate,
            callbacks=[ElasticCallback(loader), saves, *([] if death is None else [death])],
        )
        held_out = torch.utils.data.DataLoader(torch.arange(6), batch_size=BATCH)
        trainer.fit(model, loader, held_out, ckpt_path="last")
        if trainer.global_rank == 0:
            learnt = {"learnt": model.learnt, "finished": loader.progress().finished}
            (folder / "learnt.json").write_text(json.dumps(learnt))


def run(options: argparse.Namespace, ranks: int, death: Dies | None, folder: Path) -> bool:
    """One attempt, in processes of its own. Returns whether it came to its end."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    children = []
    for rank in range(ranks):
        pid = os.fork()
        if not pid:
            os.environ.update(LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
            status = 1
            try:
                if options.ranks > 1:
                    dist.init_process_group("gloo", rank=rank, world_size=ranks)
                else:
                    del os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"]
                fit(options, ranks, death if rank == ranks - 1 else None, folder)
                status = 0
            except BaseException as error:  # the top of a process
                sys.stderr.write(f"rank {rank}: {type(error).__name__}: {error}\n")
                if death is None:
                    raise
            finally:
                sys.stderr.flush()
                os._exit(status)
        children.append(pid)
    dying, statuses = children[-1], {}
    while len(statuses) < ranks:
        pid, status = os.wait()
        statuses[pid] = status
        if not status:
            continue
        if pid != dying and dying not in statuses:  # it has ended before, or nobody was killed
            statuses[dying] = os.waitpid(dying, os.WNOHANG)[1]
        if not os.WIFSIGNALED(statuses[dying]):
            sys.exit("an attempt failed by itself")
        for other in set(children) - set(statuses):
            os.kill(other, signal.SIGKILL)
    return not any(statuses.values())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--ranks", type=int, default=1, help="at most; each attempt has some")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--every", type=int, default=0, help="steps between checkpoints; 0: an epoch")
    parser.add_argument("--kills", type=int, default=3)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    chance = random.Random(options.seed)
    died = 0
    while died < options.kills:
        most = EPOCHS * RECORDS // BATCH // options.accumulate
        place = chance.choice(PLACES)
        most = {"epoch over": EPOCHS, "validation": 4, "clock": 1500}.get(place, most)
        count = chance.randint(1, most)
        ranks = chance.randint(1, options.ranks)
        print(f"attempt of {ranks} rank(s), dies at {place} {count}", flush=True)
        if run(options, ranks, Dies(place, count), options.folder):
            break  # less was left than it should have died in
        died += 1
    ranks = chance.randint(1, options.ranks)
    print(f"last attempt of {ranks} rank(s) after {died} death(s)", flush=True)
    if not run(options, ranks, None, options.folder):
        sys.exit("the last attempt failed")


if __name__ == "__main__":
    main()
