"""Tests of torchtitan's corner: they run where it is installed, by `make test-torchtitan`."""

from __future__ import annotations

from pathlib import Path

from framework_folder import hooks_of

pytest_pycollect_makemodule, pytest_collection_modifyitems = hooks_of(Path(__file__).parent, "torchtitan")
