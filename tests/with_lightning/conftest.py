"""Tests of Lightning's corner: they run where it is installed, by `make test-lightning`.

The folder is not called lightning: Python would take it for the package where that is missing.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest


class Skipped(pytest.Module):
    """A module that cannot be imported here."""

    def collect(self):
        pytest.skip("Lightning is not installed: make test-lightning", allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    """Skip what needs Lightning, with a reason, where it is missing."""
    return None if find_spec("lightning") else Skipped.from_parent(parent, path=module_path)


def pytest_collection_modifyitems(items):
    """Lightning warns of itself in use; of ours every warning is an error."""
    for item in items:
        if "/tests/with_lightning/" in str(item.path):
            item.add_marker(pytest.mark.filterwarnings("default"))
            item.add_marker(pytest.mark.filterwarnings("error:all [0-9]+ epoch"))
            item.add_marker(pytest.mark.filterwarnings("error:the loop was left"))
            item.add_marker(pytest.mark.filterwarnings("error:Trainer.fit has ended"))
            item.add_marker(pytest.mark.filterwarnings("error:of the optimizers attached"))
