"""What the master's own word adds, and jobs that did not end, or dropped what was less than a batch."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from audited_job import BATCH, Job
from verdict_kit import SMALL, Writer, findings, one

from edl_torch.audit.chain import FinalWord
from edl_torch.audit.verdict import Outcome, audit
from edl_torch.errors import AuditError
from edl_torch.shard import Source

# The master's final word ------------------------------------------------------------------------------


def test_the_masters_token_says_what_must_have_an_outcome(tmp_path):
    job = Job(tmp_path)
    job.train_batches(5)
    verdict = one(
        tmp_path, words={"training": FinalWord(token=job.ledger.snapshot().encode())}, unfinished=True
    )
    assert verdict.outcome is Outcome.UNFINISHED
    assert verdict.records == verdict.acknowledged == job.ledger.acknowledged
    assert verdict.open == 25 - verdict.records


def test_an_outcome_that_the_master_has_and_no_log_is_lost_and_one_that_it_forgot_is_named(tmp_path):
    job = Job(tmp_path, SMALL)
    writer = Writer(tmp_path, "x")
    job.ledger.join("x", BATCH)
    grants = [job.ledger.lease("x", epoch=0, count=1)[2][0] for _ in range(2)]
    writer.log.granted(grants[0])
    writer.say(grants[0].task, 3)
    job.ledger.acknowledge("x", grants[0].task, 1, 2)
    job.ledger.acknowledge("x", grants[1].task, 1, 4)
    verdict = one(
        tmp_path, words={"training": FinalWord(token=job.ledger.snapshot().encode())}, unfinished=True
    )
    shard, skip = grants[1].slice.shard, grants[1].slice.skip
    first = 100 + 8 * shard + skip
    assert not verdict.advice
    assert findings(verdict, "forgotten") == [(0, "a.csv", 102, 103)]
    assert findings(verdict, "lost") == [(0, "a.csv", first, first + 4 - skip)]
    assert not verdict.proven


def test_unfinished_is_no_advice_where_the_master_has_outcomes_that_no_log_has(tmp_path):
    job = Job(tmp_path, SMALL)
    Writer(tmp_path, "x")
    job.ledger.join("x", BATCH)

    def judged():
        return one(tmp_path, words={"training": FinalWord(token=job.ledger.snapshot().encode())})

    assert judged().lost == 16
    assert "--unfinished" in judged().advice  # all is ahead of the job
    while grants := job.ledger.lease("x", epoch=0, count=9)[2]:
        for grant in grants:
            job.ledger.acknowledge("x", grant.task, 1, grant.slice.stop)
    assert (judged().lost, judged().advice) == (16, "")


def test_a_report_cut_off_that_the_masters_token_does_not_have_is_no_outcome(tmp_path):
    job = Job(tmp_path)
    job.fetch(job.trainers[0])
    job.train(job.trainers[0], heard=False, answered=False)
    verdict = one(
        tmp_path, words={"training": FinalWord(token=job.ledger.snapshot().encode())}, unfinished=True
    )
    assert (verdict.refuted, verdict.acknowledged, verdict.unsettled, verdict.assumed) == (False, 0, 3, 0)


def test_a_token_of_other_data_is_refused(tmp_path):
    Job(tmp_path).finish()
    other = Job(tmp_path / "other", SMALL).ledger.snapshot().encode()
    with pytest.raises(AuditError, match="cannot be used"):
        audit([tmp_path], words={"training": FinalWord(token=other)})


# Jobs that did not end --------------------------------------------------------------------------------


def test_an_unfinished_job_has_open_records_and_its_doubles_still_refute(tmp_path):
    writer = Writer(tmp_path)
    writer.whole(1, 0)
    assert not one(tmp_path).proven
    verdict = one(tmp_path, unfinished=True)
    assert (verdict.outcome, verdict.proven) == (Outcome.UNFINISHED, False)
    assert (verdict.open, verdict.records, verdict.lost) == (8, 8, 0)
    writer.whole(2, 1)
    assert one(tmp_path, unfinished=True).outcome is Outcome.PROVEN  # nothing is open any more
    writer.whole(3, 0)
    assert one(tmp_path, unfinished=True).outcome is Outcome.REFUTED


def test_of_an_endless_job_all_epochs_but_the_last_must_be_whole(tmp_path):
    writer = Writer(tmp_path, spec=replace(SMALL, num_epochs=0))
    writer.whole(1, 0)
    writer.whole(2, 1)
    writer.whole(3, 0, 0, 3, epoch=1)
    verdict = one(tmp_path)
    assert (verdict.proven, verdict.open, verdict.records) == (True, 13, 19)
    writer.whole(4, 1, epoch=2)
    assert findings(one(tmp_path), "lost") == [(1, "a.csv", 103, 116)]


def test_a_job_that_never_trained_lost_everything(tmp_path):
    Writer(tmp_path)
    assert findings(one(tmp_path), "lost") == [(0, "a.csv", 100, 116)]


# Remainders -----------------------------------------------------------------------------------------------


def test_remainders_of_less_than_a_batch_are_dropped(tmp_path):
    job = Job(tmp_path, trainers=1)
    job.fetch(job.trainers[0])
    job.return_remainder(job.trainers[0])
    job.finish()
    verdict = one(tmp_path)
    assert (verdict.proven, verdict.dropped, job.ledger.dropped) == (True, 2, 2)


def test_whole_epochs_of_less_than_a_batch_are_dropped_each_by_itself(tmp_path):
    """The end of one epoch and the beginning of the next are one run of records."""
    spec = replace(SMALL, sources=(Source(name="a.csv", start=100, count=BATCH - 1),), num_epochs=4)
    writer = Writer(tmp_path, spec=spec)
    text = writer.log.path.read_text()
    remainder = {"event": "remainder", "shard": 0, "start": 0, "upto": BATCH - 1, "ms": 0}
    writer.log.path.write_text(text + "".join(f"{json.dumps({**remainder, 'epoch': n})}\n" for n in range(4)))
    verdict = one(tmp_path)
    assert (verdict.proven, verdict.dropped, verdict.lost) == (True, 4 * (BATCH - 1), 0)


def test_what_is_missing_and_was_no_remainder_is_lost_however_little(tmp_path):
    Writer(tmp_path).whole(1, 0)
    Writer(tmp_path, "two").whole(2, 1, 0, 7)
    verdict = one(tmp_path)
    assert (verdict.dropped, verdict.lost) == (0, 1)


def test_remainders_of_a_whole_batch_are_lost(tmp_path):
    writer = Writer(tmp_path)
    for task, shard in ((1, 0), (2, 1)):
        writer.take(task, shard, 0, 8)
        writer.say(task, 6)
    text = writer.log.path.read_text()
    remainders = [
        {"event": "remainder", "epoch": 0, "shard": s, "start": 6, "upto": 8, "ms": 0} for s in (0, 1)
    ]
    writer.log.path.write_text(text + "".join(f"{json.dumps(remainder)}\n" for remainder in remainders))
    verdict = one(tmp_path)
    assert (verdict.dropped, verdict.lost) == (0, 4)
