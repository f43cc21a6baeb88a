"""Tests of Accelerate's corner: they run where it is installed, by `make test-accelerate`."""

from __future__ import annotations

from pathlib import Path

from framework_folder import hooks_of, job_fixture

pytest_pycollect_makemodule, pytest_collection_modifyitems = hooks_of(Path(__file__).parent, "accelerate")
start_job = job_fixture("accelerate_program")
