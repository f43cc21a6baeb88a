"""What leaves the master, and when: never before the commit of all that it could have seen."""

from __future__ import annotations

import asyncio
import threading

import pytest
from loop_kit import on_loop, settle

from edl_torch.core.calls import (
    Acknowledgement,
    Failure,
    Fence,
    RestoreCall,
    SnapshotCall,
)
from edl_torch.core.changes import Changes
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.errors import JournalError, MasterUnavailable, StaleLease
from edl_torch.master.durable import GroupCommit
from edl_torch.master.host import MasterHost
from edl_torch.testing import wait_until


class Disk:
    """Writes that end when a test says so."""

    def __init__(self):
        self.begun = []  # the keys of every write
        self.broken = None
        self._may_end = threading.Semaphore(0)

    def collect(self, keys):
        def write():
            self.begun.append(keys)
            assert self._may_end.acquire(timeout=60)
            if self.broken is not None:
                raise self.broken

        return write

    def end_writes(self, count=1):
        self._may_end.release(count)


class Rig:
    """A host whose commits go to a `Disk`."""

    def __init__(self, **options):
        self.disk = Disk()
        changes = Changes()
        dispatcher = Dispatcher(ledger_id="ledger", changes=changes, **options)
        self.commits = GroupCommit(changes, self.disk.collect)
        self.host = MasterHost(dispatcher, commits=self.commits)

    def answer(self, action):
        """A call of a trainer, as the servicer makes it."""

        async def answering():
            return self.host.apply(action)

        return asyncio.create_task(self.host.durably(answering()))

    async def writes(self, count):
        while len(self.disk.begun) < count:  # noqa: ASYNC110  they begin in another thread
            await asyncio.sleep(0.001)

    async def close(self):
        self.disk.end_writes(100)
        await self.host.close()


@on_loop
async def test_answer_waits_for_its_commit(calls):
    rig = Rig()
    answer = rig.answer(lambda d, now: d.register(calls.register(), now))
    await rig.writes(1)
    await settle()
    assert not answer.done()
    rig.disk.end_writes()
    assert (await answer).fence.ledger == "ledger"
    assert ("member", "d", "s") in rig.disk.begun[0]
    await rig.close()


@on_loop
async def test_reads_wait_for_what_they_have_seen(calls):
    rig = Rig()
    await rig.host.call(calls.register())
    await rig.writes(1)
    status = rig.answer(lambda d, now: d.status(now))
    snapshot = rig.answer(lambda d, now: d.token("d"))
    await settle()
    assert not status.done()
    assert not snapshot.done()
    rig.disk.end_writes()
    await asyncio.gather(status, snapshot)
    assert len(rig.disk.begun) == 1
    await rig.close()


@on_loop
async def test_refusals_wait_too(calls):
    rig = Rig()
    await rig.host.call(calls.register("s"))
    rig.host.leave("s", 1)
    refusal = rig.answer(lambda d, now: d.lease(calls.lease(1), now))
    await rig.writes(1)
    await settle()
    assert not refusal.done()
    rig.disk.end_writes()
    with pytest.raises(StaleLease):
        await refusal
    await rig.close()


@on_loop
async def test_nothing_waits_where_nothing_changed(calls):
    rig = Rig()
    await rig.host.call(calls.register())
    rig.disk.end_writes()
    await rig.host.committed()
    before = len(rig.disk.begun)
    await rig.answer(lambda d, now: d.status(now))
    await rig.answer(lambda d, now: d.heartbeat("s", 1, now))
    assert len(rig.disk.begun) == before
    await rig.close()


@on_loop
async def test_calls_that_arrive_during_a_commit_share_the_next_one(calls):
    rig = Rig()
    first = rig.answer(lambda d, now: d.register(calls.register("s0"), now))
    await rig.writes(1)
    rest = [
        rig.answer(lambda d, now, name=f"s{n}": d.register(calls.register(name), now)) for n in range(1, 20)
    ]
    await settle()
    rig.disk.end_writes()
    await first
    await rig.writes(2)
    assert not any(task.done() for task in rest)
    rig.disk.end_writes()
    await asyncio.gather(*rest)
    assert len(rig.disk.begun) == 2
    await rig.close()


