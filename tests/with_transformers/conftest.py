"""Tests of Transformers's corner: they run where it is installed, by `make test-transformers`."""

from __future__ import annotations

from pathlib import Path

from framework_folder import hooks_of, job_fixture

pytest_pycollect_makemodule, pytest_collection_modifyitems = hooks_of(
    *(Path(__file__).parent, "transformers", "accelerate"),
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_VERBOSITY="error",
)
start_job = job_fixture("train_program")
