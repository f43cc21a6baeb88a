"""Real ranks over gloo, and over nccl where there is a GPU: gradients are those of one process."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import preloaded
import pytest
import torch
import torch.distributed as dist
from master_kit import MasterProcess

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RECORDS, EPOCHS = 47, 2


@pytest.fixture
def master(start_master: Callable[..., MasterProcess]) -> str:
    """A master's address."""
    return start_master().address


def run(
    master: str, tmp_path: Path, world: int, records: int, *arguments: str
) -> dict[int, list[dict[str, object]]]:
    """Jobs of 1 … `world` ranks; what each rank wrote of each, by size."""
    script = [sys.executable, "-W", "ignore", str(HERE / "lockstep_process.py")]
    store = tmp_path / "store"
    common = ["--store", str(store), "--world", str(world), "--records", str(records)]
    done = preloaded.run(
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
        (3, ["--slow_s", "0.01"]),
        pytest.param(4, ["--accumulate", "3", "--amp", "--count"], marks=pytest.mark.long),
        (2, ["--wrap", "fsdp2", "--accumulate", "2", "--amp"]),
        pytest.param(2, ["--elsewhere"], marks=pytest.mark.long),
    ],
    ids=["ddp", "ddp-accumulate-amp", "fsdp2-accumulate-amp", "default-group-without-cpu"],
)
def test_gradients_are_those_of_one_process(
    master: str, tmp_path: Path, world: int, arguments: list[str]
) -> None:
    check(master, tmp_path, world, arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--amp", "--accumulate", "2"],
        pytest.param(["--compile", "--count"], marks=pytest.mark.long),
        pytest.param(["--wrap", "fsdp2"], marks=pytest.mark.long),
    ],
    ids=["ddp-accumulate-amp", "ddp-compiled", "fsdp2"],
)
def test_an_infinite_derivative_of_what_stands_in_is_in_no_gradient(
    master: str, tmp_path: Path, arguments: list[str]
) -> None:
    found = check(master, tmp_path, 2, ["--poison", *arguments], records=3)  # one batch, for two ranks
    assert sum(int(str(job["poisoned"])) for job in found[2]) > 0
    assert not any(job["overflows"] for job in found[2])


@pytest.mark.skipif(not (torch.cuda.is_available() and dist.is_nccl_available()), reason="no GPU with nccl")
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_so_they_are_over_nccl(master: str, tmp_path: Path, world: int, wrap: str) -> None:
    if torch.cuda.device_count() < world:
        pytest.skip(f"{world} ranks need as many GPUs")
    check(master, tmp_path, world, ["--device", "cuda", "--wrap", wrap, "--accumulate", "2", "--amp"])


def check(
    master: str, tmp_path: Path, world: int, arguments: list[str], records: int = RECORDS
) -> dict[int, list[dict[str, object]]]:
    found = run(master, tmp_path, world, records, *arguments)
    for size, jobs in found.items():
        assert len(jobs) == size
        assert len({job["steps"] for job in jobs}) == 1
        assert max(float(str(job["worst"])) for job in jobs) < 1e-12
        counts = Counter(number for job in jobs for number in job["trained"])  # type: ignore[attr-defined]
        assert counts == Counter(dict.fromkeys(range(records), EPOCHS))
    return found
