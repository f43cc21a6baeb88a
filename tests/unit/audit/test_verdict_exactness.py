"""What keeps a proof from being exact, and tokens that were not those of the model they were saved with."""

from __future__ import annotations

import json

import pytest
from audited_job import BATCH, SMALL, Job, Writer, by, findings, one

from edl_torch.audit.verdict import Outcome
from edl_torch.cli.main import main
from edl_torch.trainer.vocabulary import Evidence

# Outcomes -----------------------------------------------------------------------------------------------


def test_the_exit_status_is_that_of_the_worst_dataset(tmp_path, capsys):
    statuses = []
    for name, extra in (("a", ()), ("b", ("given back",)), ("c", ("lost",))):
        spec = SMALL.__class__(name=name, sources=SMALL.sources, records_per_shard=8)
        writer = Writer(tmp_path, name, spec=spec)
        writer.whole(1, 0)
        if "given back" in extra:
            writer.take(3, 0, 0, 8)
            writer.give_back(3, 2, 4)
        if "lost" not in extra:
            writer.whole(2, 1)
        statuses.append(main(["audit", str(tmp_path)]))
    assert statuses == [0, 3, 1]
    assert main(["audit", "--json", "--unfinished", str(tmp_path)]) == 2
    said = json.loads(capsys.readouterr().out.partition("\n{")[2].join(("{", "")))
    assert (said["verdict"], said["proven"]) == ("UNFINISHED", False)
    assert [dataset["verdict"] for dataset in said["datasets"]] == [
        "PROVEN",
        "INEXACT",
        "UNFINISHED",
    ]


# How acknowledgements came about ------------------------------------------------------------------------


def in_ways(writer):
    writer.whole(1, 0, way=Evidence.STEP)
    writer.whole(2, 1, 0, 5, way=Evidence.REPORT)
    writer.whole(3, 1, 5, 3, way=Evidence.TOKEN)


def padded(writer):
    writer.whole(1, 0)
    writer.log.padding(2)
    writer.whole(2, 1)
    writer.log.padding(1)


def counted(writer):
    writer.whole(1, 0)
    writer.whole(2, 1, 0, 5, way=Evidence.COUNT)
    writer.whole(3, 1, 5, 3)


def reported_in_vain(writer):
    writer.take(1, 0, 0, 8)
    writer.log.uncounted(6)
    writer.whole(2, 0)
    writer.whole(3, 1)


@pytest.mark.parametrize(
    ("write", "status", "words"),
    [
        (
            in_ways,
            4,
            ["8 when an attached optimizer had stepped; 3 by a token taken in the loop's bod"],
        ),
        (padded, 3, ["INEXACT: 3 padding batch(es) were trained on like any other", "loader.weigh(loss)"]),
        (counted, 3, ["INEXACT: 5 record(s) were acknowledged by counting: a plain"]),
        (reported_in_vain, 3, ["INEXACT: 6 record(s) were reported so and read again"]),
    ],
)
def test_how_acknowledgements_came_about_is_said_and_what_is_not_exact(
    tmp_path, capsys, write, status, words
):
    write(Writer(tmp_path))
    assert main(["audit", str(tmp_path)]) == status
    said = capsys.readouterr().out
    assert all(word in said for word in words), said
    assert one(tmp_path).repeated == 0


# Delivered more than once -------------------------------------------------------------------------------


def test_records_given_back_after_the_loop_had_them_are_named(tmp_path, capsys):
    first, second = Writer(tmp_path, "one"), Writer(tmp_path, "two")
    first.take(1, 0, 0, 8)
    first.say(1, 3)
    first.give_back(1, 3, 6)
    second.whole(2, 0, 3, 5)
    second.whole(3, 1)
    verdict = one(tmp_path)
    assert (verdict.outcome, verdict.repeated, verdict.returned) == (Outcome.INEXACT, 3, 3)
    assert findings(verdict, "repeated") == [(0, "a.csv", 103, 106)]
    assert by(verdict, "repeated") == [("one (given back in lineage 1, task 1)",)]
    assert main(["audit", str(tmp_path)]) == 3
    out = capsys.readouterr().out
    assert "dataset 'training': INEXACT\n" in out
    more = "may have been trained on once more than is counted"
    assert f"INEXACT: 3 record(s) {more}: 3 given back after a loop had them (before" in out
    assert f"repeated: {more}\n    epoch 0: records 103 to 105 of 'a.csv', by one" in out


@pytest.mark.parametrize("settled", ["refused", "lost"])
def test_a_report_that_came_too_late_was_trained_on_twice(tmp_path, settled):
    zombie, other = Writer(tmp_path, "zombie"), Writer(tmp_path, "other")
    zombie.take(1, 0, 0, 8)
    zombie.say(1, 4, answered=settled == "refused", stale=[1])
    if settled == "lost":
        zombie.log.lost()
    other.whole(2, 0)
    other.whole(3, 1)
    verdict = one(tmp_path)
    assert (verdict.outcome, verdict.repeated, verdict.late) == (Outcome.INEXACT, 4, 4)
    assert by(verdict, "repeated") == [("zombie (reported too late in lineage 1, task 1)",)]


