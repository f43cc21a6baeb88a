"""What is proven, what is refuted, and how the records are called."""

from __future__ import annotations

from dataclasses import replace

import pytest
from audited_job import Job
from verdict_kit import SMALL, Writer, by, findings, one

from edl_torch.audit.chain import FinalWord
from edl_torch.audit.verdict import audit
from edl_torch.core.calls import Failure
from edl_torch.errors import AuditError


def test_a_job_that_trained_on_everything_is_proven(tmp_path):
    job = Job(tmp_path)
    job.finish()
    verdict = one(tmp_path)
    assert verdict.proven
    assert (verdict.records, verdict.acknowledged, verdict.lost, verdict.doubled) == (25, 25, 0, 0)
    assert (verdict.trainers, verdict.lineages, verdict.ledger, verdict.lineage) == (2, 1, "ledger1", 1)
    assert verdict.findings == ()


def test_lost_records_are_named(tmp_path):
    writer = Writer(tmp_path)
    writer.take(1, 0, 0, 5)
    writer.say(1, 3)
    writer.whole(2, 1, 1, 7)
    verdict = one(tmp_path)
    assert not verdict.proven
    assert verdict.lost == 6
    assert findings(verdict, "lost") == [(0, "a.csv", 103, 109)]


def test_lost_records_of_a_shuffled_shard_are_named_by_their_index(tmp_path):
    spec = replace(SMALL, shuffle_in_shard=True, seed=4)
    job = Job(tmp_path, spec)
    writer = Writer(tmp_path, spec=spec)
    writer.whole(1, 0, 0, 7)
    writer.whole(2, 1)
    name, index = job.ledger.plan.locate(0, 0, 7)
    assert findings(one(tmp_path), "lost") == [(0, name, index, index + 1)]


def test_doubled_records_are_named_with_who_acknowledged_them(tmp_path):
    first, second = Writer(tmp_path, "one"), Writer(tmp_path, "two")
    first.whole(1, 0)
    first.whole(2, 1)
    second.whole(3, 0, 6, 2)
    verdict = one(tmp_path)
    assert not verdict.proven
    assert (verdict.doubled, verdict.acknowledged) == (2, 16)
    assert findings(verdict, "doubled") == [(0, "a.csv", 106, 108)]
    assert by(verdict, "doubled") == [("one (lineage 1, task 1)", "two (lineage 1, task 3)")]


def test_a_record_in_quarantine_that_another_lease_trained_on_is_doubled(tmp_path):
    first, second = Writer(tmp_path, "one"), Writer(tmp_path, "two")
    first.take(1, 0, 0, 8)
    first.log.intent(failures=[Failure(task=1, attempt=1, position=2, reason="broken")])
    first.say(1, 8)
    second.whole(2, 1)
    assert (one(tmp_path).proven, one(tmp_path).quarantined) == (True, 1)
    second.whole(3, 0, 2, 1)
    assert findings(one(tmp_path), "doubled") == [(0, "a.csv", 102, 103)]


def test_stale_acknowledgements_are_named_and_refute_nothing(tmp_path):
    zombie, other = Writer(tmp_path, "zombie"), Writer(tmp_path, "other")
    zombie.take(1, 0, 0, 8)
    zombie.say(1, 4, stale=[1])
    other.whole(2, 0)
    other.whole(3, 1)
    verdict = one(tmp_path)
    assert verdict.delivered
    assert verdict.refused == 4
    assert findings(verdict, "stale") == [(0, "a.csv", 100, 104)]
    assert by(verdict, "stale") == [("zombie (lineage 1, task 1)",)]


def test_a_long_list_is_cut_and_says_how_much_is_left(tmp_path):
    writer = Writer(tmp_path)
    for position in range(1, 16, 2):
        writer.whole(position, position // 8, position % 8, 1)
    verdict = one(tmp_path, listed=3)
    assert findings(verdict, "lost") == [(0, "a.csv", n, n + 1) for n in (100, 102, 104)]
    assert verdict.unnamed == {"lost": 5}


# Reports without an answer ----------------------------------------------------------------------------


def test_a_report_cut_off_counts_when_nobody_else_has_its_records(tmp_path):
    writer = Writer(tmp_path)
    writer.whole(1, 0)
    writer.whole(2, 1, answered=False)
    verdict = one(tmp_path)
    assert (verdict.proven, verdict.unsettled, verdict.assumed) == (True, 8, 8)


def test_a_report_cut_off_does_not_count_where_somebody_else_has_its_records(tmp_path):
    killed, other = Writer(tmp_path, "killed"), Writer(tmp_path, "other")
    killed.whole(1, 0, answered=False)
    other.whole(2, 0, 0, 5)
    other.whole(3, 1)
    verdict = one(tmp_path)
    assert (verdict.proven, verdict.unsettled, verdict.assumed, verdict.doubled) == (True, 8, 3, 0)


def test_of_two_reports_cut_off_one_counts(tmp_path):
    for session in ("one", "two"):
        Writer(tmp_path, session).whole(1, 0, answered=False)
    Writer(tmp_path, "three").whole(2, 1)
    verdict = one(tmp_path)
    assert (verdict.proven, verdict.unsettled, verdict.assumed, verdict.acknowledged) == (True, 16, 8, 16)


def test_the_masters_journal_settles_what_a_kill_cut_off(tmp_path):
    writer = Writer(tmp_path)
    writer.whole(1, 0)
    writer.take(2, 1, 0, 8)
    writer.say(2, 2)
    writer.say(2, 8, answered=False)
    word = FinalWord(settled={(2, 1): [(0, 5)]})
    verdict = one(tmp_path, words={"training": word})
    assert findings(verdict, "lost") == [(0, "a.csv", 113, 116)]
    assert verdict.unsettled == 0


# Several datasets -------------------------------------------------------------------------------------


def test_each_dataset_has_its_own_verdict(tmp_path):
    Job(tmp_path).finish()
    job = Job(tmp_path, replace(SMALL, name="validation"))
    job.train_batches(2)
    training, validation = audit([tmp_path])[0], audit([tmp_path])[1]
    assert (training.dataset, training.proven, training.trainers) == ("training", True, 2)
    assert (validation.dataset, validation.proven, validation.size) == ("validation", False, 16)


def test_logs_of_trainers_that_never_joined_are_refused(tmp_path):
    Writer(tmp_path).log.path.write_text('{"edl_audit":3,"session":"s","worker_id":"w","opened":1.0}\n')
    with pytest.raises(AuditError, match="nothing to audit"):
        audit([tmp_path])
