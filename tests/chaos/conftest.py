"""Masters that are closed after the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from ride_kit import Master


@pytest.fixture
def start_master() -> Iterator[Callable[..., Master]]:
    """Start a master with options of the dispatcher."""
    masters: list[Master] = []

    def start(**options: Any) -> Master:
        masters.append(Master(**options))
        return masters[-1]

    yield start
    for master in masters:
        master.close()
