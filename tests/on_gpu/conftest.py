"""Tests with a GPU, by `make test-gpu`. What means something on the processor too runs there everywhere."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from framework_folder import bear_warnings_in
from gpu_kit import Graphs

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "coco")
if EXAMPLE not in sys.path:  # its modules are scripts beside each other, not a package
    sys.path.insert(0, EXAMPLE)

pytest_collection_modifyitems = bear_warnings_in(Path(__file__).parent)


def _there(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU: `make test-gpu` on a machine with one")
    return torch.device(name)


@pytest.fixture
def gpu() -> torch.device:
    return _there("cuda")


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> torch.device:
    return _there(request.param)


@pytest.fixture
def graphs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Graphs:
    """What captures steps."""
    return Graphs(device, monkeypatch)
