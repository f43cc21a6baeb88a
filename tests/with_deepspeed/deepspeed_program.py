"""A job with a DeepSpeed engine, which goes on from the engine's own checkpoints: one rank of it."""

from __future__ import annotations

import json
import os
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.ops
import torch
import torch._dynamo  # the engine imports it, which takes long
from framework_jobs import Death, note_step
from memory_model import BATCH, RECORDS
from memory_program import loader_of

from edl_torch.integrations.deepspeed import prepare


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a job is. `every` is the number of steps between checkpoints; 0: an epoch.

    With `universal` it goes on from a checkpoint that was made universal.
    """

    stage: int = 0
    ranks: int = 1
    workers: int = 0
    accumulate: int = 1
    every: int = 1
    universal: bool = False
    records: int = RECORDS
    step_s: float = 0.0  # how long a batch takes at least
    death: Death = field(default_factory=Death)


class TwoGroups(torch.nn.Module):
    """Counts of what was learnt, twice: for a second group of parameters a ZeRO optimizer steps once more."""

    def __init__(self, records: int) -> None:
        super().__init__()
        self.counts = torch.nn.Parameter(torch.zeros(records))
        self.other = torch.nn.Parameter(torch.zeros(records))

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return -(self.counts[index] + self.other[index]).mean()


class Counter(torch.optim.Optimizer):
    """Adds to each count what the gradient says, where a record's share is one of `records`, a whole step.

    Its own state has the names of Adam's, which a universal checkpoint needs, and the same counts.
    """

    def __init__(self, groups: Any, *, records: int) -> None:
        super().__init__(groups, {"lr": 1.0})
        self.records = records

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for counts in group["params"]:
                if counts.grad is not None:
                    times = -counts.grad * self.records
                    assert torch.allclose(times, times.round(), atol=1e-4), times
                    counts += times.round()
                    self._remember(counts, times.round())

    def _remember(self, counts: torch.Tensor, times: torch.Tensor) -> None:
        state = self.state[counts]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(counts), exp_avg_sq=torch.zeros_like(counts))
        state["step"] += 1
        state["exp_avg"] += times
        now = times > 0  # what stage 3 fills its parts up with is anything
        assert torch.equal(state["exp_avg"][now], counts[now]), "the optimizer's state is not of this model"


def run(folder: Path, settings: Settings) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first
    deepspeed.init_distributed("gloo")
    death = settings.death.of(rank, ranks)
    death.at("start")
    model = TwoGroups(settings.records)
    groups = [{"params": [model.counts]}, {"params": [model.other]}]
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": settings.accumulate,
        "zero_optimization": {"stage": settings.stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"load_universal": settings.universal},
    }
    optimizer = Counter(groups, records=BATCH * ranks * settings.accumulate)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    checkpoints = str(folder / "checkpoints")
    with loader_of(folder, settings) as loader:
        batches = prepare(engine, loader)
        engine.load_checkpoint(checkpoints)
        saved = engine.global_steps

        def save() -> None:
            nonlocal saved
            if engine.global_steps != saved:
                saved = engine.global_steps
                death.at("saving")
                engine.save_checkpoint(checkpoints)

        for _ in batches.epochs():
            for batch in batches:
                death.at("batch")
                time.sleep(settings.step_s)
                loss = engine(batch)
                engine.backward(loss)
                death.at("backward")
                engine.step()
                death.at("step")
                note_step(folder, engine.micro_steps)
                if settings.every and engine.global_steps - saved >= settings.every:
                    save()
                death.at("batch over")
            death.at("epoch over")
            save()
        with deepspeed.zero.GatheredParameters([model.counts, model.other]):
            learnt, other = ([int(count) for count in counts] for counts in (model.counts, model.other))
        assert learnt == other
        if rank == 0:
            found = {"learnt": learnt, "finished": loader.progress().finished, "steps": engine.global_steps}
            (folder / "result.json").write_text(json.dumps(found))
        torch.distributed.barrier()
