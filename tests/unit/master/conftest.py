"""Calls with the parts that a test does not care about filled in, and a real server in a thread."""

from __future__ import annotations

import pytest
from fences import fenced
from master_kit import ServerThread

from edl_torch.core.calls import NEW_PASS, Fence, LeaseCall, RegisterCall, Registration, ReportCall
from edl_torch.shard import Source


def fence(session):
    """That of "s" or "a" where they are the first to register, of "b" where it is the second."""
    return Fence(ledger="ledger", lineage=1, member=2 if session == "b" else 1)


class Calls:
    """Calls of trainers on the dataset "d": 8 records in shards of 4, batches of 2."""

    @staticmethod
    def register(session="s", *, size=8, **options):
        options = {"records_per_shard": 4} | options
        registration = Registration(name="d", sources=(Source(name="", count=size),), **options)
        return RegisterCall(
            session=session, worker_id=f"w-{session}", batch_size=2, registration=registration
        )

    @staticmethod
    def lease(request, session="s", **options):
        options = {"count": 1, "epoch": NEW_PASS} | fenced(fence(session), options)
        return LeaseCall(session=session, dataset="d", request=request, **options)

    @staticmethod
    def report(request, session="s", **options):
        return ReportCall(session=session, dataset="d", request=request, **fenced(fence(session), options))


@pytest.fixture
def calls():
    return Calls


@pytest.fixture
def start_server():
    servers = []

    def start(**options):
        servers.append(ServerThread(**options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def server(start_server):
    return start_server()
