"""Tests of the adapter for DeepSpeed: they run where the package is installed, by `make test-deepspeed`.

The folder is not called deepspeed: Python would take it for the package where that is missing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = Path(__file__).parent
os.environ["PYTHONPATH"] = os.pathsep.join(  # of the processes that jobs are
    filter(None, [str(HERE), str(HERE.parent), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
)


class Skipped(pytest.Module):
    """A module that cannot be imported here."""

    def collect(self) -> Any:
        pytest.skip("deepspeed is not installed: make test-deepspeed", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: Any) -> Any:
    """Skip what needs deepspeed, with a reason, where it is missing."""
    there = find_spec("deepspeed")
    return None if there else Skipped.from_parent(parent, path=module_path)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """The frameworks warn about themselves on import and in use."""
    for item in items:
        if "/tests/with_deepspeed/" in str(item.path):
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture
def start_job(tmp_path: Path) -> Iterator[Callable[[Any], Any]]:
    """Makes a job, under a master with a journal in `tmp_path / "state"`."""
    from framework_jobs import Job

    from edl_torch.master.threaded import ThreadedMaster

    masters = []

    def start(settings: Any) -> Any:
        masters.append(ThreadedMaster("127.0.0.1:0", state=tmp_path / "state", grace_s=0.2))
        return Job(tmp_path, "deepspeed_program", masters[-1], settings)

    yield start
    for master in masters:
        with suppress(RuntimeError):
            master.stop()
