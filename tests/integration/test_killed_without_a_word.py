"""README's loop, without `attach()`, killed with -9 at any instant: from its checkpoints it is proven."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import preloaded
import pytest
import torch
from killed_trainer import EPOCHS, RECORDS

from edl_torch.audit.verdict import Outcome, audit
from edl_torch.cli.verdict_words import headline, inexact, undecided

TRAINER = Path(__file__).with_name("killed_trainer.py")
LIVES, CALLS, END_S = 4, 60_000, 120.0


def live(folder: Path, call: int) -> int:
    """Run one life of the job. Returns its exit status."""
    process = preloaded.Popen([sys.executable, str(TRAINER), str(folder), str(call)])
    try:
        return process.wait(END_S)
    finally:
        process.kill()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 12))])
def test_a_loop_without_attach_that_is_killed_at_any_instant_is_proven(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    ends = [live(tmp_path, rng.randrange(1, CALLS)) for _ in range(LIVES)]
    assert live(tmp_path, 0) == 0
    assert -9 in ends, "it was never killed"
    learnt = torch.load(tmp_path / "model.pt", weights_only=True)["learnt"]
    assert learnt.tolist() == [EPOCHS] * RECORDS
    (verdict,) = audit([tmp_path / "audit"])
    assert [*undecided(verdict), *inexact(verdict)] == []
    assert (verdict.outcome, headline(verdict).split(",")[0]) == (Outcome.PROVEN, "PROVEN")
