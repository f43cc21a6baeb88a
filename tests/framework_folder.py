"""What the folders of tests with a framework have in common: they run where that is installed.

A folder is not called as its framework: Python would take it for the package where that is missing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

OURS = (
    "a pass over",
    "all [0-9]+ epoch",
    "the loop was left",
    "Trainer.fit has ended",
    "of the optimizers attached",
)


def hooks_of(folder: Path, name: str, *packages: str, **environment: str) -> tuple[Any, Any]:
    """Return `pytest_pycollect_makemodule` and `pytest_collection_modifyitems` for a folder's conftest.py.

    The first skips its modules, with a reason, where the package `name` or one of `packages` is missing; the
    second bears the warnings of frameworks about themselves, and none of ours. Processes that tests start
    find the modules of the folder, those beside it and the package; they have `environment` where it says
    nothing else.
    """
    missing = [package for package in (name, *packages) if not find_spec(package)]
    if not missing:
        paths = [str(folder), str(folder.parent), str(folder.parents[1]), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        for variable, value in {"OMP_NUM_THREADS": "1", **environment}.items():
            os.environ.setdefault(variable, value)

    class Skipped(pytest.Module):
        """A module that cannot be imported here."""

        def collect(self) -> Any:
            pytest.skip(f"{missing[0]} is not installed: make test-{name}", allow_module_level=True)

    def skip(module_path: Path, parent: Any) -> Any:
        return Skipped.from_parent(parent, path=module_path) if missing else None

    return skip, bear_warnings_in(folder)


def job_fixture(program: str) -> Any:
    """Return the fixture `start_job` for a folder's conftest.py: it makes jobs of `program`, the module with
    one rank of it, under a master with a journal in `tmp_path / "state"`."""

    @pytest.fixture
    def start_job(tmp_path: Path) -> Iterator[Callable[[Any], Any]]:
        from framework_jobs import jobs_of

        with jobs_of(program, tmp_path) as start:
            yield start

    return start_job


def bear_warnings_in(folder: Path) -> Any:
    """Return `pytest_collection_modifyitems`, which lets others warn about themselves, and not us."""

    prefix = f"{folder}{os.sep}"  # of thousands of tests, which are asked in each folder

    def bear_warnings(items: list[Any]) -> None:
        for item in items:
            if str(item.path).startswith(prefix):
                item.add_marker(pytest.mark.filterwarnings("default"))
                for warning in OURS:
                    item.add_marker(pytest.mark.filterwarnings(f"error:{warning}"))

    return bear_warnings
