"""Masters that something else stands before, and masters in a thread."""

from __future__ import annotations

import http.server
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import pytest
from loader_kit import NumberReader, elastic, flat, numbers
from processes import quiet_port

from edl_torch import DataShardService, MasterClient, ShardedDataset
from edl_torch.client.grpc.channel import FollowingChannel
from edl_torch.core.calls import RegisterCall, Registration
from edl_torch.errors import AccessDenied, MasterStartError, MasterUnavailable
from edl_torch.master import server
from edl_torch.master.durable import DurableState
from edl_torch.master.server import ThreadedMaster
from edl_torch.rpc.credentials import Credentials, ServerCredentials
from edl_torch.shard import Source
from edl_torch.testing import wait_until

LIMIT_S = 60.0


class Strange(grpc.GenericRpcHandler):
    """Knows no method, or answers any with `answer`. `called` is set at the first call."""

    def __init__(self, answer: bytes | None = None) -> None:
        self.called = threading.Event()
        self._answer = answer

    def service(self, details: Any) -> Any:
        self.called.set()
        answer = self._answer
        return None if answer is None else grpc.unary_unary_rpc_method_handler(lambda request, _: answer)


@contextmanager
def grpc_server(port: int, answer: bytes | None = None) -> Iterator[threading.Event]:
    handler = Strange(answer)
    server = grpc.server(ThreadPoolExecutor(4), handlers=(handler,), options=(("grpc.so_reuseport", 0),))
    assert server.add_insecure_port(f"127.0.0.1:{port}") == port
    server.start()
    yield handler.called
    server.stop(0).wait(LIMIT_S)


def without_our_service(port: int) -> AbstractContextManager[threading.Event]:
    """Another program's gRPC server."""
    return grpc_server(port)


def with_garbage(port: int) -> AbstractContextManager[threading.Event]:
    """One that answers every call, with what is no message."""
    return grpc_server(port, b"\xff\xff\xff garbage")


@contextmanager
def web(port: int) -> Iterator[threading.Event]:
    """A plain HTTP server."""
    called = threading.Event()

    class Page(http.server.BaseHTTPRequestHandler):
        def handle(self) -> None:
            called.set()
            super().handle()

        def log_message(self, *_: Any) -> None:
            """Says nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", port), Page) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield called
        server.shutdown()
        thread.join(LIMIT_S)


Server: TypeAlias = Callable[[int], AbstractContextManager[threading.Event]]
SERVERS = [without_our_service, with_garbage, web]
for_each_server = pytest.mark.parametrize("server", SERVERS, ids=lambda server: server.__name__)


@for_each_server
def test_a_trainer_goes_on_when_its_master_is_back(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    port = quiet_port()
    reader = NumberReader({"a": 60})
    seen: list[list[int]] = []
    errors: list[BaseException] = []
    third = threading.Event()

    def train() -> None:
        try:
            while not service.finished:
                for batch in elastic(dataset):
                    seen.append(numbers(batch))
                    if len(seen) == 3:
                        third.set()
                        goes_on.wait(LIMIT_S)
        except BaseException as error:  # noqa: BLE001  a failing thread must fail the test
            errors.append(error)

    def said() -> bool:
        warned = [record for record in caplog.records if record.levelno == logging.WARNING]
        return any(f"what answers at 127.0.0.1:{port}" in record.getMessage() for record in warned)

    goes_on = threading.Event()
    master = ThreadedMaster(f"127.0.0.1:{port}", state=tmp_path)
    with (
        MasterClient(master.address, "w", master_timeout_s=LIMIT_S) as client,
        DataShardService(4, client, reader=reader, records_per_shard=4) as service,
    ):
        dataset = ShardedDataset(service, reader)
        trainer = threading.Thread(target=train)
        trainer.start()
        assert third.wait(LIMIT_S)
        master.stop()
        with server(port) as called:
            called.clear()
            goes_on.set()
            assert called.wait(LIMIT_S)
            wait_until(lambda: said() or not trainer.is_alive(), timeout_s=LIMIT_S)
            assert trainer.is_alive(), errors
        master = ThreadedMaster(f"127.0.0.1:{port}", state=tmp_path)
        trainer.join(LIMIT_S)
        assert not errors
        assert not trainer.is_alive()
    master.stop()
    assert sorted(flat(seen)) == list(range(60))
    assert said()


@for_each_server
def test_one_that_comes_first_is_waited_out_too(server: Server, tmp_path: Path) -> None:
    port = quiet_port()
    answers: list[str] = []
    with MasterClient(f"127.0.0.1:{port}", "w", master_timeout_s=LIMIT_S) as client:
        asking = threading.Thread(target=lambda: answers.append(client.status().ledger))
        with server(port) as called:
            asking.start()
            assert called.wait(LIMIT_S)
        master = ThreadedMaster(f"127.0.0.1:{port}", state=tmp_path)
        asking.join(LIMIT_S)
        assert answers
    master.stop()


@for_each_server
def test_in_the_end_the_error_says_that_something_else_is_there(server: Server) -> None:
    port = quiet_port()
    with server(port):
        for timeout_s in (0.5, 10.0):  # a busy machine may be heard in the second alone
            with (
                MasterClient(f"127.0.0.1:{port}", "w", master_timeout_s=timeout_s) as client,
                pytest.raises(MasterUnavailable, match=f"within {timeout_s:g} s") as raised,
            ):
                client.status()
            if f"what answers at 127.0.0.1:{port}" in str(raised.value):
                break
        else:
            raise AssertionError(raised.value)


def test_the_error_says_what_was_there_at_first_and_in_the_end(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody at first, and then another program."""
    port = quiet_port()
    has_found_nobody = f"127.0.0.1:{port}"
    caught: list[MasterUnavailable] = []

    def ask() -> None:
        with pytest.raises(MasterUnavailable) as raised:
            client.status()
        caught.append(raised.value)

    with MasterClient(f"127.0.0.1:{port}", "w", master_timeout_s=4.0) as client:
        asking = threading.Thread(target=ask)
        with caplog.at_level("DEBUG", "edl_torch.client"):
            asking.start()
            wait_until(lambda: any(has_found_nobody in line for line in caplog.messages))
        with grpc_server(port):
            asking.join(LIMIT_S)
    assert "In the end: what answers at" in str(caught[0])


