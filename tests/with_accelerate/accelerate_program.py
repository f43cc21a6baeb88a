"""A program of one rank that trains with Accelerate, and its model."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from pathlib import Path

import torch
import torch._dynamo  # else the first optimizer does, in every attempt
from accelerate import Accelerator
from framework_jobs import TOLD, Death, note_step
from memory_model import RECORDS, Tally, fresh_counts, learnt
from memory_program import Settings, join_ranks, loader_of, note_result

from edl_torch.integrations.accelerate import prepare


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


def newest(folder: Path) -> Path | None:
    """The state that was saved last, whole."""
    found = sorted(folder.glob("state-*"), key=lambda path: int(path.name.partition("-")[2]))
    return found[-1] if found else None


def run(folder: Path, settings: Settings) -> None:
    if settings.synchronous:
        os.environ["ACCELERATE_USE_CPU"] = "true"
    join_ranks(settings)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=settings.accumulate)
    death = settings.death.of(accelerator.process_index, accelerator.num_processes)
    death.at("start")
    with loader_of(folder, settings) as loader:
        memory = Remembers(settings.records)
        model, optimizer = accelerator.prepare(memory, Tally(memory.counts, mean=settings.synchronous))
        batches = prepare(accelerator, loader, optimizer)
        state = newest(folder)
        saved = 0 if state is None else int(state.name.partition("-")[2])
        if state is not None:
            accelerator.load_state(str(state))
        accelerator.wait_for_everyone()

        def save() -> None:
            nonlocal saved
            saved += 1
            accelerator.save_state(str(folder / "half"))
            death.at("saving")
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                (folder / "half").rename(folder / f"state-{saved}")
            accelerator.wait_for_everyone()

        done = 0
        for _ in batches.epochs():
            for batch in batches:
                death.at("batch")
                time.sleep(settings.step_s)
                with accelerator.accumulate(model):
                    loss = model(batch)
                    accelerator.backward(batches.weigh(loss.mean()) if settings.synchronous else loss.sum())
                    death.at("backward")
                    if settings.synchronous:
                        batches.scale_gradients(optimizer)
                    optimizer.step()
                    death.at("step")
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    note_step(folder, sum(memory.learnt.values()))
                done += 1
                if settings.every and done % settings.every == 0:
                    save()
                death.at("batch over")
                if loader.preempted:
                    save()
                    sys.exit(TOLD)
            death.at("epoch over")
            save()
        if accelerator.is_main_process:
            note_result(folder, memory.counts, loader)
        accelerator.wait_for_everyone()


if __name__ == "__main__":
    first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    death = Death("batch", 6) if first_life else Death()
    run(Path(sys.argv[1]), Settings(ranks=2, accumulate=2, every=2, death=death))
