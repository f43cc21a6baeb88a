"""What the folders of tests with a framework have in common: they run where that is installed.

A folder is not called as its framework: Python would take it for the package where that is missing.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

OURS = ("all [0-9]+ epoch", "the loop was left", "Trainer.fit has ended", "of the optimizers attached")


def hooks_of(folder: Path, name: str, *packages: str) -> tuple[Any, Any]:
    """Return `pytest_pycollect_makemodule` and `pytest_collection_modifyitems` for a folder's conftest.py.

    The first skips its modules, with a reason, where the package `name` or one of `packages` is missing; the
    second bears the warnings of frameworks about themselves, and none of ours. Processes that tests start
    find the folder's modules.
    """
    missing = [package for package in (name, *packages) if not find_spec(package)]
    if not missing:
        paths = [str(folder), str(folder.parent), str(folder.parents[1]), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        os.environ.setdefault("OMP_NUM_THREADS", "1")

    class Skipped(pytest.Module):
        """A module that cannot be imported here."""

        def collect(self) -> Any:
            pytest.skip(f"{missing[0]} is not installed: make test-{name}", allow_module_level=True)

    def skip(module_path: Path, parent: Any) -> Any:
        return Skipped.from_parent(parent, path=module_path) if missing else None

    def bear_warnings(items: list[Any]) -> None:
        for item in items:
            if folder in item.path.parents:
                item.add_marker(pytest.mark.filterwarnings("default"))
                for warning in OURS:
                    item.add_marker(pytest.mark.filterwarnings(f"error:{warning}"))

    return skip, bear_warnings
