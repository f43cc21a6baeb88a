"""The page speaks TLS where the master does, with its certificate, its token and its authority of callers."""

from __future__ import annotations

import asyncio
import functools
import ssl

import pytest

pytest.importorskip("aiohttp")
import aiohttp
from door_kit import SECRET, door

from edl_torch.core.dispatcher import Dispatcher
from edl_torch.master.host import MasterHost
from edl_torch.master.web.app import WebPort


def on_loop(test):
    @functools.wraps(test)
    def run(*arguments, **fixtures):
        asyncio.run(asyncio.wait_for(test(*arguments, **fixtures), 30))

    return run


async def asked(credentials, address="127.0.0.1:0", **options):
    """The status code of a look at `/metrics`."""
    port = WebPort(MasterHost(Dispatcher(ledger_id="l")).status, lambda: 0, address, credentials=credentials)
    try:
        where = await port.start()
        assert port.scheme == "https"
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"https://localhost:{where.port}/metrics", **options) as answer,
        ):
            return answer.status
    finally:
        await port.stop()


def trusting(certificates, own=None):
    context = ssl.create_default_context(cafile=str(certificates.ca))
    if own is not None:
        context.load_cert_chain(*own)
    return context


@on_loop
async def test_a_caller_with_the_token_is_let_in(certificates, token) -> None:
    context = trusting(certificates)
    headers = {"Authorization": f"Bearer {SECRET}"}
    given = door(certificates, token=token)
    assert await asked(given, "0.0.0.0:0", ssl=context, headers=headers) == 200
    assert await asked(given, ssl=context) == 401
    with pytest.raises(aiohttp.ClientConnectorCertificateError):
        await asked(given, ssl=trusting(certificates.stranger))


@on_loop
async def test_a_caller_without_a_certificate_is_not_where_one_is_asked_for(certificates) -> None:
    given = door(certificates, client_ca=certificates.ca)
    assert await asked(given, ssl=trusting(certificates, certificates.trainer)) == 200
    with pytest.raises((aiohttp.ClientError, ConnectionError)):
        await asked(given, ssl=trusting(certificates))
