"""Certificates, and masters behind doors, for tests of who may come in."""

from __future__ import annotations

import datetime
import hashlib
import json
from pathlib import Path

import trustme
from fences import fenced
from loop_thread import LoopThread

from edl_torch.client.grpc.client import MasterClient
from edl_torch.core import persistence
from edl_torch.core.calls import NEW_PASS, Fence, LeaseCall, RegisterCall, Registration, ReportCall
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.master.server import MasterServer
from edl_torch.rpc.credentials import Credentials, ServerCredentials
from edl_torch.shard import Source

SECRET = "Xk3-correct-horse-battery-staple"


def past(days):
    return datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=days)


class Certificates:
    """An authority, and files of what it has signed; `.stranger` is another authority with the same names."""

    def __init__(self, folder, *, stranger=None):
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._authority = trustme.CA()
        self.ca = folder / "ca.pem"
        self._authority.cert_pem.write_to_path(self.ca)
        self.stranger = stranger

    def issue(self, name, *hosts, expired=False):
        """Files of a certificate and its key: `(cert, key)`."""
        options = {"not_before": past(9), "not_after": past(1)} if expired else {}
        made = self._authority.issue_cert(*(hosts or (name,)), **options)
        cert, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        cert.write_bytes(b"".join(part.bytes() for part in made.cert_chain_pems))
        made.private_key_pem.write_to_path(key)
        return cert, key

    @property
    def master(self):
        """The master's, for this machine."""
        cert, key = self._folder / "master.pem", self._folder / "master.key"
        return (cert, key) if cert.exists() else self.issue("master", "localhost", "127.0.0.1", "::1")

    @property
    def trainer(self):
        """A trainer's."""
        cert, key = self._folder / "trainer.pem", self._folder / "trainer.key"
        return (cert, key) if cert.exists() else self.issue("trainer", "trainer.test")


def token_file(folder, secret=SECRET) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "token"
    path.write_text(f"{secret}\n")
    path.chmod(0o600)
    return path


def door(certificates=None, *, master=None, client_ca=None, token=None):
    """What a master is started with."""
    cert, key = master or (certificates.master if certificates else (None, None))
    return ServerCredentials.read(tls_cert=cert, tls_key=key, tls_client_ca=client_ca, token_file=token)


def credentials(certificates=None, *, ca=None, own=None, token=None, **options):
    """What a trainer is started with."""
    cert, key = own or (None, None)
    ca = ca or (certificates.ca if certificates else None)
    return Credentials.read(tls_ca=ca, tls_cert=cert, tls_key=key, token_file=token, **options)


def digest(dispatcher):
    """Of all that the master knows, and of who it has heard."""
    rows = {json.dumps(key): row for key, row in persistence.dump(dispatcher).items()}
    seen = sorted((m.session, m.seen, m.progress, m.gone_since) for m in dispatcher.members)
    return hashlib.sha256(json.dumps([rows, seen], sort_keys=True).encode()).hexdigest()


class MasterThread:
    """A master on a loop of its own, and clients for it."""

    def __init__(self, made_door=None, *, port=0, dispatcher=None, commits=None):
        self.dispatcher = dispatcher or Dispatcher(ledger_id="ledger-of-the-master")
        self._loop = LoopThread()
        self._clients = []
        self.server = self.run(self._make(f"127.0.0.1:{port}", made_door, commits))
        self.address = str(self.run(self.server.start()))

    async def _make(self, address, made_door, commits):
        return MasterServer(self.dispatcher, address, credentials=made_door, commits=commits and commits())

    def run(self, coroutine):
        return self._loop.run(coroutine)

    def on_loop(self, action):
        """What `action()` returns between two calls."""
        return self._loop.call(action)

    @property
    def digest(self):
        return self.on_loop(lambda: digest(self.dispatcher))

    def client(self, given=None, *, host=None, **options):
        where = self.address if host is None else f"{host}:{self.address.rpartition(':')[2]}"
        self._clients.append(MasterClient(where, "w", credentials=given or Credentials(), **options))
        return self._clients[-1]

    def stop_gently(self):
        self.run(self.server.drain())

    def stop(self):
        self.run(self.server.stop())

    def close(self):
        for client in self._clients:
            client.close()
        self.stop()
        self._loop.close()


# Calls on the dataset "d": 8 records in shards of 4, batches of 2 ------------------------------------------


FIRST = Fence(ledger="ledger-of-the-master", lineage=1, member=1)  # of the first to register


def register(session="s", *, name="d", size=8, batch_size=2, worker_id="w", sources=None, **options):
    options = {"records_per_shard": 4} | options
    sources = (Source(name="", count=size),) if sources is None else sources
    registration = Registration(name=name, sources=sources, **options)
    return RegisterCall(
        session=session, worker_id=worker_id, batch_size=batch_size, registration=registration
    )


def lease(request, session="s", **options):
    options = {"count": 1, "epoch": NEW_PASS, "fence": FIRST} | options
    options = fenced(options.pop("fence"), options)
    return LeaseCall(session=session, dataset="d", request=request, **options)


def report(request, session="s", **options):
    options = fenced(options.pop("fence", FIRST), options)
    return ReportCall(session=session, dataset="d", request=request, **options)
