"""Tests of Lightning's corner: they run where it is installed, by `make test-lightning`."""

from __future__ import annotations

from pathlib import Path

from framework_folder import hooks_of, job_fixture

pytest_pycollect_makemodule, pytest_collection_modifyitems = hooks_of(Path(__file__).parent, "lightning")
start_job = job_fixture("lightning_program")
