"""train.py killed with -9 as a process, and resumed: the weights are those of a run that nobody killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import preloaded
import pytest
import torch
import train
from coco_kit import arguments, differing, weights

from edl_torch.testing import wait_until

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
TRAIN = ROOT / "examples" / "coco" / "train.py"
KILLED = HERE / "killed_train.py"
BATCHES = 19  # an epoch: 150 captions


def command(script: Path, *given: str) -> list[str]:
    return [sys.executable, "-W", "ignore", str(script), *given]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


def run(script: Path, *given: str) -> subprocess.CompletedProcess[str]:
    return preloaded.run(
        command(script, *given), env=environment(), capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize(
    ("save_at", "kill_at"),
    [
        pytest.param(6, "11", id="first epoch", marks=pytest.mark.long),
        pytest.param(BATCHES + 2, str(BATCHES + 15), id="second epoch"),
        pytest.param(7, "saving", id="while the next checkpoint is written"),
    ],
)
def test_a_run_killed_in_mid_epoch_ends_with_the_weights_of_one_that_was_not(
    save_at: int,
    kill_at: str,
    dataset: Path,
    tmp_path: Path,
    uninterrupted: dict[str, torch.Tensor],
    capsys: pytest.CaptureFixture[str],
) -> None:
    killed = run(KILLED, str(save_at), kill_at, *arguments(dataset, tmp_path))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert differing(weights(tmp_path), uninterrupted)
    assert train.main(arguments(dataset, tmp_path, "--resume")) == 0
    assert "delivered 300 of 300 annotations, each once" in capsys.readouterr().out
    assert differing(weights(tmp_path), uninterrupted) == []


def test_a_run_killed_from_outside_at_any_moment_goes_on_from_its_last_checkpoint(
    dataset: Path, tmp_path: Path, uninterrupted: dict[str, torch.Tensor]
) -> None:
    every = ("--checkpoint-every", "0.001")
    process = preloaded.Popen(
        command(TRAIN, *arguments(dataset, tmp_path, *every)),
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(after_changes(tmp_path / "checkpoint.pt", 4), timeout_s=60, poll_s=0.001)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGKILL
    assert differing(weights(tmp_path), uninterrupted)
    resumed = run(TRAIN, *arguments(dataset, tmp_path, "--resume"))
    assert resumed.returncode == 0, resumed.stderr
    assert "delivered 300 of 300 annotations, each once" in resumed.stdout
    assert differing(weights(tmp_path), uninterrupted) == []


def after_changes(path: Path, count: int) -> Callable[[], bool]:
    """Whether the file was seen with so many contents."""
    seen: set[int] = set()

    def changed() -> bool:
        if path.exists():
            seen.add(path.stat().st_mtime_ns)
        return len(seen) >= count

    return changed
