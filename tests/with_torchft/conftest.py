"""Tests of torchft's corner: they run where it is installed, by `make test-torchft`.

The folder is not called torchft: Python would take it for the package where that is missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest


class Skipped(pytest.Module):
    """A module that cannot be imported here."""

    def collect(self):
        pytest.skip("torchft is not installed: make test-torchft", allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    """Skip what needs torchft, with a reason, where it is missing."""
    return None if find_spec("torchft") else Skipped.from_parent(parent, path=module_path)


def pytest_collection_modifyitems(items):
    """torchft and what it imports warn of themselves; of ours every warning is an error."""
    for item in items:
        if "/tests/with_torchft/" in str(item.path):
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture
def lighthouse() -> Iterator[str]:
    """The address of torchft's lighthouse, which counts a replica for dead after three seconds."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=300, heartbeat_timeout_ms=3000)
    yield server.address()
    server.shutdown()
