"""The same promises over real grpc on loopback."""

from __future__ import annotations

import threading
import time

import grpc
import pytest
from fences import Onlooker
from statuses import sessions_of

from edl_torch.core.calls import Acknowledgement, GiveBack, PassState
from edl_torch.errors import DatasetConflict, InvalidArgument, StaleLease, TokenError, UnknownDataset
from edl_torch.master import host
from edl_torch.rpc import edl_torch_pb2 as pb
from edl_torch.testing import wait_until
from edl_torch.testing.fake_master import Listening


def test_repeated_request_is_answered_alike_over_the_wire(server, calls):
    client = server.client()
    client.call(calls.register())
    first = client.call(calls.lease(1, count=2))
    assert client.call(calls.lease(1, count=2)) == first
    assert client.call(calls.lease(2)) != first
    with pytest.raises(StaleLease, match="followed by 2"):
        client.call(calls.lease(1))


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
    for size in (0, -1):
        with pytest.raises(InvalidArgument, match=r"size|count"):
            client.call(calls.register(size=size))
    client.call(calls.register("a"))
    with pytest.raises(DatasetConflict, match="seed"):
        client.call(calls.register("b", seed=5))
    with pytest.raises(TokenError):
        Onlooker(client, "d").restore("rubbish")
    with pytest.raises(StaleLease, match="ledger other"):
        client.call(calls.lease(1, "a", ledger="other"))
    with pytest.raises(StaleLease, match="'stranger'"):
        client.call(calls.report(1, "stranger"))
    with pytest.raises(InvalidArgument, match=r"UTF-8|utf-8|surrogates"):
        client.call(calls.report(1, "\udcff"))


def test_long_poll_is_woken(server, calls, monkeypatch):
    monkeypatch.setattr(host, "LOOK_AGAIN_S", 60.0)  # by what happens, not by looking now and then
    a, b = server.client("a"), server.client("b")
    a.call(calls.register("a", size=2))
    b.call(calls.register("b", size=2))
    (grant,) = a.call(calls.lease(1, "a")).grants
    answers = []
    waiting = threading.Thread(
        target=lambda: answers.append(b.call(calls.lease(1, "b", epoch=0), host.MAX_WAIT_S))
    )
    waiting.start()
    wait_until(lambda: server.dispatcher.wanted("d", "a", time.monotonic()))
    back = GiveBack(task=grant.task, attempt=grant.attempt, start=0)
    assert a.call(calls.report(1, "a", give_backs=(back,))).wanted
    waiting.join(host.MAX_WAIT_S / 2)
    assert len(answers[0].grants) == 1


def test_wanted_event_reaches_the_other_trainer(server, calls):
    a, b = server.client("a"), server.client("b")
    a.call(calls.register("a", size=2))
    b.call(calls.register("b", size=2))
    wanted = []
    a.attend("a", 1, Listening(1, wanted.append))
    wait_until(lambda: a._heartbeats["a"].attending)
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
    listening.measuring.handed(4, 0.5)
    client.attend("s", 1, listening)
    measures = wait_until(lambda: client.status().trainers[0].measures)
    assert measures == listening.measures
    assert (measures.batches, measures.records, measures.waited.sum_s) == (1, 4, 0.5)


def test_silent_session_without_a_stream_is_given_up(start_server, calls):
    server = start_server()
    client = server.client()
    client.call(calls.register())
    client.call(calls.lease(1))
    server.dispatcher.members.lease_timeout_s = 0.05
    client.call(calls.register("other"))  # so that the reaper looks at the deadlines
    wait_until(lambda: not sessions_of(server.dispatcher, "d"))
    assert client.dataset_status("d").todo == 8
    with pytest.raises(StaleLease):
        client.call(calls.lease(2))


def test_stream_is_opened_again_after_it_ended(server, calls):
    client = server.client()
    client.call(calls.register())
    client.attend("s", 1, Listening(1))
    attendance = client._heartbeats["s"]
    first = wait_until(lambda: attendance.attending and attendance._stream)
    first.cancel()
    wait_until(lambda: attendance._stream is not first and attendance.attending)
    assert sessions_of(server.dispatcher, "d") == {"s"}


def test_leaving_frees_everything_at_once(server, calls):
    client = server.client()
    client.call(calls.register())
    client.attend("s", 1, Listening(1))
    client.call(calls.lease(1))
    client.leave("s", 1)
    assert client.dataset_status("d").todo == 8
    assert client._heartbeats == {}


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