def test_a_wrong_token_is_not_waited_for(tmp_path: Path) -> None:
    """It is the master's own refusal."""
    secret, other = tmp_path / "token", tmp_path / "other"
    secret.write_text("correct-horse-battery")
    other.write_text("wrong-horse-and-staple")
    for file in (secret, other):
        file.chmod(0o600)
    master = ThreadedMaster(
        "127.0.0.1:0", state=tmp_path / "state", credentials=ServerCredentials.read(token_file=secret)
    )
    credentials = Credentials.read(token_file=other)
    with (
        MasterClient(master.address, "w", master_timeout_s=LIMIT_S, credentials=credentials) as client,
        pytest.raises(AccessDenied, match="EDL_MASTER_TOKEN_FILE"),
    ):
        client.status()
    master.stop()


def test_tls_that_fails_is_waited_out_once_the_master_has_answered(tmp_path: Path) -> None:
    """Another program without TLS on the port of a master with it."""
    trustme = pytest.importorskip("trustme")
    authority = trustme.CA()
    made = authority.issue_cert("127.0.0.1")
    cert, key, ca = (tmp_path / name for name in ("cert.pem", "key.pem", "ca.pem"))
    cert.write_bytes(b"".join(part.bytes() for part in made.cert_chain_pems))
    made.private_key_pem.write_to_path(key)
    authority.cert_pem.write_to_path(ca)
    port = quiet_port()
    door = ServerCredentials.read(tls_cert=cert, tls_key=key)
    answers: list[str] = []
    master = ThreadedMaster(f"127.0.0.1:{port}", state=tmp_path / "state", credentials=door)
    credentials = Credentials.read(tls_ca=ca)
    with MasterClient(master.address, "w", master_timeout_s=LIMIT_S, credentials=credentials) as client:
        ledger = client.status().ledger
        master.stop()
        asking = threading.Thread(target=lambda: answers.append(client.status().ledger))
        with web(port) as called:
            asking.start()
            assert called.wait(LIMIT_S)
            asking.join(1.0)
            assert asking.is_alive()
        master = ThreadedMaster(f"127.0.0.1:{port}", state=tmp_path / "state", credentials=door)
        asking.join(LIMIT_S)
    assert answers == [ledger]
    master.stop()


