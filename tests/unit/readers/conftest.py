"""The real samples, where they are beside the checkout."""

from __future__ import annotations

from pathlib import Path

import pytest

SAMPLES = Path(__file__).parents[4] / "shared" / "data"


@pytest.fixture
def samples() -> Path:
    if not SAMPLES.is_dir():
        pytest.skip("no real samples in ../shared/data beside the checkout")
    return SAMPLES
