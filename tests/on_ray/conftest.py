"""A Ray cluster of this machine alone, for the tests of a module."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The module `ray`, initialised."""
    ray = pytest.importorskip("ray", reason="ray is not installed: make test-ray has an environment with it")
    token = (
        tmp_path_factory.mktemp("ray") / "token"
    )  # the cluster's own: Ray would put one into the home folder
    token.write_text(secrets.token_hex(32))
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)
    paths = [str(ROOT), str(ROOT / "tests" / "on_ray")]
    ray.init(
        num_cpus=4,
        address="local",
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 << 20,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(paths)}},
    )
    yield ray
    ray.shutdown()
