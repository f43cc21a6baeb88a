"""Masters that are stopped after the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kit import Server, Start
from their_master import TheirMaster

from edl_torch import ElasticDLMasterClient


@pytest.fixture
def start_server() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(*args: Any, **options: Any) -> Server:
        servers.append(Server(*args, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def server(start_server: Callable[..., Server]) -> Server:
    return start_server()


@pytest.fixture
def start_master() -> Iterator[Start]:
    masters: list[TheirMaster] = []

    def start(*args: Any, **options: Any) -> TheirMaster:
        masters.append(TheirMaster(*args, **options))
        return masters[-1]

    yield start
    for master in masters:
        master.close()


@pytest.fixture
def master(start_master: Start) -> TheirMaster:
    return start_master()


@pytest.fixture
def connect() -> Iterator[Callable[..., ElasticDLMasterClient]]:
    clients: list[ElasticDLMasterClient] = []

    def make(master: TheirMaster, worker_id: int = 0, **options: Any) -> ElasticDLMasterClient:
        clients.append(ElasticDLMasterClient(master.address, worker_id, **options))
        return clients[-1]

    yield make
    for client in clients:
        client.close()
