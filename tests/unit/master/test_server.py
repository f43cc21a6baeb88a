"""The server of a master: its calls, its writer, its log of epochs."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time

import grpc
import pytest
from fences import Onlooker
from loop_kit import on_loop
from statuses import sessions_of

from edl_torch.core.calls import Acknowledgement, GiveBack, PassState
from edl_torch.core.changes import Changes
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.errors import (
    DatasetConflict,
    InvalidArgument,
    MasterStartError,
    StaleLease,
    TokenError,
    UnknownDataset,
)
from edl_torch.master.addresses import checked_address
from edl_torch.master.durable import GroupCommit, Writer
from edl_torch.master.host import MasterHost
from edl_torch.master.server import MasterServer, serve, write_address_file
from edl_torch.rpc import edl_torch_pb2 as pb
from edl_torch.rpc.credentials import ServerCredentials
from edl_torch.system.address import HostPort
from edl_torch.testing import wait_until
from edl_torch.testing.fake_master import Listening


def start(address, **options):
    async def run():
        server = MasterServer(Dispatcher(ledger_id="l"), address, **options)
        try:
            return await server.start()
        finally:
            await server.stop()

    return asyncio.run(run())


def test_port_in_use_is_said_plainly():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(MasterStartError, match=f"127.0.0.1:{port}.*another process has this port"):
            start(f"127.0.0.1:{port}")


def test_a_master_that_cannot_start_ends_the_thread_of_its_journal():
    changes, before = Changes(), set(threading.enumerate())

    async def run():
        await serve(
            Dispatcher(ledger_id="l", changes=changes),
            "127.0.0.1:x",
            on_ready=lambda address: None,
            make_commits=lambda: GroupCommit(changes, lambda keys: lambda: None),
        )

    with pytest.raises(MasterStartError, match="cannot listen"):
        asyncio.run(run())
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize(
    ("address", "why"),
    [
        *((bad, "cannot listen") for bad in ("", "localhost", "127.0.0.1:x", "127.0.0.1:70000")),
        ("no-such-host.invalid:1", "'no-such-host.invalid' is unknown"),
        ("192.0.2.1:0", "no interface of this machine"),
    ],
)
def test_an_address_that_cannot_be_listened_on_is_said_plainly(address, why):
    with pytest.raises(MasterStartError, match=why):
        start(address, insecure=True)


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "192.0.2.1:0"])
def test_open_address_needs_to_be_asked_for(address):
    with pytest.raises(MasterStartError, match="--insecure"):
        checked_address(address, insecure=False, credentials=ServerCredentials())
    assert checked_address(address, insecure=True, credentials=ServerCredentials()).port == 0


@pytest.mark.parametrize("address", ["127.0.0.1:0", "localhost:0", "[::1]:0", "127.1.2.3:0"])
def test_loopback_needs_nothing(address):
    assert checked_address(address, insecure=False, credentials=ServerCredentials()).port == 0


def test_address_file_is_complete_or_absent(tmp_path):
    path = tmp_path / "address"
    write_address_file(path, HostPort("::1", 5))
    assert path.read_text() == "[::1]:5\n"
    assert [p.name for p in tmp_path.iterdir()] == ["address"]
    with pytest.raises(MasterStartError, match="cannot write the address file"):
        write_address_file(tmp_path / "none" / "address", HostPort("h", 5))


# The same promises over real grpc on loopback ---------------------------------------------------------------


def test_whole_epoch_and_its_token(server, calls):
    client = server.client()
    answer = client.call(calls.register())
    assert answer.fence.ledger == "ledger"
    assert answer.spec.size == 8
    for request in range(1, 10):
        lent = client.call(calls.lease(request, ledger="ledger"))
        if lent.state is not PassState.OPEN:
            break
        (grant,) = lent.grants
        done = Acknowledgement(task=grant.task, attempt=grant.attempt, upto=grant.slice.stop)
        assert client.call(calls.report(request, acknowledgements=(done,))).stale == ()
    assert client.dataset_status("d").acknowledged == 8
    assert client.status().datasets[0].finished
    onlooker = Onlooker(client, "d")
    assert onlooker.progress().acknowledged == 8
    token = onlooker.snapshot()
    assert onlooker.restore(token) == 2
    assert onlooker.restore(None) == 3


def test_errors_arrive_as_they_were_raised(server, calls):
    client = server.client()
    with pytest.raises(UnknownDataset, match="'d'"):
        client.dataset_status("d")
    client.call(calls.register("a"))
    with pytest.raises(DatasetConflict, match="seed"):
        client.call(calls.register("b", seed=5))
    with pytest.raises(TokenError):
        Onlooker(client, "d").restore("rubbish")
    with pytest.raises(StaleLease, match="'stranger'"):
        client.call(calls.report(1, "stranger"))
    with pytest.raises(InvalidArgument, match=r"UTF-8|utf-8|surrogates"):
        client.call(calls.report(1, "\udcff"))


def test_wanted_event_reaches_the_other_trainer(server, calls):
    a, b = server.client("a"), server.client("b")
    a.call(calls.register("a", size=2))
    b.call(calls.register("b", size=2))
    wanted = []
    a.attend("a", 1, Listening(1, wanted.append))
    wait_until(lambda: a._heartbeats["a"].listener.standing)
    a.call(calls.lease(1, "a"))
    b.call(calls.lease(1, "b", epoch=0), 0.01)
    assert wait_until(lambda: wanted) == ["d"]


def test_heartbeats_keep_a_session_that_says_nothing_else(start_server, calls):
    server = start_server(lease_timeout_s=0.15)
    client = server.client()
    client.call(calls.register())
    member = server.dispatcher.members.get("s")
    member.timeout_s = 60.0  # this machine may sleep for longer than the timeout that the client is told
    client.attend("s", 1, Listening(1))
    heard = set()
    wait_until(lambda: heard.add(member.seen) or len(heard) > 5)
    assert sessions_of(server.dispatcher, "d") == {"s"}
    client.close()
    wait_until(lambda: not sessions_of(server.dispatcher, "d"))


def test_a_stream_asks_for_heartbeats_in_the_rhythm_of_the_timeouts_whatever_else_it_says(
    start_server, calls
):
    server = start_server(lease_timeout_s=30.0, progress_timeout_s=0.15)
    a, b = server.client("a"), server.client("b")
    a.call(calls.register("a", size=2))
    b.call(calls.register("b", size=2))
    a.call(calls.lease(1, "a"))
    with grpc.insecure_channel(server.address) as channel:
        stream = channel.unary_stream(
            "/edl_torch.v1.Master/Attend", pb.AttendRequest.SerializeToString, pb.AttendEvent.FromString
        )(pb.AttendRequest(session="a"), timeout=30)
        asked, kinds = next(stream).attending, []
        began = time.monotonic()
        while kinds.count("attending") < 3:
            if "wanted" not in kinds:
                b.call(calls.lease(1, "b", epoch=0), 0.01)
            kinds.append(next(stream).WhichOneof("event"))
        assert time.monotonic() - began >= 2 * 0.05
    assert (asked.lease_timeout_s, asked.progress_timeout_s) == (30.0, 0.15)
    assert "wanted" in kinds


def test_heartbeats_carry_what_the_trainer_measures(start_server, calls):
    client = start_server(lease_timeout_s=0.3).client()
    client.call(calls.register())
    listening = Listening(1)
    listening.measuring.waited.add(0.5)
    listening.measuring.reported(4)
    client.attend("s", 1, listening)
    measures = wait_until(lambda: client.status().trainers[0].measures)
    assert measures == listening.measures
    assert (measures.batches, measures.records, measures.waited.sum_s) == (1, 4, 0.5)


def test_stream_is_opened_again_after_it_ended(server, calls):
    client = server.client()
    client.call(calls.register())
    client.attend("s", 1, Listening(1))
    attendance = client._heartbeats["s"]
    first = wait_until(lambda: attendance.listener.standing and attendance._stream)
    first.cancel()
    wait_until(lambda: attendance._stream is not first and attendance.listener.standing)
    assert sessions_of(server.dispatcher, "d") == {"s"}


def test_malformed_bytes_change_nothing(server, calls):
    client = server.client()
    client.call(calls.register())
    with grpc.insecure_channel(server.address) as channel:
        for method in ("Register", "Lease", "Report", "Restore", "Leave", "Heartbeat"):
            with pytest.raises(grpc.RpcError):
                channel.unary_unary(f"/edl_torch.v1.Master/{method}")(b"\xff\xff\xff", timeout=5)
        call = pb.RegisterRequest(registration=pb.Registration(name="d", task_type=77))
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/edl_torch.v1.Master/Register")(call.SerializeToString(), timeout=5)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert client.dataset_status("d").todo == 8


# The thread behind a group commit ends with it; `test_commits` has what it does -----------------------------


@on_loop
async def test_close_does_what_was_asked_for_and_ends_the_thread():
    writer, done = Writer("test-writer-that-ends"), []
    for number in range(100):
        writer.do(lambda number=number: done.append(number), lambda error: None)
    writer.close()
    assert done == list(range(100))
    assert "test-writer-that-ends" not in {thread.name for thread in threading.enumerate()}


def test_a_loop_that_is_closed_meanwhile_is_no_error():
    may_end, writers = threading.Event(), []

    async def begin():
        writers.append(Writer("test-writer"))
        writers[0].do(may_end.wait, lambda error: None)

    asyncio.run(begin())
    may_end.set()
    writers[0].close()


# The master's log has a line for each epoch that is over, and one where a dataset is finished ---------------


class Job:
    """One trainer of the dataset "d" of 8 records, on a clock that the test moves."""

    def __init__(self, calls, **options):
        self.now = 100.0
        self.host = MasterHost(Dispatcher(ledger_id="ledger"), clock=lambda: self.now)
        self.calls, self.number = calls, 0
        self.host.apply(lambda d, now: d.register(calls.register("a", **options), now))

    async def train(self, epochs=1, *, give_back=False):
        (ledger,) = self.host.dispatcher.ledgers
        upto = ledger.acknowledged + 8 * epochs
        self.now += 5.0
        while ledger.acknowledged < upto:
            self.number += 1
            answer = await self.host.call(self.calls.lease(self.number, "a"), 0)
            (grant,) = answer.grants
            done = Acknowledgement(task=grant.task, attempt=grant.attempt, upto=grant.slice.stop)
            back = GiveBack(task=grant.task, attempt=grant.attempt, start=grant.slice.skip)
            told = {"give_backs": (back,)} if give_back else {"acknowledgements": (done,)}
            report = self.calls.report(self.number, "a", **told)
            self.host.apply(lambda d, now, report=report: d.report(report, now))
            if give_back:
                return


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, logger="edl_torch.master")

    def take():
        found = [r.getMessage() for r in caplog.records if not r.getMessage().startswith("registered")]
        caplog.clear()
        return found

    return take


@on_loop
async def test_each_epoch_and_the_end_have_a_line(calls, lines):
    job = Job(calls, num_epochs=2, records_per_shard=8)
    await job.train(give_back=True)
    assert lines() == []
    await job.train()
    counts = "quarantined=0 dropped=0"
    assert lines() == [f"epoch over dataset=d epoch=0 of=2 seconds=10.0 acknowledged=8 {counts}"]
    await job.train()
    assert lines() == [
        f"epoch over dataset=d epoch=1 of=2 seconds=5.0 acknowledged=16 {counts}",
        f"finished dataset=d epochs=2 acknowledged=16 {counts}",
    ]


@on_loop
async def test_without_a_barrier_only_the_end_has_one(calls, lines):
    job = Job(calls, num_epochs=2, records_per_shard=8, epoch_barrier=False)
    await job.train(2)
    assert lines() == ["finished dataset=d epochs=2 acknowledged=16 quarantined=0 dropped=0"]


@on_loop
async def test_a_restore_ends_nothing(calls, lines):
    job = Job(calls, num_epochs=3, records_per_shard=8)
    await job.train(2)
    assert len(lines()) == 2
    (ledger,) = job.host.dispatcher.ledgers
    token = ledger.snapshot().encode()
    for to in (None, token):  # back to the beginning, and on to the third epoch
        job.host.apply(lambda d, _, to=to: d.go_back("d", to))
        assert lines() == []
    assert ledger.epoch == 2


@on_loop
async def test_an_endless_job_says_so(calls, lines):
    job = Job(calls, num_epochs=0, records_per_shard=8)
    await job.train()
    (line,) = lines()
    assert "epoch=0 of=endless" in line
