"""The page of Accelerate, and jobs that are killed and resumed as it says."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from accelerate_program import Remembers, Settings
from framework_pages import Page, leave_other_jobs, models_of
from kill_matrix import EVERY, each_job
from memory_jobs import (
    KILLED,
    TOLD_TO_END,
    Start,
    kill_and_check,
    kill_ten_times_and_check,
    kill_under_torchrun_and_check,
    tell_and_check,
)
from memory_model import EPOCHS, RECORDS, Tally, each

PAGE = Page("accelerate.md")


def forget() -> None:
    """Let Accelerate begin anew."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def test_five_lines_at_most_are_another() -> None:
    PAGE.check_five_lines_at_most_are_another()


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    leave_other_jobs(monkeypatch)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    yield
    forget()


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Remembers]:
    """Those that programs make, of the module that they import."""
    monkeypatch.setattr(torch.optim, "SGD", lambda parameters, lr: Tally(*parameters))
    return models_of(monkeypatch, tmp_path, Remembers, loss_of=lambda model, batch: model(batch).sum())


@pytest.mark.parametrize("sign", ["-", "+"])
def test_the_program_runs(sign: str, models: list[Remembers]) -> None:
    PAGE.check_program_runs(sign, models)


def test_the_program_that_looks_at_notices_ends_on_one_and_goes_on(models: list[Remembers]) -> None:
    (look,) = re.findall(r"## Notices\n.*?```python\n(.*?)```", PAGE.text, re.S)
    before, save = PAGE.program("+").rsplit("    accelerator.save_state", 1)
    text = f"import sys\n{before}{indent(look, ' ' * 8)}    accelerator.save_state{save}"
    code = compile(text, "the program that looks", "exec")
    loss_of = sys.modules["model"].loss_of

    def told(model: Any, batch: torch.Tensor) -> torch.Tensor:
        if not models[1:] and sum(models[0].learnt.values()) == RECORDS:
            signal.raise_signal(signal.SIGTERM)  # in the first batch of the second epoch
        return loss_of(model, batch)

    found: dict[str, Any] = {"__name__": "script"}
    sys.modules["model"].loss_of = told  # type: ignore[attr-defined]
    with pytest.raises(SystemExit) as end:
        exec(code, found)
    assert end.value.code == 143
    found["loader"].close()
    forget()
    found = {"__name__": "script"}
    exec(code, found)
    assert models[1].learnt == each(EPOCHS + 1)
    found["loader"].close()


# Jobs that are killed, and go on from their checkpoints -----------------------------------------------------


@pytest.mark.parametrize(("ranks", "workers", "accumulate", "every", "seed"), KILLED)
def test_a_job_that_is_killed_learns_each_record_of_each_epoch_once(
    start_job: Start, ranks: int, workers: int, accumulate: int, every: int, seed: int
) -> None:
    settings = Settings(ranks=ranks, workers=workers, accumulate=accumulate, every=every)
    kill_and_check(start_job, settings, seed, {"epoch over": EPOCHS, "saving": EPOCHS})


@each_job
def test_a_job_that_is_killed_ten_times_learns_each_record_of_each_epoch_once(
    start_job: Start, ranks: int, workers: int, accumulate: int
) -> None:
    settings = Settings(ranks=ranks, workers=workers, accumulate=accumulate, every=EVERY[accumulate])
    kill_ten_times_and_check(start_job, settings, {"saving": settings.every}, ["epoch over"])


@pytest.mark.parametrize(("ranks", "workers", "accumulate"), TOLD_TO_END)
def test_a_job_that_is_told_to_end_saves_and_loses_no_step(
    start_job: Start, ranks: int, workers: int, accumulate: int
) -> None:
    settings = Settings(ranks=ranks, workers=workers, accumulate=accumulate, every=100, step_s=0.02)
    tell_and_check(start_job, settings)


def test_under_torchrun_a_killed_rank_costs_a_restart_and_no_record(tmp_path: Path) -> None:
    kill_under_torchrun_and_check(Path(__file__).with_name("accelerate_program.py"), tmp_path)
