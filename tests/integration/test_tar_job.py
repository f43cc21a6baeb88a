"""A job over tar shards that is killed again and again: the model has counted each record once an epoch."""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path

import preloaded
import pytest
import torch
from tar_files import samples_tar

from edl_torch.cli.main import main

PROGRAM = Path(__file__).with_name("tar_program.py")
EPOCHS = 2
PLACES = ("read", "backward", "step", "saved")


def shards(folder: Path, sizes: list[int]) -> int:
    """Tars of so many samples each, in pax and GNU form in turn; returns how many records they have."""
    folder.mkdir()
    for number, size in enumerate(sizes):
        samples_tar(folder / f"train-{number:03}.tar", size, begin=sum(sizes[:number]), format=1 + number % 2)
    return sum(sizes)


def run(*arguments: object) -> int:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("EDL_", "MASTER_"))}
    command = [sys.executable, str(PROGRAM), *map(str, arguments)]
    ran = preloaded.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert ran.returncode in (0, -signal.SIGKILL), ran.stderr
    return ran.returncode


def kill_and_prove(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kills: int, workers: int, seed: int
) -> None:
    chance = random.Random(seed)
    records = shards(tmp_path / "data", [chance.randint(1, 30) for _ in range(4)])
    died = 0
    for _ in range(kills):
        place, last = chance.choice(PLACES), chance.randint(1, 12)
        last = last * 3 if place == "saved" else last
        print(f"seed {seed}: {place} {last}")
        died += run(tmp_path / "data", tmp_path, records, workers, place, last) != 0
    assert died
    assert run(tmp_path / "data", tmp_path, records, workers, "read", 0) == 0
    assert torch.load(tmp_path / "counts.pt").tolist() == [EPOCHS] * records
    assert main(["audit", str(tmp_path / "audit")]) == 0
    assert "PROVEN, data the same by samples" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kills", "workers", "seed"), [pytest.param(2, 0, 1, marks=pytest.mark.long), (1, 2, 2)]
)
def test_each_record_counts_once_though_the_job_is_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kills: int, workers: int, seed: int
) -> None:
    kill_and_prove(tmp_path, capsys, kills, workers, seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10, 14))
def test_each_record_counts_once_though_the_job_is_killed_often(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    kill_and_prove(tmp_path, capsys, kills=5, workers=seed % 2 * 2, seed=seed)
