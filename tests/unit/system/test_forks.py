"""Forked children let go of connections to the master, and of nothing else."""

from __future__ import annotations

import os
import socket
import warnings

import pytest

from edl_torch.system.address import HostPort
from edl_torch.system.processes import ForkGuard

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def in_child(check):
    """Fork; True when `check()` is true in the child."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads: that is the subject
        child = os.fork()
    if child == 0:
        os._exit(0 if check() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def is_null(descriptor):
    return os.readlink(f"/proc/self/fd/{descriptor}") == os.devnull


@pytest.fixture(params=["127.0.0.1", "::1"])
def master(request):
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    with socket.create_server((request.param, 0), family=family) as server:
        yield HostPort(request.param, server.getsockname()[1])


def test_child_drops_the_connection_and_keeps_the_number_taken(master):
    guard = ForkGuard(master)
    with socket.create_connection((master.host, master.port)) as connection:
        assert in_child(lambda: is_null(connection.fileno()))
        connection.sendall(b"the parent's own still stands")
    guard.release()


def test_connection_over_a_dual_stack_socket_is_found():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        guard = ForkGuard(HostPort("127.0.0.1", port))
        with socket.socket(socket.AF_INET6) as connection:
            connection.connect(("::ffff:127.0.0.1", port))
            assert in_child(lambda: is_null(connection.fileno()))
        guard.release()


def test_other_sockets_stay(master):
    guard = ForkGuard(HostPort("127.0.0.1", 1))
    pair = socket.socketpair()
    with socket.create_connection((master.host, master.port)) as connection, pair[0], pair[1]:
        assert in_child(lambda: not is_null(connection.fileno()) and not is_null(pair[0].fileno()))
    guard.release()


def test_released_guard_does_nothing(master):
    guard = ForkGuard(master)
    guard.release()
    with socket.create_connection((master.host, master.port)) as connection:
        assert in_child(lambda: not is_null(connection.fileno()))


def test_host_that_cannot_be_resolved_guards_nothing():
    assert ForkGuard(HostPort("no-such-host.invalid", 1)).addresses == frozenset()
