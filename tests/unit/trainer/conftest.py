"""A trainer on a master with 64 records, in one process with it and from afar."""

from __future__ import annotations

import pytest
from trainer_kit import Master, Shell


@pytest.fixture
def master() -> Master:
    return Master()


@pytest.fixture
def shell(master: Master) -> Shell:
    return Shell(master, attended=False)


@pytest.fixture
def remote(master: Master) -> Shell:
    return Shell(master, in_process=False, attended=False)
