"""Tests of Ray's corner: they run where it is installed, by `make test-ray`, on a cluster of this machine."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from framework_folder import hooks_of

pytest_pycollect_makemodule, pytest_collection_modifyitems = hooks_of(Path(__file__).parent, "ray")


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The module `ray`, initialised."""
    import ray

    token = tmp_path_factory.mktemp("ray") / "token"  # Ray would put one into the home folder
    token.write_text(secrets.token_hex(32))
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)
    ray.init(
        num_cpus=4,
        address="local",
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 << 20,
    )
    yield ray
    ray.shutdown()
