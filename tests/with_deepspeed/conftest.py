"""Tests of DeepSpeed's corner: they run where it is installed, by `make test-deepspeed`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from framework_folder import hooks_of

pytest_pycollect_makemodule, pytest_collection_modifyitems = hooks_of(
    Path(__file__).parent, "deepspeed", DS_ACCELERATOR="cpu"
)


@pytest.fixture
def start_job(tmp_path: Path) -> Iterator[Callable[[Any], Any]]:
    """Makes a job, under a master with a journal in `tmp_path / "state"`."""
    from framework_jobs import jobs_of

    with jobs_of("deepspeed_program", tmp_path) as start:
        yield start
