"""Generated loops have time, and services may warn in them."""

from __future__ import annotations

import pytest
from loop_settings import TIMES


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Many programs take longer than a test may."""
    for item in items:
        if TIMES and "loops" in item.path.parts:
            item.add_marker(pytest.mark.timeout(3600))


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """What services warn of in programs that ask for it is no news."""
    caplog.set_level("ERROR")
