"""A loop over a DeepSpeed engine, which saves and loads by the engine's own checkpoints."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import deepspeed
import deepspeed.ops
import torch
import torch._dynamo  # the engine imports it, which takes long
from counting import Counting, CountingOptimizer, Records
from framework_jobs import note_step

from edl_torch import ElasticDataLoader

SIZE, BATCH, EPOCHS = 64, 4, 2


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a job is."""

    stage: int
    accumulation: int
    step_s: float = 0.01


class TwoGroups(Counting):
    """A second group of parameters, for which a ZeRO optimizer steps once more."""

    def __init__(self) -> None:
        super().__init__(SIZE)
        self.counts = torch.nn.Parameter(torch.zeros(SIZE))
        self.other = torch.nn.Parameter(torch.zeros(SIZE))

    def forward(self, index: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": -(self.counts[index] + self.other[index]).mean()}


def run(folder: Path, settings: Settings) -> None:
    os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"})
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first
    model = TwoGroups()
    optimizer = CountingOptimizer([{"params": [model.counts]}, {"params": [model.other]}], even=True)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": settings.accumulation,
        "zero_optimization": {"stage": settings.stage},
        "zero_allow_untested_optimizer": True,
    }
    deepspeed.init_distributed("gloo")
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    checkpoints = str(folder / "checkpoints")
    with ElasticDataLoader(
        Records(SIZE), BATCH, num_epochs=EPOCHS, shuffle=True, audit_dir=folder / "audit"
    ) as loader:
        loader.attach(engine)
        _, saved = engine.load_checkpoint(checkpoints)
        loader.load_state_dict(saved["data"] if saved else None)
        for _ in loader.epochs():
            for batch in loader:
                time.sleep(settings.step_s)
                loss = engine(**batch)["loss"]
                engine.backward(loss)
                engine.step()
                note_step(folder, engine.micro_steps)
                if engine.was_step_applied() and engine.global_steps % 3 == 0:
                    engine.save_checkpoint(checkpoints, client_state={"data": loader.state_dict()})
        counts = [[int(count) for count in counts.tolist()] for counts in (model.counts, model.other)]
    (folder / "result.json").write_text(json.dumps({"counts": counts, "steps": engine.global_steps}))
