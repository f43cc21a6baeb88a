"""`edl-torch audit`: what it prints, and its exit status."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from audited_job import SMALL, SPEC, Job, Writer, changed

from edl_torch.audit.verdict import audit as audit_of
from edl_torch.cli.main import main
from edl_torch.cli.verdict_words import grounds, inexact, undecided
from edl_torch.core.calls import Failure
from edl_torch.fingerprint import STRENGTHS
from edl_torch.shard import TaskType
from edl_torch.trainer.vocabulary import Evidence


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path / "audit")


def audit(job, *options):
    return main(["audit", str(job.directory), *options])


def test_a_proof_ends_with_0(job, capsys):
    job.train_batches(3)
    job.restore(0, job.checkpoint(0))
    job.finish()
    assert audit(job) == 0
    assert capsys.readouterr().out.splitlines() == [
        "dataset 'training': PROVEN, data not known to be the same",
        "  25 records, 1 epoch(s); 25 must have exactly one outcome",
        "  lineage 2 of ledger ledger1, the last of 2 in the logs; 2 trainer session(s)",
        "  acknowledged 25  quarantined 0  dropped 0  lost 0  doubled 0  forgotten 0",
        "  rolled back 0  refused as stale 0",
        "  acknowledged: 25 when an attached optimizer had stepped",
        "  that trainers had one model is their user's word: 'a test says so'",
        "  data: not compared: other data would not be noticed; "
        'with fingerprint="v1" at the loader they would be compared',
    ]


def test_a_refutation_ends_with_1_and_names_the_records(job, capsys):
    job.train_batches(2)
    job.fetch(job.trainers[0])
    job.stop_and_go_on(0)
    assert audit(job, "--list", "1") == 1
    out = capsys.readouterr().out
    assert "dataset 'training': REFUTED" in out
    assert "  lost: no outcome\n    epoch 0: record" in out
    assert "more record(s)" in out
    assert "stale: came too late and was refused" in out
    assert "by host/rank 1 (lineage 1, task" in out


def test_the_verdict_on_a_killed_job_points_to_the_option_before_all_else(job, capsys):
    job.kill(0, heard=False)
    advice = "if the job still runs, was killed, or was stopped and will go on: audit it with --unfinished"
    assert audit(job) == 1
    assert capsys.readouterr().out.splitlines()[:2] == ["dataset 'training': REFUTED", f"  {advice}"]
    assert audit(job, "--json") == 1
    (dataset,) = json.loads(capsys.readouterr().out)["datasets"]
    assert dataset["advice"] == advice
    assert audit(job, "--json", "--unfinished") == 2
    (dataset,) = json.loads(capsys.readouterr().out)["datasets"]
    assert dataset["advice"] == ""


def test_json_has_everything(job, capsys):
    job.kill(0, heard=False)
    assert audit(job, "--json") == 1
    said = json.loads(capsys.readouterr().out)
    assert (said["verdict"], said["proven"]) == ("REFUTED", False)
    (dataset,) = said["datasets"]
    assert (dataset["dataset"], dataset["lost"], dataset["size"]) == ("training", 25, SPEC.size)
    assert dataset["findings"][0]["records"] == {"epoch": 0, "name": "a.csv", "start": 5, "end": 25}


def test_wrong_input_ends_with_2(job, tmp_path, capsys):
    assert main(["audit", str(tmp_path / "none")]) == 2
    assert "not a directory" in capsys.readouterr().err
    assert main(["audit", str(tmp_path)]) == 2
    assert "no audit log" in capsys.readouterr().err
    path = job.trainers[0].log.path
    path.write_text(f"{path.read_text()}what\n=\n")
    assert audit(job) == 2
    assert f"{path.name}', line 4, is damaged" in capsys.readouterr().err


def test_delivered_has_a_status_of_its_own_that_may_be_expected(tmp_path, capsys):
    writer = Writer(tmp_path)
    writer.whole(1, 0, way=Evidence.NEXT)
    writer.whole(2, 1, way=Evidence.NEXT)
    assert main(["audit", str(tmp_path)]) == 4
    said = capsys.readouterr().out
    assert said.startswith(
        "dataset 'training': DELIVERED: each record was trained on once, as the loop says\n"
    )
    assert "  DELIVERED: 16 record(s) were acknowledged as the loop asked" in said
    assert "Before the loop: loader.attach(optimizer)" in said
    assert main(["audit", "--expect", "delivered", str(tmp_path)]) == 0
    assert main(["audit", "--expect", "delivered", "--json", str(tmp_path)]) == 0
    said = json.loads(capsys.readouterr().out.partition("\n{")[2].join(("{", "")))
    assert (said["verdict"], said["proven"]) == ("DELIVERED", False)


def test_what_is_expected_is_the_least(tmp_path, job):
    for writer, status in ((Writer(tmp_path / "lost"), 1), (Writer(tmp_path / "proven"), 0)):
        writer.whole(1, 0)
        if not status:
            writer.whole(2, 1)
        folder = str(writer.log.path.parent)
        assert main(["audit", "--expect", "delivered", folder]) == status


def test_quarantine_stands_in_the_first_line(tmp_path, capsys):
    writer = Writer(tmp_path)
    writer.take(1, 0, 0, 8)
    writer.log.intent(failures=[Failure(task=1, attempt=1, position=2, reason="broken")])
    writer.say(1, 8)
    writer.whole(2, 1)
    assert main(["audit", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("dataset 'training': PROVEN, 1 of 16 in quarantine\n")


def test_a_dataset_of_evaluation_is_delivered_at_best(tmp_path, capsys):
    writer = Writer(tmp_path, spec=replace(SMALL, task_type=TaskType.EVALUATION))
    writer.whole(1, 0)
    writer.whole(2, 1)
    assert main(["audit", str(tmp_path)]) == 4
    assert "DELIVERED: each record went to a loop once\n" in capsys.readouterr().out


REMEDIES = (
    "loader.attach(",
    "fingerprint=",
    "ElasticDataLoader(dataset",
    "optimizer.step()",
    "go back to the last checkpoint",
    "audit_dir=",
    "give the audit directories",
)


def test_what_keeps_a_verdict_from_being_proven_is_said_with_its_remedy(job) -> None:
    job.train_batches(3)
    job.finish()
    (verdict,) = audit_of([job.directory])
    told = changed(
        verdict,
        repeated=3,
        returned=1,
        void=1,
        late=1,
        counted=1,
        uncounted=1,
        padding=1,
        unstepped=1,
        unordered=("a", "b"),
        changed=("the values are others than then",),
        models=replace(verdict.models, unattached=2),
    )
    lines = [*inexact(told), *undecided(told)]
    for known_by in STRENGTHS[:-1]:
        lines += [line for line in grounds(changed(verdict, known_by=known_by)) if line.startswith("data: ")]
    assert len(lines) == 7 + 1 + 5
    for line in lines:
        for reason in line.split("; ") if "may have been trained" in line else [line]:
            assert any(remedy in reason for remedy in REMEDIES) or "given: what" in reason, reason
