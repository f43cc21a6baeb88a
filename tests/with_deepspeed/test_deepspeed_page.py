"""The loop of docs/deepspeed.md trains, saves and goes on, as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.ops
import pytest
import torch

from edl_torch import ElasticDataLoader
from edl_torch.readers import MapDatasetReader

PAGE = (Path(__file__).parents[2] / "docs" / "deepspeed.md").read_text("utf-8")
(BLOCK,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)


@pytest.mark.slow
def test_the_loop_trains_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm", False)
    deepspeed.init_distributed("gloo")
    steps = []
    for _ in range(2):
        model = torch.nn.Linear(2, 2)
        names: dict[str, Any] = {
            "deepspeed": deepspeed,
            "ElasticDataLoader": ElasticDataLoader,
            "model": model,
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
            "criterion": torch.nn.functional.cross_entropy,
            "config": {"train_micro_batch_size_per_gpu": 4},
            "reader": MapDatasetReader([(torch.rand(2), n % 2) for n in range(440)]),
        }
        exec(compile(BLOCK, "docs/deepspeed.md", "exec"), names)
        assert names["loader"].service.finished
        steps.append(names["engine"].global_steps)
        names["loader"].close()
    assert steps == [220, 220]
    assert (tmp_path / "checkpoints" / "latest").read_text() == "global_step200"
