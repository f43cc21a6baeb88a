"""Tests of TensorFlow's corner: they run where it is installed, by `make test-tensorflow`."""

from __future__ import annotations

from pathlib import Path

from framework_folder import hooks_of

pytest_pycollect_makemodule, pytest_collection_modifyitems = hooks_of(
    Path(__file__).parent, "tensorflow", TF_CPP_MIN_LOG_LEVEL="2", CUDA_VISIBLE_DEVICES=""
)