# Tokens -------------------------------------------------------------------------------------------------


def test_a_token_taken_while_reports_were_counted_makes_a_proof_inexact(tmp_path, capsys):
    job = Job(tmp_path, SMALL)
    job.train_batches(2)
    job.restart(job.checkpoint(0, exact=False))
    job.finish()
    verdict = one(tmp_path)
    assert (verdict.outcome, verdict.inexact_tokens, verdict.uncounted) == (Outcome.INEXACT, 1, BATCH)
    assert main(["audit", str(tmp_path)]) == 3
    assert (
        "INEXACT: the token that lineage 2 began from was taken while reports were" in capsys.readouterr().out
    )


def test_a_token_that_no_log_says_who_took_makes_a_proof_inexact(tmp_path):
    job = Job(tmp_path, SMALL)
    job.train_batches(2)
    job.restore(0, job.ledger.snapshot().encode())  # by way of a client without a log
    job.finish()
    verdict = one(tmp_path)
    assert (verdict.outcome, verdict.inexact_tokens) == (Outcome.INEXACT, 1)
    (doubt,) = verdict.doubts
    assert doubt.startswith(
        "the token that lineage 2 began from was taken by nobody whose log is here: give the "
    )


@pytest.mark.parametrize(("batches", "more"), [(0, 6), (1, 5)], ids=["beginning", "checkpoint"])
def test_a_superseded_trainers_token_that_has_less_than_its_model_refutes(tmp_path, capsys, batches, more):
    """A zombie goes back just before the living trainer saves: its last two batches are trained on again."""
    job = Job(tmp_path, SMALL)
    job.train_batches(batches, job.trainers[:1])
    start = job.checkpoint(0)
    job.train_batches(2, job.trainers[:1])
    job.restore(1, start, others_join=False)
    token = job.checkpoint(0)  # by a master that does not look at the lineage
    job.restart(token)
    job.finish()
    verdict = one(tmp_path)
    assert (verdict.lost, verdict.doubled, verdict.acknowledged) == (0, 0, 16)
    (contradiction,) = verdict.contradictions
    assert f"taken by host/rank 1 (lineage 1, member 1) when {more} record(s)" in contradiction
    assert main(["audit", str(tmp_path)]) == 1
    assert "CONTRADICTION: the token was taken by host/rank 1" in capsys.readouterr().out


def test_a_superseded_trainers_token_that_has_more_than_its_model_refutes(tmp_path):
    """It wakes inside its save, and gets the token of who replaced it."""
    job = Job(tmp_path, SMALL)
    job.train_batches(1, job.trainers[:1])
    job.restore(1, job.checkpoint(0), others_join=False)
    job.train_batches(2, job.trainers[1:])
    token = job.checkpoint(0)
    job.restart(token)
    job.finish()
    verdict = one(tmp_path)
    assert (verdict.outcome, verdict.lost) == (Outcome.REFUTED, 5)


@pytest.mark.parametrize("also", [True, False])
def test_a_superseded_trainers_token_refutes_though_the_living_one_took_the_same(tmp_path, also):
    job = Job(tmp_path, SMALL)
    job.train_batches(1, job.trainers[:1])
    job.restore(1, job.checkpoint(0), others_join=False)
    job.train_batches(2, job.trainers[1:])
    token = job.checkpoint(1)
    if also:
        assert job.checkpoint(0) == token
    job.restart(token)
    job.finish()
    assert one(tmp_path).outcome is (Outcome.REFUTED if also else Outcome.PROVEN)


def test_a_superseded_trainers_token_of_another_ledger_refutes(tmp_path):
    """The master began anew without a journal, another trainer went back, and the old one saves."""
    job = Job(tmp_path, SMALL)
    job.train_batches(1, job.trainers[:1])
    start = job.checkpoint(0)
    job.train_batches(2, job.trainers[:1])
    zombie = job.trainers[0]
    job.restart(start)
    zombie.log.snapshot(job.ledger.snapshot().encode())
    job.restart(job.ledger.snapshot().encode())
    job.finish()
    verdict = one(tmp_path)
    assert (verdict.lost, verdict.doubled) == (0, 0)
    assert any("(lineage 1, member 1) when 5 record(s)" in text for text in verdict.contradictions)


def test_a_token_taken_in_a_lineage_that_its_session_had_left_refutes(tmp_path):
    job = Job(tmp_path, SMALL, trainers=1)
    job.train_batches(1)
    token = job.checkpoint(0)
    job.restore(0, None)
    job.restart(token)
    job.finish()
    assert one(tmp_path).outcome is Outcome.PROVEN
    path = job.directory / "host_rank_1-training1.audit"
    lines = path.read_text().splitlines()
    taken = next(line for line in lines if '"snapshot"' in line)
    path.write_text("".join(f"{line}\n" for line in [*lines, taken]))
    (contradiction,) = one(tmp_path).contradictions
    assert contradiction.endswith("(lineage 1, member 1), which was superseded and knew it")
