"""Training and evaluation by turns, over one master that made both datasets, with several trainers."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path

import preloaded
import pytest
from master_kit import MakeMaster

HERE = Path(__file__).parent
TRAIN, EVAL, EPOCHS = 90, 26, 3

Outcome = tuple[str, int, int]  # dataset, epoch, record


def run(
    start_master: MakeMaster, tmp_path: Path, *options: str
) -> tuple[Counter[Outcome], int, tuple[int, int]]:
    """What all trainers were done with, how many of them died, what was acknowledged of both datasets."""
    train, evaluate = tmp_path / "train.txt", tmp_path / "eval.txt"
    train.write_text("".join(f"{n}\n" for n in range(TRAIN)))
    evaluate.write_text("".join(f"{n}\n" for n in range(EVAL)))
    data = ("--training_data", str(train), "--validation_data", str(evaluate))
    settings = (
        "--records_per_task",
        "8",
        "--num_epochs",
        str(EPOCHS),
        "--shuffle_shards",
        "--grace-s",
        "0.2",
    )
    master = start_master(*data, *settings, "--grace-s", "0.2")
    script = [sys.executable, str(HERE / "evaluation_process.py"), str(train), str(evaluate)]
    died = preloaded.run(
        [*script, str(tmp_path / "seen"), *options],
        env={**os.environ, "EDL_MASTER_ADDR": master.address, "PYTHONPATH": str(HERE.parents[1])},
        timeout=120,
    ).returncode
    states = [master.client().dataset_status(name) for name in ("training", "evaluation")]
    assert all(status.finished for status in states)
    lines = [line.split() for path in tmp_path.glob("seen.*") for line in path.read_text().splitlines()]
    seen = Counter((dataset, int(epoch), int(record)) for dataset, epoch, record in lines)
    return seen, died, (states[0].acknowledged, states[1].acknowledged)


def expected() -> set[Outcome]:
    sizes = {"training": TRAIN, "evaluation": EVAL}
    return {(name, epoch, n) for name, size in sizes.items() for epoch in range(EPOCHS) for n in range(size)}


@pytest.mark.parametrize("delays", [pytest.param(["0"], marks=pytest.mark.long), ["0", "0.004", "0.05"]])
def test_each_epoch_of_evaluation_is_shared_once(
    start_master: MakeMaster, tmp_path: Path, delays: list[str]
) -> None:
    seen, died, acknowledged = run(start_master, tmp_path, "--delays", *delays)
    assert died == 0
    assert seen == Counter(expected())
    assert acknowledged == (TRAIN * EPOCHS, EVAL * EPOCHS)


def test_a_trainer_that_dies_in_an_evaluation_costs_nothing(start_master: MakeMaster, tmp_path: Path) -> None:
    seen, died, acknowledged = run(start_master, tmp_path, "--delays", "0.004", "0.004", "--dies", "1:1:2")
    assert died == 1
    assert set(seen) == expected()
    assert max(seen.values()) <= 2
    twice = [outcome for outcome, times in seen.items() if times == 2]
    assert len(twice) <= 4  # the batch that it had noted and not acknowledged
    assert acknowledged == (TRAIN * EPOCHS, EVAL * EPOCHS)
