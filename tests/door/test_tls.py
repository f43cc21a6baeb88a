"""TLS for trainers and for the page."""

from __future__ import annotations

import asyncio
import functools
import ssl
import time

import aiohttp
import pytest
from door_kit import SECRET, credentials, door, lease, register
from grpc_errors import CallFailed
from processes import Nowhere

from edl_torch.client.grpc.client import Caller
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.errors import AccessDenied, MasterUnavailable
from edl_torch.master.host import MasterHost
from edl_torch.master.web.app import WebPort
from edl_torch.rpc.credentials import Credentials
from edl_torch.testing import wait_until
from edl_torch.testing.fake_master import Listening

PATIENT = {"master_timeout_s": 120.0}
QUICK_S = 60.0  # on a machine that does other things too


def denied(client, match):
    """What a call of this client is told, quickly."""
    began = time.monotonic()
    with pytest.raises(AccessDenied, match=match) as caught:
        client.status()
    assert time.monotonic() - began < QUICK_S
    return str(caught.value)


@pytest.mark.parametrize("host", [None, "localhost"])
def test_calls_over_tls(start, certificates, host):
    master = start(door(certificates))
    client = master.client(credentials(certificates), host=host)
    client.call(register())
    client.attend("s", 1, Listening(1))
    wait_until(lambda: client._heartbeats["s"].listener.standing)
    assert len(client.call(lease(1)).grants) == 1


def test_calls_over_mutual_tls(start, certificates):
    master = start(door(certificates, client_ca=certificates.ca))
    client = master.client(credentials(certificates, own=certificates.trainer))
    assert client.status().ledger == "ledger-of-the-master"


def test_certificate_of_another_authority_is_not_trusted(start, certificates):
    master = start(door(certificates))
    client = master.client(credentials(ca=certificates.stranger.ca), **PATIENT)
    told = denied(client, "not trusted")
    assert "EDL_MASTER_TLS_CA" in told
    assert master.address in told


def test_expired_certificate_is_told_at_once(start, certificates):
    old = certificates.issue("old", "127.0.0.1", expired=True)
    master = start(door(master=old))
    denied(master.client(credentials(certificates), **PATIENT), "renew one that has expired.*has expired")


def test_certificate_for_another_host_is_told_at_once(start, certificates):
    other = certificates.issue("elsewhere", "elsewhere.test")
    master = start(door(master=other))
    denied(master.client(credentials(certificates), **PATIENT), "for other names")


def test_certificate_of_a_name_that_the_trainer_was_given_is_taken(start, certificates):
    other = certificates.issue("elsewhere", "elsewhere.test")
    master = start(door(master=other))
    assert master.client(credentials(certificates, tls_name="elsewhere.test")).status()
    denied(master.client(credentials(certificates, tls_name="nobody.test"), **PATIENT), "for other names")


def test_trainer_without_tls_is_told_that_the_master_speaks_it(start, certificates):
    master = start(door(certificates))
    denied(master.client(Credentials(), **PATIENT), "speaks TLS: .*EDL_MASTER_TLS_CA")


def test_trainer_with_tls_is_told_that_the_master_does_not_speak_it(start, certificates):
    master = start()
    denied(master.client(credentials(certificates), **PATIENT), "does not speak TLS: .*--tls-cert")


def test_trainer_without_a_certificate_is_told_that_one_is_wanted(start, certificates):
    master = start(door(certificates, client_ca=certificates.ca))
    denied(master.client(credentials(certificates), **PATIENT), "none was given: EDL_MASTER_TLS_CERT")
    denied(master.client(Credentials(), **PATIENT), "speaks TLS")


@pytest.mark.parametrize("fault", ["of another authority", "expired"])
def test_trainers_certificate_that_is_not_good_is_refused(start, certificates, fault):
    own = (
        certificates.issue("late", "trainer.test", expired=True)
        if fault == "expired"
        else certificates.stranger.trainer
    )
    master = start(door(certificates, client_ca=certificates.ca))
    before = master.digest
    client = master.client(credentials(certificates, own=own), **PATIENT)
    denied(client, "the one given is another, or has expired")
    with pytest.raises(AccessDenied):
        client.call(register())
    assert master.digest == before


@pytest.mark.parametrize("let_in", [True, False])
def test_only_a_master_that_never_let_us_in_is_asked_why(let_in):
    """One that goes away ends connections too: that must not end a job."""

    class Never(Nowhere):
        def explain(self, timeout_s):
            raise AccessDenied("never")

    def rpc(request, **options):
        if request == "first":
            return "answer"
        raise CallFailed

    caller = Caller(Never(), 0.1)
    if let_in:
        assert caller.call(rpc, "first") == "answer"
    with pytest.raises(MasterUnavailable if let_in else AccessDenied):
        caller.call(rpc, "second")


def test_master_that_stops_while_we_knock_is_waited_for(start, certificates):
    """Nobody is there: that is no refusal."""
    master = start(door(certificates, client_ca=certificates.ca))
    master.stop()
    with pytest.raises(MasterUnavailable):
        master.client(credentials(certificates), master_timeout_s=0.3).status()


def test_unusable_client_certificate_in_memory_is_said_to_be_so(start, certificates):
    master = start(door(certificates))
    given = Credentials(tls=True, ca=b"-----BEGIN nothing")
    denied(master.client(given, **PATIENT), "cannot be used")


# The page speaks TLS where the master does ------------------------------------------------------------------


pytest.importorskip("aiohttp")


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
