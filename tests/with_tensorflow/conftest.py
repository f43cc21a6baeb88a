"""Tests of TensorFlow's corner: they run where it is installed, by `make test-tensorflow`.

The folder is not called tensorflow: Python would take it for the package where that is missing.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")


class Skipped(pytest.Module):
    """A module that cannot be imported here."""

    def collect(self):
        pytest.skip("TensorFlow is not installed: make test-tensorflow", allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    """Skip what needs TensorFlow, with a reason, where it is missing."""
    return None if find_spec("tensorflow") else Skipped.from_parent(parent, path=module_path)


def pytest_collection_modifyitems(items):
    """TensorFlow and Keras warn about themselves on import and in use; of ours every warning is an error."""
    for item in items:
        if "/tests/with_tensorflow/" in str(item.path):
            item.add_marker(pytest.mark.filterwarnings("default"))
            item.add_marker(pytest.mark.filterwarnings("error:a pass over"))
