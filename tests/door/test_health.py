"""What probes of an orchestrator see: serving, until the master drains or cannot write its journal."""

from __future__ import annotations

import asyncio
import socket
import threading

import grpc
import grpc.aio
import pytest
from door_kit import FIRST, credentials, door, lease, register
from grpc_health.v1 import health_pb2 as pb

from edl_torch.core.changes import Changes
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.errors import JournalError, MasterStartError
from edl_torch.master.durable import GroupCommit
from edl_torch.master.health import MOST_WATCHERS, SERVICE, Health, HealthPort
from edl_torch.testing import wait_until

SERVING, NOT_SERVING, SERVICE_UNKNOWN = (
    pb.HealthCheckResponse.ServingStatus.Value(name) for name in ("SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")
)


class Probe:
    """An orchestrator's."""

    def __init__(self, address):
        self.channel = grpc.insecure_channel(address)
        wire = (pb.HealthCheckRequest.SerializeToString, pb.HealthCheckResponse.FromString)
        self._check = self.channel.unary_unary(f"/{SERVICE}/Check", *wire)
        self._watch = self.channel.unary_stream(f"/{SERVICE}/Watch", *wire)

    def check(self, service=""):
        return self._check(pb.HealthCheckRequest(service=service), timeout=10).status

    def watch(self, service=""):
        return self._watch(pb.HealthCheckRequest(service=service), timeout=30)


@pytest.fixture
def probe():
    probes = []

    def make(master):
        probes.append(Probe(master.address))
        return probes[-1]

    yield make
    for made in probes:
        made.channel.close()


@pytest.mark.parametrize("service", ["", "edl_torch.v1.Master"])
def test_master_that_serves_says_so(start, probe, service):
    assert probe(start()).check(service) == SERVING


def test_other_names_are_unknown(start, probe):
    asks = probe(start())
    with pytest.raises(grpc.RpcError) as caught:
        asks.check("training")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    stream = asks.watch("training")
    assert next(stream).status == SERVICE_UNKNOWN
    stream.cancel()


def test_drain_says_so_first_then_ends_calls_then_commits(start, probe):
    seen = []

    class Noting(Dispatcher):
        def answer(self, call, now):
            if call.session == "b":
                seen.append(("answer", master.server.health.serving))
            return super().answer(call, now)

    class Commits(GroupCommit):
        async def close(self):
            seen.append(("commit", master.server.health.serving))
            await super().close()

    changes = Changes()
    master = start(
        dispatcher=Noting(ledger_id=FIRST.ledger, changes=changes),
        commits=lambda: Commits(changes, lambda keys: lambda: None),
    )
    client = master.client()
    client.call(register("a", size=2))
    client.call(register("b", size=2))
    client.call(lease(1, "a"))
    stream = probe(master).watch()
    assert next(stream).status == SERVING
    waiting = threading.Thread(target=lambda: client.call(lease(1, "b", epoch=0, member=2), 20))
    waiting.start()
    wait_until(lambda: master.on_loop(lambda: "b" in master.dispatcher._waiters.get("d", {})))
    assert seen == []
    master.stop_gently()
    assert seen == [("answer", False), ("commit", False)]
    assert [event.status for event in stream] == [NOT_SERVING]
    waiting.join(60)
    assert not waiting.is_alive()


def test_journal_that_cannot_be_written_ends_the_service(start, probe):
    def fail(keys):
        raise JournalError("the disk is full")

    changes = Changes()
    master = start(
        dispatcher=Dispatcher(ledger_id=FIRST.ledger, changes=changes),
        commits=lambda: GroupCommit(changes, fail),
    )
    asks = probe(master)
    assert asks.check() == SERVING
    stream = asks.watch()
    assert next(stream).status == SERVING
    client = master.client(master_timeout_s=0.0)
    with pytest.raises(ConnectionError, match="disk is full"):
        client.call(register())
    assert next(stream).status == NOT_SERVING
    assert asks.check() == NOT_SERVING  # it still answers who asks, until its process ends
    assert list(stream) == []


