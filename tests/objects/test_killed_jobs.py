"""Jobs over a store with faults, away for a while, whose trainers are killed: an oracle of weights."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from store_trainer import EPOCHS
from stores import BUCKET, Request, put

from edl_torch.audit.verdict import Outcome, audit

RECORDS = 203
KILLS = 3


@pytest.fixture(scope="module")
def pictures(bucket: Any) -> str:
    """Pictures whose first pixel tells their number."""

    def numbered(number: int) -> bytes:
        image = np.full((4, 4, 3), [number % 250, number // 250, 9], np.uint8)
        return bytes(cv2.imencode(".png", image[..., ::-1])[1].tobytes())

    put(bucket, {f"killed/{'ab'[n % 2]}/{n:03d}.png": numbered(n) for n in range(RECORDS)})
    return f"s3://{BUCKET}/killed"


def run(folder: Path, settings: dict[str, Any], batches: int | None) -> int:
    """Run a trainer, and kill it after so many batches. Returns its exit status."""
    program = Path(__file__).with_name("store_trainer.py")
    process = subprocess.Popen(
        [sys.executable, str(program), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin as stdin, process.stdout as lines:
        json.dump(settings, stdin)
        stdin.close()
        for number, _ in enumerate(lines):
            if number == batches:
                process.kill()
        return process.wait(timeout=120)


@pytest.mark.parametrize(
    ("workers", "threads"),
    [pytest.param(0, 0, marks=pytest.mark.long), (2, 0), pytest.param(0, 2, marks=pytest.mark.long)],
)
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
def test_the_model_has_learnt_each_record_as_often_as_from_files(
    weed, proxy, pictures, tmp_path, seed, workers, threads
):
    chance = random.Random(seed)
    settings = {
        "url": pictures,
        "options": weed.options(proxy.url),
        "records": RECORDS,
        "workers": workers,
        "threads": threads,
    }
    away = threading.Event()

    def fault(request: Request) -> str:
        if away.is_set():
            return "reset"
        return chance.choice(("503", "reset", "short", "500")) if chance.random() < 0.05 else ""

    proxy.fault = fault
    for _ in range(KILLS):
        assert run(tmp_path, settings, chance.randrange(2, 14)) == -9
    back = threading.Timer(4.0, away.clear)  # seconds in which nothing can be read
    away.set()
    back.start()
    try:
        assert run(tmp_path, settings, None) == 0
    finally:
        back.cancel()
    learnt = torch.load(tmp_path / "model.pt", weights_only=True)["learnt"]
    assert (learnt == EPOCHS).all(), learnt
    (verdict,) = audit([tmp_path / "audit"])
    assert verdict.outcome is Outcome.PROVEN, verdict
