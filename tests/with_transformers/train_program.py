"""A script with a Trainer, run as one rank of a job, which notes the steps that it takes in a file."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from counting import Counting, CountingItems, CountingOptimizer, Records
from framework_jobs import Death, note_step
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from edl_torch import ElasticDataLoader
from edl_torch.errors import InvalidArgument
from edl_torch.integrations.transformers import ElasticTrainer


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a job is. Rank r waits for (1 + r) * `step_s` seconds before each batch: ranks read unequally."""

    size: int = 103
    epochs: int = 2
    batch: int = 4
    accumulation: int = 1
    workers: int = 0
    save_steps: int = 2
    step_s: float = 0.01
    items: bool = False
    refused: bool = False
    alone: bool = False
    death: Death = field(default_factory=Death)


class MyTrainer(ElasticTrainer, Trainer):
    """As a user declares it."""


class Steps(TrainerCallback):
    """Takes its time, and notes steps and saves."""

    def __init__(self, folder: Path, step_s: float) -> None:
        self._folder = folder
        self._step_s = step_s

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        time.sleep(self._step_s)

    on_substep_end = on_step_begin

    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        note_step(self._folder, state.global_step)


class Dies(TrainerCallback):
    """Dies where it is said."""

    def __init__(self, death: Death) -> None:
        self.death = death

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.death.at("step begins")

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        self.death.at("batch over")

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.death.at("backward")

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.death.at("step")

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.death.at("batch over")

    def on_save(self, *_: Any, **__: Any) -> None:
        self.death.at("saved")

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        self.death.at("epoch over")

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        self.death.at("evaluated")


def arguments(folder: Path, settings: Settings, **more: Any) -> TrainingArguments:
    """Arguments of a Trainer on this machine's processor."""
    (folder / "out").mkdir(exist_ok=True)
    given: dict[str, Any] = {
        "output_dir": str(folder / "out"),
        "num_train_epochs": settings.epochs,
        "per_device_train_batch_size": settings.batch,
        "gradient_accumulation_steps": settings.accumulation,
        "save_strategy": "steps",
        "save_steps": settings.save_steps,
        "save_total_limit": 1,
        "logging_steps": 5,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        **more,
    }
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        given = {"ddp_backend": "gloo", **given}
    return TrainingArguments(**given)


def parts(settings: Settings) -> dict[str, Any]:
    """A model that counts what it learns, and its optimizer."""
    model = CountingItems(settings.size) if settings.items else Counting(settings.size)
    even = settings.items or int(os.environ.get("WORLD_SIZE", "1")) > 1
    optimizer = CountingOptimizer(model.parameters(), even=even)
    return {
        "model": model,
        "optimizers": (optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)),
    }


def counts(model: Any) -> list[int]:
    """How often the model has learnt each record."""
    return [int(count) for count in model.counts.tolist()]


class OwnBackward(MyTrainer):
    """With a training step that Accelerate does not see."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss = self.compute_loss(model, inputs)
        loss.backward()
        return loss.detach()


def refusal(kind: Any, folder: Path, settings: Settings, *, synchronous: bool, **more: Any) -> str:
    """What an ElasticTrainer says to what several ranks cannot do."""
    args = arguments(folder, settings, **more)
    with ElasticDataLoader(
        Records(settings.size), settings.batch, num_epochs=2, synchronous=synchronous
    ) as loader:
        try:
            kind(**parts(settings), args=args, elastic_loader=loader).train()
        except InvalidArgument as error:
            return str(error)
    return ""


def refusals(folder: Path, settings: Settings) -> list[str]:
    """What it says to ranks that could train together."""
    return [
        refusal(MyTrainer, folder, settings, synchronous=False),
        refusal(MyTrainer, folder, settings, synchronous=True, average_tokens_across_devices=False),
        refusal(OwnBackward, folder, settings, synchronous=True),
    ]


def run(folder: Path, settings: Settings) -> None:
    torch.set_num_threads(1)
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if settings.alone:
        found = refusal(MyTrainer, folder, settings, synchronous=True, use_cpu=False)
        (folder / "result.json").write_text(json.dumps([found]))
        return
    if settings.refused:
        (folder / "result.json").write_text(json.dumps(refusals(folder, settings)))
        return
    death = settings.death.of(rank, ranks)
    death.at("start")
    args = arguments(folder, settings, eval_strategy="epoch")
    with ElasticDataLoader(
        Records(settings.size),
        settings.batch,
        num_epochs=settings.epochs,
        shuffle=True,
        num_workers=settings.workers,
        records_per_shard=2 * settings.batch + 1,
        synchronous=ranks > 1,
        audit_dir=folder / "audit",
    ) as loader:
        made = parts(settings)
        trainer = MyTrainer(
            **made,
            args=args,
            elastic_loader=loader,
            eval_dataset=Records(5),
            callbacks=[Steps(folder, settings.step_s * (1 + rank)), Dies(death)],
        )
        trainer.train(resume_from_checkpoint=get_last_checkpoint(args.output_dir))
        if rank == 0:
            state = trainer.state
            found = {
                "counts": counts(made["model"]),
                "steps": state.global_step,
                "max_steps": state.max_steps,
                "epoch": state.epoch,
            }
            (folder / "result.json").write_text(json.dumps(found))
