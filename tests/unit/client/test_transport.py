"""A master that is away: waiting, giving up, and being interrupted."""

from __future__ import annotations

import gc
import socket
import subprocess
import sys
import threading
import time
import weakref

import pytest
from grpc_errors import CallFailed
from processes import Nowhere, quiet_port

from edl_torch.client.grpc.channel import FollowingChannel, build_channel, channel_options
from edl_torch.client.grpc.client import Caller, MasterClient
from edl_torch.core.calls import ConfirmCall, Fence
from edl_torch.errors import InvalidArgument, MasterUnavailable, ServiceClosed
from edl_torch.system.address import HostPort
from edl_torch.testing import wait_until
from edl_torch.testing.fake_master import Listening


@pytest.fixture
def nobody():
    """An address that answers nothing but a refusal."""
    return f"127.0.0.1:{quiet_port()}"


@pytest.fixture
def silent():
    """An address that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("who", ["nobody", "silent"])
def test_no_answer_becomes_master_unavailable_after_the_timeout(who, request):
    address = request.getfixturevalue(who)
    with MasterClient(address, master_timeout_s=0.2) as client:
        began = time.monotonic()
        with pytest.raises(MasterUnavailable, match=f"{address} within 0.2 s"):
            client.status()
        assert time.monotonic() - began < 8  # of one attempt alone: 10


class Loop:
    """Stands for what calls the master, as an iterator does."""


def test_a_call_that_was_repeated_keeps_nothing_of_its_caller():
    """A loop that is left must be known to be left at once, not when the garbage collector comes."""
    away = iter([True, True])

    def rpc(request, **options):
        if next(away, False):
            raise CallFailed
        return "answer"

    def ask(loop):
        return Caller(Nowhere(), 30.0).call(rpc, "request")

    loop = Loop()
    gc.disable()
    try:
        assert ask(loop) == "answer"
        alive, loop = weakref.ref(loop), None
        assert alive() is None
    finally:
        gc.enable()


def status(client):
    client.status()


def present(client):
    """Without the stream leases are not presented."""
    client.call(ConfirmCall(session="s", dataset="d", fence=Fence()))


@pytest.mark.parametrize(
    ("address", "wait"),
    [("nobody", status), ("silent", status), ("silent", present)],
    ids=lambda one: getattr(one, "__name__", one),
)
def test_close_ends_a_call_that_waits(address, wait, request):
    client = MasterClient(request.getfixturevalue(address), master_timeout_s=600)
    client.attend("s", 1, Listening(1))
    caught = []

    def call():
        try:
            wait(client)
        except ServiceClosed as error:
            caught.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    wait_until(lambda: client._channel._channel and thread.is_alive())
    client.close()
    thread.join(30)
    assert len(caught) == 1
    with pytest.raises(ServiceClosed):
        client.status()


def test_a_name_that_does_not_resolve_is_said():
    """gRPC itself says DEADLINE_EXCEEDED where it waits, or where it asks a name server that is slow."""
    with (
        MasterClient("256.1.1.1:5000", master_timeout_s=0.2) as client,
        pytest.raises(MasterUnavailable, match=r"the name '256.1.1.1' does not resolve here \(.*\): "),
    ):
        client.status()


def test_what_is_wrong_with_an_address_is_said_as_long_as_it_is(caplog):
    """A cluster may make the name while somebody waits for it."""
    times = iter(range(0, 10_000, 5))
    channel = Nowhere(["no name", "no name", "", "never asked"])
    caller = Caller(channel, 600.0, clock=lambda: next(times))
    caller.pause = lambda seconds: None

    def away(request, **options):
        raise CallFailed

    with pytest.raises(MasterUnavailable, match="At first: no name: "):
        caller.call(away, None)
    assert [": no name: " in message for message in caplog.messages][:2] == [True, False]
    assert channel.wrong == ["never asked"]


def test_an_error_names_where_the_master_was_seen_last(nobody):
    """One that moved before its first answer, and never came back."""
    addresses = iter([nobody])
    channel = FollowingChannel(lambda: next(addresses, "256.1.1.1:5000"), look_every_s=0.02)
    with (
        MasterClient(channel, master_timeout_s=3.0) as client,
        pytest.raises(MasterUnavailable, match=r"from the master at 256\.1\.1\.1:5000 within"),
    ):
        client.status()


def test_close_leaves_no_thread_of_a_stream_that_never_stood(own_threads, nobody):
    client = MasterClient(nobody)
    client.attend("s", 1, Listening(1))
    client.close()
    client.close()
    assert not own_threads()


def test_goodbye_to_a_master_that_is_gone_is_not_insisted_on(nobody):
    with MasterClient(nobody) as client:
        client.attend("s", 1, Listening(1))
        began = time.monotonic()
        client.leave("s", 1)
        assert time.monotonic() - began < 60  # not for the 600 s that other calls take


CTRL_C = """
interrupt = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
try:
    interrupt.start()
    client.status()
except KeyboardInterrupt:
    sys.exit(7)
"""


@pytest.mark.parametrize(("then", "status"), [(CTRL_C, 7), ("", 0)], ids=["Ctrl-C in a call", "no close"])
def test_a_program_whose_master_is_away_ends(then, status, nobody):
    program = (
        "import os, signal, threading, sys\n"
        "from edl_torch.client.grpc.client import MasterClient\n"
        "from edl_torch.testing.fake_master import Listening\n"
        f"client = MasterClient({nobody!r})\n"
        f"client.attend('s', 1, Listening(1)){then}\n"
    )
    done = subprocess.run([sys.executable, "-c", program], timeout=100, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (status, "")


@pytest.mark.parametrize("address", ["", "host", "host:0", "host:x", "a b:1"])
def test_bad_address_is_refused_at_once(address):
    with pytest.raises(InvalidArgument, match="address"):
        build_channel(address)


def test_client_takes_a_channel(nobody):
    with MasterClient(build_channel(nobody), 3, master_timeout_s=0) as client:
        assert client.worker_id == "3"
        assert client.address == nobody
        assert repr(client) == f"<MasterClient {nobody} worker='3'>"
        with pytest.raises(MasterUnavailable):
            client.status()


@pytest.mark.parametrize("timeout_s", [-1, float("nan")])
def test_timeout_must_be_a_duration(timeout_s):
    with pytest.raises(InvalidArgument, match="master_timeout_s"):
        MasterClient("h:1", master_timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("host", "direct"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("10.0.0.1", False), ("master", False)],
)
def test_this_machine_is_not_reached_through_a_proxy(host, direct):
    assert (("grpc.enable_http_proxy", 0) in channel_options(HostPort(host, 1))) is direct


def test_leases_are_not_presented_without_a_stream(nobody):
    with MasterClient(nobody, master_timeout_s=0.1) as client:
        listening = Listening(1)
        client.attend("s", 1, listening)
        client.attend("s", 1, Listening(1))
        with pytest.raises(MasterUnavailable, match=f"{nobody} within 0.1 s.*stream did not stand"):
            client.call(ConfirmCall(session="s", dataset="d", fence=Fence()))
        assert not listening.standing
