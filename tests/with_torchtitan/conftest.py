"""Tests of torchtitan's corner: they run where it is installed, by `make test-torchtitan`.

The folder is not called torchtitan: Python would take it for the package where that is missing.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest


class Skipped(pytest.Module):
    """A module that cannot be imported here."""

    def collect(self):
        pytest.skip("torchtitan is not installed: make test-torchtitan", allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    """Skip what needs torchtitan, with a reason, where it is missing."""
    return None if find_spec("torchtitan") else Skipped.from_parent(parent, path=module_path)


def pytest_collection_modifyitems(items):
    """torchtitan and what it imports warn of themselves; of ours every warning is an error."""
    for item in items:
        if "/tests/with_torchtitan/" in str(item.path):
            item.add_marker(pytest.mark.filterwarnings("default"))
