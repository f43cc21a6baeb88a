"""The master's log has a line for each epoch that is over, and one where a dataset is finished."""

from __future__ import annotations

import logging

import pytest
from loop_kit import on_loop

from edl_torch.core.calls import Acknowledgement, GiveBack
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.master.host import MasterHost


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
