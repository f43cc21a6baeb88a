"""Tests of Accelerate's corner: they run where it is installed, by `make test-accelerate`.

The folder is not called accelerate: Python would take it for the package where that is missing.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest


class Skipped(pytest.Module):
    """A module that cannot be imported here."""

    def collect(self):
        pytest.skip("Accelerate is not installed: make test-accelerate", allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    """Skip what needs Accelerate, with a reason, where it is missing."""
    return None if find_spec("accelerate") else Skipped.from_parent(parent, path=module_path)


def pytest_collection_modifyitems(items):
    """Accelerate warns of itself in use; of ours every warning is an error."""
    for item in items:
        if "/tests/with_accelerate/" in str(item.path):
            item.add_marker(pytest.mark.filterwarnings("default"))
            item.add_marker(pytest.mark.filterwarnings("error:all [0-9]+ epoch"))
            item.add_marker(pytest.mark.filterwarnings("error:the loop was left"))
            item.add_marker(pytest.mark.filterwarnings("error:of the optimizers attached"))