def test_watching_does_not_hold_up_the_end(start, probe):
    master = start()
    streams = [probe(master).watch(name) for name in ("", "edl_torch.v1.Master", "unknown")]
    assert [next(stream).status for stream in streams] == [SERVING, SERVING, SERVICE_UNKNOWN]
    ended = threading.Thread(target=lambda: master.run(master.server.drain(60.0)))
    ended.start()
    ended.join(30)  # far less than the grace
    assert not ended.is_alive()


def test_strangers_who_watch_are_bounded_and_make_room_when_they_go(start, probe):
    asks = probe(start())
    streams = [asks.watch() for _ in range(MOST_WATCHERS)]
    assert {next(stream).status for stream in streams} == {SERVING}
    with pytest.raises(grpc.RpcError) as caught:
        next(asks.watch())
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert asks.check() == SERVING
    streams.pop().cancel()

    def watched():
        stream = asks.watch()
        try:
            streams.append(stream)
            return next(stream).status == SERVING
        except grpc.RpcError:
            return False

    wait_until(watched)


def test_health_is_told_without_token_over_tls(start, certificates, token):
    master = start(door(certificates, token=token))
    tls = grpc.ssl_channel_credentials(certificates.ca.read_bytes())
    with grpc.secure_channel(master.address, tls) as channel:
        assert channel.unary_unary(f"/{SERVICE}/Check")(b"", timeout=10) == b"\x08\x01"
    assert master.client(credentials(certificates, token=token)).status().trainers == ()


def test_health_after_the_stop_is_told_once():
    async def watch():
        told = []

        class Context:
            async def write(self, answer):
                told.append(answer.status)

        health = Health()
        health.stop()
        health.stop()
        await health.Watch(pb.HealthCheckRequest(), Context())
        return told, repr(health)

    assert asyncio.run(watch()) == ([NOT_SERVING], "<Health stopped>")


def test_end_that_comes_during_the_first_answer_is_told():
    health, told = Health(), []

    class Writing:
        async def write(self, answer):
            told.append(answer.status)
            health.stop()

    asyncio.run(health.Watch(pb.HealthCheckRequest(), Writing()))
    assert told == [SERVING, NOT_SERVING]


# Health checks on a port of their own: without TLS, and nothing else there ----------------------------------


HEALTHY, STOPPED = b"\x08\x01", b"\x08\x02"


def with_port(use):
    """What `use(health, channel)` returns, on a loop with a port."""

    async def run():
        health = Health("edl_torch.v1.Master")
        port = HealthPort(health, "127.0.0.1:0")
        address = await port.start()
        try:
            async with grpc.aio.insecure_channel(str(address)) as channel:
                return await use(health, channel)
        finally:
            await port.stop()

    return asyncio.run(run())


def test_says_what_the_health_says():
    async def use(health, channel):
        check = channel.unary_unary(f"/{SERVICE}/Check")
        before = await check(b"", timeout=10)
        health.stop()
        return before, await check(b"", timeout=10)

    assert with_port(use) == (HEALTHY, STOPPED)


@pytest.mark.parametrize("call", ["/edl_torch.v1.Master/Status", "/proto.Master/get_task"])
def test_knows_no_other_call(call):
    async def use(health, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(call)(b"", timeout=10)
        return caught.value.code()

    assert with_port(use) is grpc.StatusCode.UNIMPLEMENTED


def test_large_message_is_refused():
    async def use(health, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(f"/{SERVICE}/Check")(b"x" * 4096, timeout=10)
        return caught.value.code()

    assert with_port(use) is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_port_in_use_is_told():
    async def start(address):
        await HealthPort(Health(), address).start()

    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(MasterStartError, match=r"health checks on 127\.0\.0\.1.*in use"),
    ):
        asyncio.run(start(f"127.0.0.1:{taken.getsockname()[1]}"))


def test_address_without_port_is_told():
    with pytest.raises(MasterStartError, match="health checks: address 'here'"):
        HealthPort(Health(), "here")
