"""Tests of torchft's corner: they run where it is installed, by `make test-torchft`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from framework_folder import hooks_of

pytest_pycollect_makemodule, pytest_collection_modifyitems = hooks_of(Path(__file__).parent, "torchft")


@pytest.fixture
def lighthouse() -> Iterator[str]:
    """The address of torchft's lighthouse, which counts a replica for dead after three seconds."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=300, heartbeat_timeout_ms=3000)
    yield server.address()
    server.shutdown()
