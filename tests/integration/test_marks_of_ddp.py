"""DDP with gradient accumulation on two ranks: what is proven is in the model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ddp_counts import RECORDS

from edl_torch.audit.verdict import Outcome, audit
from edl_torch.cli.verdict_words import inexact

RANK = Path(__file__).with_name("ddp_counts.py")


@pytest.mark.slow
@pytest.mark.parametrize("gradients", ["copy", "view"])
@pytest.mark.parametrize("before", ["keep", "zero", "unweighed"])
def test_windows_of_ddp_are_proven_where_the_model_has_each_record(
    tmp_path: Path, gradients: str, before: str
) -> None:
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*run, str(RANK), str(tmp_path), gradients, before], timeout=110, check=False, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    learnt = torch.load(tmp_path / "learnt.pt", weights_only=True)
    (verdict,) = audit([tmp_path / "audit"])
    is_exact = learnt.tolist() == [1.0] * RECORDS
    assert is_exact == (before == "keep")
    assert (verdict.outcome is Outcome.PROVEN) == is_exact
    if before == "unweighed":
        assert {1.0, 2.0} <= set(learnt.tolist())
        assert verdict.outcome is Outcome.INEXACT
        assert verdict.padding >= 1
        assert any("loader.weigh(loss)" in said for said in inexact(verdict))
