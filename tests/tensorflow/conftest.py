"""Tests of TensorFlow's corner: they run where it is installed, by `make test-tensorflow`."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed: make test-tensorflow")


def pytest_collection_modifyitems(items):
    """TensorFlow and Keras warn about themselves on import and in use; of ours every warning is an error."""
    for item in items:
        if "/tests/tensorflow/" in str(item.path):
            item.add_marker(pytest.mark.filterwarnings("default"))
            item.add_marker(pytest.mark.filterwarnings("error:a pass over"))
