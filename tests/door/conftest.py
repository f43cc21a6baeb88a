"""Certificates of this run, and masters that end with their test."""

from __future__ import annotations

import pytest
from door_kit import Certificates, MasterThread, token_file


@pytest.fixture(scope="session")
def certificates(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificates")
    return Certificates(folder / "ours", stranger=Certificates(folder / "stranger"))


@pytest.fixture
def token(tmp_path):
    return token_file(tmp_path)


@pytest.fixture
def start(monkeypatch):
    """Starts masters; nothing of the environment is meant for them."""
    for name in ("TOKEN_FILE", "TLS", "TLS_CA", "TLS_CERT", "TLS_KEY", "TLS_NAME", "INSECURE", "ADDR"):
        monkeypatch.delenv(f"EDL_MASTER_{name}", raising=False)
    masters = []

    def start(*arguments, **options):
        masters.append(MasterThread(*arguments, **options))
        return masters[-1]

    yield start
    for master in masters:
        master.close()
