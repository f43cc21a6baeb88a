"""A dispatcher with one trainer."""

from __future__ import annotations

import pytest
from core_kit import Trainer

from edl_torch.core.dispatcher import Dispatcher


@pytest.fixture
def dispatcher() -> Dispatcher:
    return Dispatcher(ledger_id="L1", lease_timeout_s=30.0, grace_s=1.0)


@pytest.fixture
def a(dispatcher: Dispatcher) -> Trainer:
    trainer = Trainer(dispatcher, "a")
    trainer.register()
    return trainer