@on_loop
async def test_a_call_that_is_given_up_does_not_disturb_the_others(calls):
    rig = Rig()
    tasks = [rig.answer(lambda d, now, s=s: d.register(calls.register(s), now)) for s in "ab"]
    await rig.writes(1)
    tasks[0].cancel()
    await settle()
    rig.disk.end_writes()
    assert (await tasks[1]).fence.ledger == "ledger"
    await rig.close()


@on_loop
async def test_what_a_death_changes_is_committed_without_being_asked_for(calls):
    rig = Rig(grace_s=0.01)
    rig.disk.end_writes(2)
    rig.host.start()
    await rig.host.call(calls.register())
    await rig.writes(1)
    with rig.host.attending("s"):
        pass  # its stream breaks
    await rig.writes(2)
    assert ("session", "s") in rig.disk.begun[1]
    await rig.close()


@on_loop
async def test_after_a_failure_nothing_is_ever_answered(calls):
    rig = Rig()
    rig.disk.broken = JournalError("disk full")
    answers = [rig.answer(lambda d, now, s=s: d.register(calls.register(s), now)) for s in "ab"]
    await rig.writes(1)
    late = rig.answer(lambda d, now: d.status(now))
    rig.disk.end_writes()
    for answer in (*answers, late):
        with pytest.raises(MasterUnavailable, match="the master stops: disk full"):
            await answer
    rig.disk.broken = None
    with pytest.raises(MasterUnavailable):
        await rig.answer(lambda d, now: d.status(now))
    assert len(rig.disk.begun) == 1
    await rig.host.failed()
    assert str(rig.host.failure) == "disk full"
    await rig.close()


@on_loop
async def test_a_bug_in_a_write_is_a_failure(calls):
    rig = Rig()
    rig.disk.broken = ZeroDivisionError("bug")
    answer = rig.answer(lambda d, now: d.register(calls.register(), now))
    await rig.writes(1)
    rig.disk.end_writes()
    with pytest.raises(MasterUnavailable, match="ZeroDivisionError"):
        await answer
    await rig.close()


@on_loop
async def test_close_commits_the_rest(calls):
    rig = Rig()
    await rig.host.call(calls.register())
    rig.disk.end_writes()
    await rig.host.close()
    assert len(rig.disk.begun) == 1


def test_nothing_leaves_a_real_server_before_its_commit(start_server, calls):
    """Every call that can change or see something, over grpc, while the disk hangs."""
    disk, changes = Disk(), Changes()
    server = start_server(changes=changes, make_commits=lambda: GroupCommit(changes, disk.collect))
    client = server.client()
    waiting, answered = [], []

    def call(action):
        thread = threading.Thread(target=lambda: answered.append(action()))
        thread.start()
        waiting.append(thread)

    def expect_held_back(count, write):
        wait_until(lambda: len(disk.begun) == write)
        for _ in range(20):
            assert not answered
            threading.Event().wait(0.01)
        disk.end_writes()
        wait_until(lambda: len(answered) == count)
        answered.clear()

    first = {"session": "s", "dataset": "d", "fence": Fence(ledger="ledger", lineage=1, member=1)}
    call(lambda: client.call(calls.register()))
    expect_held_back(1, 1)
    call(lambda: client.call(calls.lease(1)))
    expect_held_back(1, 2)
    done = Acknowledgement(task=1, attempt=1, upto=2)
    call(lambda: client.call(calls.report(1, acknowledgements=(done,))))
    wait_until(lambda: len(disk.begun) == 3)
    call(client.status)
    call(lambda: client.call(SnapshotCall(**first)))
    expect_held_back(3, 3)
    call(lambda: client.call(calls.report(2, failures=(Failure(task=1, attempt=1, position=2, reason="x"),))))
    wait_until(lambda: len(disk.begun) == 4)
    disk.end_writes()
    wait_until(lambda: answered)
    answered.clear()
    call(lambda: client.call(RestoreCall(**first, request=1, token=None)))
    expect_held_back(1, 5)
    call(lambda: client.leave("s", 1))
    expect_held_back(1, 6)
    for thread in waiting:
        thread.join(60)
    disk.end_writes(100)
