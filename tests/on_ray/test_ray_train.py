"""Ray Train: workers that are killed, groups that are resized, Ray's own example and its loaders."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.train.torch
import torch
from kill_matrix import KILLS, each_job
from ray.train import FailureConfig, RunConfig, ScalingConfig
from torch import nn

from edl_torch import ElasticDataLoader
from edl_torch.errors import InvalidArgument
from edl_torch.integrations.ray import master_client, start_master
from edl_torch.testing import FakeMaster

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]
QUICK_ENOUGH = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # how long a report takes
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "0.5",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "20",
}


def check_audit(folder: Path, state: Path, records: int) -> None:
    """The command says that each record of each epoch counts once in the model."""
    done = subprocess.run(
        [sys.executable, "-m", "edl_torch", "audit", folder, "--state", state],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    proven = r": PROVEN(, data (the same by \w+|not known to be the same))?$"
    assert re.search(proven, done.stdout, re.MULTILINE), done.stdout
    assert f"acknowledged {records} " in done.stdout


def run_and_check(folder: Path, timeout_s: float, **options: int) -> None:
    """Run a job to its end, where its model has learnt each record once an epoch."""
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    done = subprocess.run(
        [sys.executable, ROOT / "tests/on_ray/remembering_job.py", folder, *arguments],
        env={**os.environ, **QUICK_ENOUGH},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    outcome = json.loads((folder / "outcome.json").read_text())
    assert outcome["once"] == [1602, 1602]
    assert outcome["kills"] == options["kills"]
    if options["ranks"] == 2:
        sizes = [event for event in outcome["events"] if event.endswith(" train")]
        assert sizes == ["2 train", "1 train", "2 train", "2 train", "1 train"]
        assert sorted(outcome["just_in_time"]) == ["0", "1"]
    check_audit(folder / "audit", folder / "master", 3204)


@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    ("accumulation", "workers", "seed"), [(4, 2, 2), pytest.param(1, 0, 1, marks=pytest.mark.long)]
)
def test_a_group_that_is_killed_shrunk_and_grown_learns_every_record_once(
    tmp_path: Path, accumulation: int, workers: int, seed: int
) -> None:
    run_and_check(tmp_path, 950, ranks=2, accumulation=accumulation, workers=workers, seed=seed, kills=5)


@each_job
def test_a_job_that_is_killed_ten_times_learns_each_record_of_each_epoch_once(
    tmp_path: Path, ranks: int, workers: int, accumulate: int
) -> None:
    """Those of two ranks lose a node, get one and lose one again."""
    seed = 8 * ranks + workers + accumulate
    run_and_check(
        tmp_path, 1700, ranks=ranks, accumulation=accumulate, workers=workers, seed=seed, kills=KILLS
    )


# Ray's own example, as the package `ray` has it, and what its lines become.
EXAMPLE = "train/examples/pytorch/torch_quick_start.py"
LINES = {
    "dataloader = DataLoader(dataset, batch_size=batch_size, shuffle=True)": [
        "dataloader = ElasticDataLoader(dataset, batch_size, num_epochs=num_epochs, shuffle=True, "
        "synchronous=True, master_client=master_client())"
    ],
    "dataloader = ray.train.torch.prepare_data_loader(dataloader)": ["dataloader.load_state_dict(None)"],
    "for epoch in range(num_epochs):": ["for epoch in dataloader.epochs():"],
    "if ray.train.get_context().get_world_size() > 1:": [],
    "dataloader.sampler.set_epoch(epoch)": [],
    "loss.backward()": ["dataloader.weigh(loss).backward()"],
    "optimizer.step()": ["dataloader.scale_gradients(optimizer)", "optimizer.step()"],
}


def elastic_example() -> str:
    """Its training function with the lines of edl_torch."""
    whole = Path(ray.__file__).parent.joinpath(EXAMPLE).read_text()
    (function,) = (
        node
        for node in ast.parse(whole).body
        if isinstance(node, ast.FunctionDef) and node.name == "train_func_distributed"
    )
    theirs = whole.splitlines()[function.lineno - 1 : function.end_lineno]
    ours = []
    for line in theirs:
        code = line.strip()
        indent = line.removesuffix(line.lstrip())
        ours += [indent + new for new in LINES.get(code, [code])]
    assert {line.strip() for line in theirs} >= set(LINES)
    assert len(set(ours) - set(theirs)) == 5
    assert len(ours) == len(theirs) - 2 + 1
    return "\n".join(ours)


class Images(torch.utils.data.Dataset[Any]):
    """Record `deadly` kills the worker that reads it, once."""

    def __init__(self, mark: Path, deadly: int) -> None:
        self.mark = mark
        self.deadly = deadly

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == self.deadly and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((8,), index / 1000), index % 2


def test_rays_own_example_is_exact_with_five_lines_of_edl_torch(ray_cluster: Any, tmp_path: Path) -> None:
    names = {
        "ElasticDataLoader": partial(ElasticDataLoader, audit_dir=tmp_path / "audit"),
        "master_client": master_client,
        "get_dataset": partial(Images, tmp_path / "killed", 500),
        "NeuralNetwork": partial(nn.Linear, 8, 2),
        "nn": nn,
        "ray": ray,
        "torch": torch,
    }
    exec(elastic_example(), names)
    with start_master(state=tmp_path / "state", host="127.0.0.1"):
        ray.train.torch.TorchTrainer(
            names["train_func_distributed"],
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=str(tmp_path), failure_config=FailureConfig(max_failures=1)),
        ).fit()
    assert (tmp_path / "killed").exists()
    check_audit(tmp_path / "audit", tmp_path / "state", 3000)


def prepare(config: dict[str, Any]) -> None:
    with ElasticDataLoader(range(40), 4, master_client=FakeMaster(), synchronous=False) as loader:
        prepared = ray.train.torch.prepare_data_loader(loader)
        with pytest.raises(InvalidArgument, match=r"reads one batch ahead.*give move_to_device=False"):
            iter(prepared)
        assert not loader.progress().acknowledged
        assert ray.train.torch.prepare_data_loader(loader, move_to_device=False) is loader


@pytest.mark.parametrize("workers", [1, 2])
def test_rays_wrapper_that_reads_ahead_is_refused(ray_cluster: Any, tmp_path: Path, workers: int) -> None:
    ray.train.torch.TorchTrainer(
        prepare,
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(storage_path=str(tmp_path)),
    ).fit()
