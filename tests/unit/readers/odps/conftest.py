"""A MaxCompute server on loopback, which the environment names, and a reader that does not sleep."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("odps")

from maxcompute import MaxComputeServer

from edl_torch.readers.odps.client import Retries
from edl_torch.readers.odps.reader import ODPSDataReader

PREFIXES = ("ODPS_", "MAXCOMPUTE_", "ALIBABA_CLOUD_")
ROWS = 1000


@pytest.fixture
def server(monkeypatch):
    """With the table `numbers`: column i counts, s is its text, f its half, every third NULL."""
    for name in [name for name in os.environ if name.startswith(PREFIXES)]:
        monkeypatch.delenv(name)
    with MaxComputeServer(batch_rows=50) as running:
        for name, value in running.environment().items():
            monkeypatch.setenv(name, value)
        running.add_table("numbers", {"i": "bigint", "s": "string", "f": "double"}, numbers(ROWS))
        yield running


def numbers(count, start=0):
    rows = range(start, start + count)
    return {
        "i": list(rows),
        "s": [f"row {row}" for row in rows],
        "f": [None if row % 3 == 0 else row / 2 for row in rows],
    }


@pytest.fixture
def pauses():
    """What the readers of `quick` would have slept."""
    return []


@pytest.fixture
def quick(pauses):
    """Makes readers whose retries do not sleep."""

    def make(table="numbers", *arguments, limit=8, **options):
        return ODPSDataReader(table, *arguments, retries=Retries(limit, sleep=pauses.append), **options)

    return make
