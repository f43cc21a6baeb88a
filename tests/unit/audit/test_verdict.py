"""What is proven, what is refuted, and how the records are called."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from audited_job import BATCH, SPEC, Job, grant_of

from edl_torch.audit.chain import FinalWord
from edl_torch.audit.log import AuditLog
from edl_torch.audit.verdict import audit
from edl_torch.core.calls import Acknowledgement, Failure
from edl_torch.core.token import Token
from edl_torch.errors import AuditError
from edl_torch.shard import Source

SMALL = replace(SPEC, sources=(Source(name="a.csv", start=100, count=16),))


def one(folder, **options):
    (verdict,) = audit([folder], **options)
    return verdict


def findings(verdict, kind):
    found = [f.records for f in verdict.findings if f.kind == kind]
    return [(r.epoch, r.name, r.start, r.end) for r in found]


def by(verdict, kind):
    return [f.by for f in verdict.findings if f.kind == kind]


class Writer:
    """A trainer written by hand: leases and acknowledgements of any kind."""

    def __init__(self, folder, session="s", spec=SMALL, lineage=1, ledger="L"):
        self.log = AuditLog(folder, session, session)
        self.log.joined(spec, ledger=ledger, lineage=lineage, batch_size=BATCH)

    def take(self, task, shard, skip, limit, *, epoch=0):
        self.log.granted(grant_of(task, shard, skip, limit, epoch=epoch))

    def say(self, task, *upto, answered=True, stale=()):
        for position in upto:
            self.log.intent(acknowledgements=[Acknowledgement(task=task, attempt=1, upto=position)])
            if answered:
                self.log.answered(stale)

    def whole(self, task, shard, skip=0, limit=8, *, epoch=0, **options):
        self.take(task, shard, skip, limit, epoch=epoch)
        self.say(task, skip + limit, **options)


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
    assert verdict.proven
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
    word = FinalWord(settled={(2, 1): 5})
    verdict = one(tmp_path, words={"training": word})
    assert findings(verdict, "lost") == [(0, "a.csv", 113, 116)]
    assert verdict.unsettled == 0


# The master's final word ------------------------------------------------------------------------------


def test_the_masters_token_says_what_must_have_an_outcome(tmp_path):
    job = Job(tmp_path)
    job.train_batches(5)
    verdict = one(
        tmp_path, words={"training": FinalWord(token=job.ledger.snapshot().encode())}, unfinished=True
    )
    assert verdict.proven
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
    assert findings(verdict, "forgotten") == [(0, "a.csv", 102, 103)]
    assert findings(verdict, "lost") == [(0, "a.csv", first, first + 4 - skip)]
    assert not verdict.proven


def test_a_report_cut_off_that_the_masters_token_does_not_have_is_no_outcome(tmp_path):
    job = Job(tmp_path)
    job.fetch(job.trainers[0])
    job.train(job.trainers[0], heard=False, answered=False)
    verdict = one(
        tmp_path, words={"training": FinalWord(token=job.ledger.snapshot().encode())}, unfinished=True
    )
    assert (verdict.proven, verdict.acknowledged, verdict.unsettled, verdict.assumed) == (True, 0, 3, 0)


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
    assert (verdict.proven, verdict.open, verdict.records, verdict.lost) == (True, 8, 8, 0)
    writer.whole(2, 0)
    assert not one(tmp_path, unfinished=True).proven


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


# Crumbs -----------------------------------------------------------------------------------------------


def test_crumbs_of_less_than_a_batch_are_dropped(tmp_path):
    job = Job(tmp_path, trainers=1)
    job.fetch(job.trainers[0])
    job.crumble(job.trainers[0])
    job.finish()
    verdict = one(tmp_path)
    assert (verdict.proven, verdict.dropped, job.ledger.dropped) == (True, 2, 2)


def test_what_is_missing_and_was_no_crumb_is_lost_however_little(tmp_path):
    Writer(tmp_path).whole(1, 0)
    Writer(tmp_path, "two").whole(2, 1, 0, 7)
    verdict = one(tmp_path)
    assert (verdict.dropped, verdict.lost) == (0, 1)


def test_crumbs_of_a_whole_batch_are_lost(tmp_path):
    writer = Writer(tmp_path)
    for task, shard in ((1, 0), (2, 1)):
        writer.take(task, shard, 0, 8)
        writer.say(task, 6)
    text = writer.log.path.read_text()
    crumbs = [{"event": "crumb", "epoch": 0, "shard": s, "start": 6, "upto": 8, "ms": 0} for s in (0, 1)]
    writer.log.path.write_text(text + "".join(f"{json.dumps(crumb)}\n" for crumb in crumbs))
    verdict = one(tmp_path)
    assert (verdict.dropped, verdict.lost) == (0, 4)


# Lineages ---------------------------------------------------------------------------------------------


def test_a_restore_rolls_back_and_every_record_counts_once(tmp_path):
    job = Job(tmp_path)
    job.train_batches(3)
    token = job.checkpoint(0)
    job.train_batches(2)
    done = job.ledger.acknowledged
    job.restore(1, token)
    job.finish()
    verdict = one(tmp_path)
    assert verdict.proven
    assert (verdict.acknowledged, verdict.lineages, verdict.lineage) == (25, 2, 2)
    assert verdict.rolled_back == done - Token.decode(token).acknowledged > 0


def test_a_chain_of_many_restores_is_followed_to_the_beginning(tmp_path):
    job = Job(tmp_path, replace(SPEC, num_epochs=200))
    for number in range(1200):
        job.train_batches(2)
        job.restore(number % 2, job.checkpoint(number % 2))
    verdict = one(tmp_path, unfinished=True)
    assert verdict.proven
    assert verdict.lineages == 1201
    assert verdict.acknowledged == job.ledger.acknowledged


def test_a_token_restored_twice_makes_the_later_lineage_final(tmp_path):
    job = Job(tmp_path)
    job.train_batches(2)
    token = job.checkpoint(0)
    job.restore(0, token)
    job.train_batches(3)
    wasted = job.ledger.acknowledged - Token.decode(token).acknowledged
    job.restore(0, token)
    job.finish()
    verdict = one(tmp_path)
    assert (verdict.proven, verdict.lineage, verdict.rolled_back) == (True, 3, wasted)


def test_a_job_begun_anew_on_another_master_goes_back_through_the_old_ones_logs(tmp_path):
    job = Job(tmp_path)
    job.train_batches(4)
    token = job.checkpoint(0)
    job.directory = tmp_path / "second run"
    job.restart(token)
    job.finish()
    verdict = audit([tmp_path, tmp_path / "second run"])[0]
    assert (verdict.proven, verdict.ledger, verdict.acknowledged) == (True, "ledger2", 25)
    with pytest.raises(AuditError, match="no log says where that was taken"):
        audit([tmp_path / "second run"])


def test_of_two_lineages_that_took_the_same_token_one_must_explain_it(tmp_path):
    job = Job(tmp_path, SMALL, trainers=1)
    job.train_batches(2)
    first = job.trainers[0].log
    token = job.checkpoint(0)
    job.restart(None)
    job.train_batches(2)
    assert job.checkpoint(0) == token
    second = job.trainers[0].log
    job.restart(token)
    job.finish()
    for log, proven in ((second, True), (first, False)):
        text = log.path.read_text()
        row = next(line for line in text.splitlines() if line[0].isdigit())
        log.path.write_text(text.replace(f"{row}\n", ""))
        assert one(tmp_path).proven is proven


def test_a_record_lost_before_the_checkpoint_is_found_after_the_restore(tmp_path):
    job = Job(tmp_path, SMALL, trainers=1)
    job.train_batches(2)
    token = job.checkpoint(0)
    path = job.trainers[0].log.path
    job.restart(token)
    job.finish()
    lines = path.read_text().splitlines()
    gone = next(i for i, line in enumerate(lines) if line[0].isdigit())
    path.write_text("".join(f"{line}\n" for line in [*lines[:gone], *lines[gone + 1 :]]))
    verdict = one(tmp_path)
    assert findings(verdict, "lost") == [(0, "a.csv", 100, 103)]


def test_a_record_acknowledged_before_the_checkpoint_and_again_after_the_restore_is_doubled(tmp_path):
    job = Job(tmp_path, SMALL, trainers=1)
    job.train_batches(2)
    token = job.checkpoint(0)
    job.restore(0, token)
    job.finish()
    Writer(tmp_path, "rogue", lineage=2, ledger="ledger1").whole(99, 0, 1, 1)
    verdict = one(tmp_path)
    assert findings(verdict, "doubled") == [(0, "a.csv", 101, 102)]
    assert by(verdict, "doubled") == [("rogue (lineage 2, task 99)", "host/rank 1 (lineage 1, task 1)")]


def test_an_acknowledgement_of_the_old_lineage_after_the_checkpoint_is_only_rolled_back(tmp_path):
    job = Job(tmp_path, SMALL)
    token = job.checkpoint(0)
    job.train_batches(5)
    job.restore(0, token)
    job.finish()
    assert one(tmp_path).proven


def test_quarantined_before_the_checkpoint_and_dropped_records_are_carried_over(tmp_path):
    job = Job(tmp_path, replace(SPEC, num_epochs=2), trainers=1)
    (trainer,) = job.trainers
    job.fetch(trainer)
    job.quarantine(trainer)
    job.crumble(trainer)
    token = job.checkpoint(0)
    job.restore(0, token)
    while job.ledger.epoch == 0:
        job.fetch(trainer)
        job.train(trainer)
    assert job.ledger.dropped == 2
    job.restart(job.checkpoint(0))
    job.finish()
    verdict = one(tmp_path)
    assert verdict.proven, verdict
    assert (verdict.quarantined, verdict.dropped, verdict.acknowledged) == (1, 2, 47)


def test_a_token_whose_counts_disagree_with_the_logs_is_a_contradiction(tmp_path):
    job = Job(tmp_path)
    job.train_batches(2)
    right = job.ledger.snapshot()
    wrong = replace(right, acknowledged=right.acknowledged + 1)
    verdict = one(tmp_path, words={"training": FinalWord(token=wrong.encode())})
    assert not verdict.proven
    assert "counts 6 outcome(s), its position says 5" in verdict.contradictions[0]
    wrong = replace(right, acknowledged=right.acknowledged - 1, dropped=1)
    verdict = one(tmp_path, words={"training": FinalWord(token=wrong.encode())})
    assert "1 dropped" in verdict.contradictions[0]


def test_a_lineage_without_a_log_of_its_restore_is_refused(tmp_path):
    Writer(tmp_path, lineage=2).whole(1, 0)
    with pytest.raises(AuditError, match="from which token lineage 2"):
        audit([tmp_path])


def test_logs_that_describe_one_ledgers_dataset_differently_are_refused(tmp_path):
    Writer(tmp_path, "one")
    Writer(tmp_path, "two", spec=replace(SMALL, seed=9))
    with pytest.raises(AuditError, match="seed: registered"):
        audit([tmp_path])


def test_other_data_under_the_same_name_in_an_earlier_ledger_is_another_job(tmp_path):
    Writer(tmp_path, "one", spec=replace(SMALL, seed=9), ledger="old").whole(1, 0)
    writer = Writer(tmp_path, "two")
    writer.whole(1, 0)
    writer.whole(2, 1)
    verdict = one(tmp_path)
    assert (verdict.proven, verdict.trainers, verdict.lineages) == (True, 1, 1)


def test_a_position_outside_of_the_dataset_is_a_damaged_line(tmp_path):
    writer = Writer(tmp_path)
    writer.whole(1, 0)
    path = writer.log.path
    text = path.read_text()
    for wrong in ("0 0 0 9", "0 2 0 8", "0 0 8 8", "999999999999999999 0 0 8"):
        path.write_text(text.replace("0 0 0 8", wrong))
        with pytest.raises(AuditError, match="line 3, is damaged"):
            audit([tmp_path])


# Several datasets -------------------------------------------------------------------------------------


def test_each_dataset_has_its_own_verdict(tmp_path):
    Job(tmp_path).finish()
    job = Job(tmp_path, replace(SMALL, name="validation"))
    job.train_batches(2)
    training, validation = audit([tmp_path])[0], audit([tmp_path])[1]
    assert (training.dataset, training.proven, training.trainers) == ("training", True, 2)
    assert (validation.dataset, validation.proven, validation.size) == ("validation", False, 16)


def test_logs_of_trainers_that_never_joined_are_refused(tmp_path):
    Writer(tmp_path).log.path.write_text('{"edl_audit":1,"session":"s","worker_id":"w","opened":1.0}\n')
    with pytest.raises(AuditError, match="nothing to audit"):
        audit([tmp_path])
