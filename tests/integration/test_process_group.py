"""Real ranks over gloo: the gradients are those of one process over the same records."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from master_kit import MasterProcess

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RECORDS, EPOCHS = 47, 2


@pytest.fixture
def master(start_master: Callable[..., MasterProcess]) -> str:
    """A master's address."""
    return start_master().address


def run(master: str, tmp_path: Path, world: int, *arguments: str) -> dict[int, list[dict[str, object]]]:
    """Jobs of 1 … `world` ranks; what each rank wrote of each, by size."""
    script = [sys.executable, "-W", "ignore", str(HERE / "lockstep_process.py")]
    store = tmp_path / "store"
    common = ["--store", str(store), "--world", str(world), "--records", str(RECORDS)]
    done = subprocess.run(
        [*script, *common, *arguments],
        env={**os.environ, "EDL_MASTER_ADDR": master, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    found: dict[int, list[dict[str, object]]] = {}
    for rank in range(world):
        for job in json.loads(Path(f"{store}.{rank}").read_text()):
            found.setdefault(job["size"], []).append(job)
    return found


@pytest.mark.parametrize(
    ("world", "arguments"),
    [
        (4, ["--slow_s", "0.01"]),
        (4, ["--accumulate", "3", "--amp"]),
        (2, ["--wrap", "fsdp2", "--accumulate", "2"]),
    ],
    ids=["ddp", "ddp-accumulate-amp", "fsdp2"],
)
def test_gradients_are_those_of_one_process(
    master: str, tmp_path: Path, world: int, arguments: list[str]
) -> None:
    for size, jobs in run(master, tmp_path, world, *arguments).items():
        assert len(jobs) == size
        assert len({job["steps"] for job in jobs}) == 1
        assert max(float(str(job["worst"])) for job in jobs) < 1e-6
        counts = Counter(number for job in jobs for number in job["trained"])  # type: ignore[attr-defined]
        assert counts == Counter(dict.fromkeys(range(RECORDS), EPOCHS))
