"""The host on a loop, without grpc: long polls, streams, expiry."""

from __future__ import annotations

import asyncio
import time

import pytest
from loop_kit import on_loop, settle
from statuses import sessions_of

from edl_torch.core.calls import Acknowledgement, GiveBack, PassState
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.errors import StaleLease
from edl_torch.master import host as host_module
from edl_torch.master.host import MasterHost


def new_host(**options):
    return MasterHost(Dispatcher(ledger_id="ledger", **options))


async def with_nothing_left(calls):
    """A host, the lease of "a" that has all records, and what begins a call of "b" that waits for some."""
    host = new_host()
    for session in "ab":
        await host.call(calls.register(session, size=2))
    (grant,) = (await host.call(calls.lease(1, "a"), 0)).grants
    return host, grant, lambda wait_s=30: host.call(calls.lease(1, "b", epoch=0), wait_s)


@on_loop
async def test_waiting_lease_is_answered_when_records_come_back(calls, monkeypatch):
    monkeypatch.setattr(host_module, "LOOK_AGAIN_S", 60.0)  # by what happens, not by looking now and then
    host, grant, wait = await with_nothing_left(calls)
    waiting = asyncio.create_task(wait())
    await settle()
    assert not waiting.done()
    back = GiveBack(task=grant.task, attempt=grant.attempt, start=grant.slice.skip)
    host.apply(lambda d, now: d.report(calls.report(1, "a", give_backs=(back,)), now))
    assert [g.slice for g in (await waiting).grants] == [grant.slice]


@on_loop
async def test_empty_look_of_a_waiting_lease_is_not_replayed(calls):
    host, _, wait = await with_nothing_left(calls)
    waiting = asyncio.create_task(wait())
    await settle()
    waiting.cancel()
    await settle()
    host.leave("a", 1)
    again = await wait()
    assert len(again.grants) == 1


@on_loop
async def test_empty_answer_that_was_sent_is_replayed(calls):
    host, _, wait = await with_nothing_left(calls)
    sent = await wait(0.01)
    host.leave("a", 1)
    assert await wait() is sent


@on_loop
async def test_repeated_call_that_waits_twice_gets_one_answer(calls):
    host, _, wait = await with_nothing_left(calls)
    both = [asyncio.create_task(wait()) for _ in range(2)]
    await settle()
    host.leave("a", 1)
    first, second = await asyncio.gather(*both)
    assert first is second
    assert len(first.grants) == 1


@on_loop
async def test_waiting_lease_learns_the_end(calls):
    host, grant, wait = await with_nothing_left(calls)
    waiting = asyncio.create_task(wait())
    await settle()
    done = Acknowledgement(task=grant.task, attempt=grant.attempt, upto=2)
    host.apply(lambda d, now: d.report(calls.report(1, "a", acknowledgements=(done,)), now))
    assert (await waiting).state is PassState.FINISHED


@on_loop
async def test_drain_answers_waiting_leases_and_ends_streams(calls):
    host, _, wait = await with_nothing_left(calls)
    with host.attending("b") as stream:
        waiting = asyncio.create_task(wait())
        await settle()
        host.drain()
        assert (await waiting).nothing_yet
        assert await stream.next() is None


@on_loop
async def test_others_are_told_that_a_trainer_waits(calls):
    host, _, wait = await with_nothing_left(calls)
    with host.attending("a") as a, host.attending("b") as b:
        await wait(0.01)
        assert await a.next() == "d"
        host.drain()
        assert await b.next() is None


@on_loop
async def test_a_stream_that_nobody_wants_anything_of_is_looked_at_until_then():
    loop = asyncio.get_running_loop()
    with new_host().attending("a") as stream:
        assert await stream.next(loop.time() + 0.01) is None
        assert not stream.ended
        stream.want("d")
        assert await stream.next(loop.time() - 1.0) == "d"
        waiting = asyncio.create_task(stream.next(loop.time() + 30))
        await settle()
        stream.want("e")
        assert await waiting == "e"


@on_loop
async def test_broken_stream_releases_leases_after_the_grace(calls):
    host = new_host(grace_s=0.05)
    host.start()
    await host.call(calls.register("a", size=2))
    await host.call(calls.register("b", size=2))
    with host.attending("a"):
        await host.call(calls.lease(1, "a"), 0)
    answer = await host.call(calls.lease(1, "b", epoch=0), 5)
    assert len(answer.grants) == 1
    await host.close()


@on_loop
async def test_stream_that_comes_back_within_the_grace_keeps_the_leases(calls):
    host = new_host(grace_s=0.05)
    host.start()
    await host.call(calls.register("a", size=2))
    with host.attending("a"):
        pass
    with host.attending("a"):
        await asyncio.sleep(0.1)
        assert sessions_of(host.dispatcher, "d") == {"a"}
    await host.close()