# In a thread ------------------------------------------------------------------------------------------------


LOOPBACK = "127.0.0.1:0"


def register(address: str) -> int:
    """How many records the dataset has, which the first call makes."""
    registration = Registration(
        name="training", sources=(Source(name="", count=7),), records_per_shard=2, shuffle=True
    )
    call = RegisterCall(session="s", worker_id="w", batch_size=2, registration=registration)
    with MasterClient(address, "w", master_timeout_s=LIMIT_S) as client:
        return sum(source.count for source in client.call(call).spec.sources)


def test_it_goes_on_where_its_journal_ends(tmp_path: Path) -> None:
    first = ThreadedMaster(LOOPBACK, state=tmp_path)
    assert register(first.address) == 7
    first.stop()
    second = ThreadedMaster(LOOPBACK, state=tmp_path)
    with MasterClient(second.address, "w", master_timeout_s=LIMIT_S) as client:
        assert client.dataset_status("training").size == 7
        assert client.status().durable
    second.stop()


def test_why_it_cannot_start_is_raised_where_it_is_made(tmp_path: Path) -> None:
    master = ThreadedMaster(LOOPBACK, state=tmp_path / "one")
    with pytest.raises(MasterStartError, match=r"another master .* uses the journal"):
        ThreadedMaster(LOOPBACK, state=tmp_path / "one")  # its journal has a master
    with pytest.raises(MasterStartError, match="another process has this port"):
        ThreadedMaster(master.address, state=tmp_path / "two")
    with pytest.raises(MasterStartError, match="can be reached from other machines"):
        ThreadedMaster("0.0.0.0:0", state=tmp_path / "three")
    master.stop()


def test_one_that_takes_too_long_to_start_is_an_error_and_never_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, before = threading.Event(), threading.enumerate()

    def slowly(*arguments: Any, **options: Any) -> DurableState:
        assert disk.wait(30)
        return DurableState(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(server, "START_S", 0.01)
        patch.setattr(server, "DurableState", slowly)
        with pytest.raises(MasterStartError, match=r"did not start within 0\.01 s"):
            ThreadedMaster(LOOPBACK, state=tmp_path)
        (late,) = (t for t in threading.enumerate() if t.name == "edl-master" and t not in before)
        disk.set()
        late.join(30)
    ThreadedMaster(LOOPBACK, state=tmp_path).stop()  # nobody holds the journal


def test_a_channel_that_follows_it_carries_the_token_for_its_door(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a-token-of-this-test-alone")
    token.chmod(0o600)
    master = ThreadedMaster(
        LOOPBACK, state=tmp_path / "state", credentials=ServerCredentials.read(token_file=token)
    )
    channel = FollowingChannel(lambda: master.address, Credentials.read(token_file=token))
    with MasterClient(channel, "w", master_timeout_s=LIMIT_S) as client:
        assert client.status().durable
    stranger = FollowingChannel(lambda: master.address, Credentials())
    with MasterClient(stranger, "w", master_timeout_s=LIMIT_S) as client, pytest.raises(AccessDenied):
        client.status()
    master.stop()


def test_after_stop_its_journal_and_its_port_are_free(tmp_path: Path) -> None:
    first = ThreadedMaster(LOOPBACK, state=tmp_path)
    first.stop()
    ThreadedMaster(first.address, state=tmp_path).stop()


def test_a_service_closes_after_its_client(tmp_path: Path) -> None:
    """As at the end of a program that closes neither: what was lent is taken back, and nothing is raised."""
    master = ThreadedMaster(LOOPBACK, state=tmp_path)
    try:
        client = MasterClient(master.address)
        service = DataShardService(batch_size=2, dataset_size=8, master_client=client)
        assert service.fetch_shard() is not None
        client.close()
        service.close()
        with closing(MasterClient(master.address)) as watcher:
            wait_until(lambda: watcher.status().datasets[0].leases == 0)
    finally:
        master.stop()
