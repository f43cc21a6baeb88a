"""Health checks on a port of their own: without TLS, and nothing else there."""

from __future__ import annotations

import asyncio
import socket

import grpc
import grpc.aio
import pytest

from edl_torch.errors import MasterStartError
from edl_torch.master.health import SERVICE, Health, HealthPort

SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"


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

    assert with_port(use) == (SERVING, NOT_SERVING)


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