@on_loop
async def test_older_stream_that_breaks_late_does_no_harm(calls):
    host = new_host(grace_s=0.01)
    host.start()
    await host.call(calls.register("a", size=2))
    older = host.attending("a")
    stream = older.__enter__()
    with host.attending("a"):
        assert await stream.next() is None
        older.__exit__(None, None, None)
        await asyncio.sleep(0.05)
        assert sessions_of(host.dispatcher, "d") == {"a"}
    await host.close()


@on_loop
async def test_a_session_that_says_nothing_and_has_no_stream_is_given_up(calls):
    host = new_host(lease_timeout_s=0.05)
    host.start()
    await settle()  # until the reaper waits for somebody to come
    await host.call(calls.register("a", size=2))
    await host.call(calls.lease(1, "a"), 0)
    await host.changed(5)
    assert host.dispatcher.dataset_status("d").todo == 2
    await host.close()


@on_loop
async def test_looks_of_a_waiting_call_do_not_keep_a_silent_session_alive(calls):
    host = new_host(lease_timeout_s=0.1)
    host.start()
    await host.call(calls.register("a", size=2))
    await host.call(calls.lease(1, "a"), 0)
    await host.call(calls.register("b", size=2))
    with pytest.raises(StaleLease):
        await host.call(calls.lease(1, "b", epoch=0, ledger="other"), 0)
    waiting = asyncio.create_task(host.call(calls.lease(2, "a", epoch=0), 30))
    with pytest.raises(StaleLease):
        await waiting
    await host.close()


@on_loop
async def test_a_master_that_was_stopped_hears_its_trainers_before_it_gives_them_up(calls, monkeypatch):
    monkeypatch.setattr(host_module, "STOPPED_S", 0.1)
    host = new_host(lease_timeout_s=0.3)
    host.start()
    for session in ("a", "b"):
        await host.call(calls.register(session, size=2))
    await settle()
    left = asyncio.get_running_loop().create_future()
    expire = host.dispatcher.expire

    def note(now):
        released = expire(now)
        if not left.done():
            left.set_result(sessions_of(host.dispatcher, "d"))
        return released

    monkeypatch.setattr(host.dispatcher, "expire", note)
    time.sleep(0.6)  # noqa: ASYNC251  nothing runs: the process is stopped
    await settle()
    host.apply(lambda dispatcher, now: dispatcher.heartbeat("a", 1, now))
    assert await left == {"a"}
    await host.close()


@pytest.mark.parametrize("stops", [[0.65], [0.8, 0.35]], ids=["once", "again within its grace"])
@on_loop
async def test_a_master_gives_nobody_up_before_it_has_run_for_a_while(calls, monkeypatch, stops):
    monkeypatch.setattr(host_module, "STOPPED_S", 0.1)
    host = new_host(lease_timeout_s=0.6)
    host.start()
    await host.call(calls.register("a", size=2))
    await settle()
    happened = []
    expire = host.dispatcher.expire

    def note(now):
        happened.append("looked")
        return expire(now)

    monkeypatch.setattr(host.dispatcher, "expire", note)
    for seconds in stops:
        time.sleep(seconds)  # noqa: ASYNC251  nothing runs: the process is stopped
        await settle()
    assert not happened
    await host.close()


@on_loop
async def test_session_that_leaves_gives_everything_back_at_once(calls):
    host = new_host()
    await host.call(calls.register("a", size=2))
    await host.call(calls.lease(1, "a"), 0)
    with host.attending("a") as stream:
        host.leave("a", 1)
        assert await stream.next() is None
    assert host.dispatcher.dataset_status("d").todo == 2


@on_loop
async def test_sessions_from_before_a_start_get_their_full_time_to_come_back(calls):
    dispatcher = Dispatcher(ledger_id="ledger", lease_timeout_s=30.0)
    dispatcher.register(calls.register("a"), 0.0)
    host = MasterHost(dispatcher, clock=lambda: 1000.0)
    host.start()
    await settle()
    assert sessions_of(dispatcher, "d") == {"a"}
    assert dispatcher.next_deadline(1000.0) == 1030.0
    await host.close()


@on_loop
async def test_trainers_that_come_and_go_do_not_each_cost_a_look_at_all_the_others(calls):
    looks = []

    class Counting(Dispatcher):
        def next_deadline(self, now):
            looks.append(now)
            return super().next_deadline(now)

    host = MasterHost(Counting(ledger_id="ledger", grace_s=30.0))
    host.start()
    for number in range(100):
        await host.call(calls.register(f"s{number}"))
        with host.attending(f"s{number}"):
            await settle()
        await settle()
    assert len(looks) < 10
    await host.close()
