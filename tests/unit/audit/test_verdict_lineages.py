"""Jobs that went back to checkpoints; jobs that the master speaks of, and jobs that did not end."""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from audited_job import BATCH, SMALL, SPEC, Job, Writer, findings, one
from hypothesis import given, settings
from hypothesis import strategies as st

from edl_torch.audit.chain import FinalWord
from edl_torch.audit.verdict import Outcome, audit, judge
from edl_torch.cli.verdict_words import grounds
from edl_torch.core.registration import new_spec
from edl_torch.core.token import Token
from edl_torch.errors import AuditError, TokenError
from edl_torch.fingerprint import Fingerprint
from edl_torch.shard import Component, MixtureWeights, Registration, Source, TaskType


@pytest.mark.parametrize("ledger", range(8))
def test_a_token_taken_in_two_lineages_is_followed_through_the_later_one(tmp_path, ledger):
    job = Job(tmp_path)
    job.ledgers = ledger  # the verdict is the same for every name, and so for every order of sets of them
    job.restart(None)
    token = job.checkpoint(0, exact=False)
    job.restore(0, token)
    assert job.checkpoint(0, exact=False) == token
    job.restart(token)
    job.finish()
    assert one(tmp_path).inexact_tokens == 2  # that of the restart, and that of the restore before it


def test_a_chain_of_many_restores_is_followed_to_the_beginning(tmp_path):
    job = Job(tmp_path, replace(SPEC, num_epochs=50))
    for number in range(300):
        job.train_batches(2)
        job.restore(number % 2, job.checkpoint(number % 2))
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(250)  # less than a call for each restore
    try:
        verdict = one(tmp_path, unfinished=True)
    finally:
        sys.setrecursionlimit(limit)
    assert verdict.proven
    assert verdict.lineages == 301
    assert verdict.acknowledged == job.ledger.acknowledged


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


def test_of_two_lineages_that_took_the_same_token_both_must_explain_it(tmp_path):
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
    assert one(tmp_path).outcome is Outcome.PROVEN
    for lineage, ledger, log in (
        (1, "ledger1", first),
        (2, "ledger2", second),
    ):  # no log says whose checkpoint was loaded
        whole = log.path.read_text()
        row = next(line for line in whole.splitlines() if line[0].isdigit())
        log.path.write_text(whole.replace(f"{row}\n", ""))
        (contradiction,) = one(tmp_path).contradictions
        assert (
            f"also taken in lineage {lineage} of ledger {ledger}, which had not trained on 3" in contradiction
        )
        log.path.write_text(whole)


def whole_job(folder, session, **options):
    writer = Writer(folder, session, **options)
    writer.whole(1, 0)
    writer.whole(2, 1)


def test_a_token_that_disagrees_with_itself_is_refused_and_one_with_the_logs_is_a_contradiction(tmp_path):
    job = Job(tmp_path)
    job.train_batches(2)
    right = job.ledger.snapshot()
    wrong = replace(right, acknowledged=right.acknowledged + 1)
    with pytest.raises(AuditError, match=r"cannot be used: .*6 records lie before the cursor, but 7"):
        one(tmp_path, words={"training": FinalWord(token=wrong.encode())})
    wrong = replace(right, acknowledged=right.acknowledged - 1, dropped=1)
    verdict = one(tmp_path, words={"training": FinalWord(token=wrong.encode())})
    assert not verdict.proven
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


@pytest.mark.parametrize("folders", [1, 2])
@pytest.mark.parametrize("other", [{"seed": 9}, {"task_type": TaskType.EVALUATION}])
def test_other_data_or_settings_under_one_name_have_a_verdict_each(tmp_path, folders, other):
    """A loop that is left at a half, and one over other data after it, do not become one that is whole."""
    first, second = (tmp_path / str(number % folders) for number in range(2))
    Writer(first, "one", spec=replace(SMALL, **other), ledger="old").whole(1, 0)
    whole_job(second, "two")
    verdicts = {verdict.ledger: verdict for verdict in audit(sorted(tmp_path.iterdir()))}
    assert {name: verdict.outcome.label for name, verdict in verdicts.items()} == {
        "old": "REFUTED",
        "L": "PROVEN",
    }
    assert (verdicts["old"].lost, verdicts["L"].beside, verdicts["L"].trainers) == (8, ("old",), 1)
    assert any("(ledger old), and have a verdict of their own" in ground for ground in grounds(verdicts["L"]))


def test_a_position_outside_of_the_dataset_is_a_damaged_line(tmp_path):
    writer = Writer(tmp_path)
    writer.whole(1, 0)
    path = writer.log.path
    text = path.read_text()
    for wrong in ("0 0 0 9", "0 2 0 8", "0 0 8 8", "999999999999999999 0 0 8"):
        path.write_text(text.replace("0 0 0 8", wrong))
        with pytest.raises(AuditError, match="line 5, is damaged"):
            audit([tmp_path])


@pytest.mark.parametrize("unfinished", [False, True])
def test_an_acknowledgement_beyond_the_last_epoch_is_a_damaged_line(tmp_path, unfinished):
    writer = Writer(tmp_path)
    writer.whole(1, 0)
    writer.whole(2, 1)
    assert one(tmp_path, unfinished=unfinished).proven
    writer.whole(3, 1, epoch=1)
    told = "line 9, is damaged: .*, epoch 1, are not in dataset 'training', which has 1 epoch"
    with pytest.raises(AuditError, match=told):
        audit([tmp_path], unfinished=unfinished)


def test_epochs_that_an_earlier_trainer_of_the_ledger_asked_for_are_no_damage(tmp_path):
    first = Writer(tmp_path, "one", spec=replace(SMALL, num_epochs=2))
    for task in range(4):
        first.whole(task, task % 2, epoch=task // 2)
    Writer(tmp_path, "two", spec=replace(SMALL, num_epochs=1), member=2)
    verdict = one(tmp_path)
    assert (verdict.proven, verdict.num_epochs) == (True, 1)


def test_epochs_that_an_earlier_run_had_beyond_those_of_the_last_are_rolled_back(tmp_path):
    Writer(tmp_path, "one", spec=replace(SMALL, num_epochs=3), ledger="old").whole(1, 0, epoch=2)
    last = Writer(tmp_path, "two", spec=replace(SMALL, num_epochs=1))
    last.whole(1, 0)
    last.whole(2, 1)
    verdict = one(tmp_path)
    assert (verdict.proven, verdict.rolled_back) == (True, 8)


# The master's final word ------------------------------------------------------------------------------


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


# Remainders -----------------------------------------------------------------------------------------------


def test_whole_epochs_of_less_than_a_batch_are_dropped_each_by_itself(tmp_path):
    """The end of one epoch and the beginning of the next are one run of records."""
    spec = replace(SMALL, sources=(Source(name="a.csv", start=100, count=BATCH - 1),), num_epochs=4)
    writer = Writer(tmp_path, spec=spec)
    text = writer.log.path.read_text()
    remainder = {"event": "remainder", "shard": 0, "start": 0, "upto": BATCH - 1, "ms": 0}
    writer.log.path.write_text(text + "".join(f"{json.dumps({**remainder, 'epoch': n})}\n" for n in range(4)))
    verdict = one(tmp_path)
    assert (verdict.proven, verdict.dropped, verdict.lost) == (True, 4 * (BATCH - 1), 0)


def test_remainders_of_a_whole_batch_are_lost(tmp_path):
    writer = Writer(tmp_path)
    text = ""
    for task, shard, upto in ((1, 0, 6), (2, 1, 7)):
        writer.take(task, shard, 0, 8)
        writer.say(task, upto)
        remainder = {"event": "remainder", "epoch": 0, "shard": shard, "start": upto, "upto": 8, "ms": 0}
        text += f"{json.dumps(remainder)}\n"
    writer.log.path.write_text(writer.log.path.read_text() + text)
    verdict = one(tmp_path)
    assert (verdict.dropped, verdict.lost) == (0, BATCH)


# Several jobs under one name --------------------------------------------------------------------------------


OTHER = replace(SMALL, sources=(Source(name="b.csv", start=0, count=16),))


def by_ledger(folder, **options):
    return {verdict.ledger: verdict for verdict in audit([folder], **options)}


def test_a_try_on_other_data_that_the_job_did_not_go_on_from_is_left_out(tmp_path):
    """It went on from the job's token, and was thrown away: no model that came out has learnt from it."""
    job = Job(tmp_path, replace(SMALL, num_epochs=2), trainers=1)
    job.train_batches(2)
    token = job.checkpoint(0)
    spec, job.spec = job.spec, replace(OTHER, num_epochs=2)
    job.restart(Token.decode(token).onto(job.spec).encode())
    job.train_batches(2)
    job.spec = spec
    job.restart(token)
    job.train_batches(1)
    token = job.checkpoint(0)
    job.spec = replace(OTHER, num_epochs=2)
    job.restart(Token.decode(token).onto(job.spec).encode())
    job.finish()
    earlier, last = audit([tmp_path])
    assert (earlier.ledger, earlier.outcome.label, earlier.left_out) == ("ledger3", "PROVEN", {})
    assert (last.ledger, last.outcome.label, last.left_out) == ("ledger4", "PROVEN", {"ledger2": 2 * BATCH})
    assert earlier.beside == last.beside == ()


def test_a_try_on_other_data_is_a_run_of_its_own_where_nothing_tells_that_it_came_before(tmp_path):
    job = Job(tmp_path / "first", replace(SMALL, num_epochs=2), trainers=1)
    job.train_batches(2)
    token = job.checkpoint(0)
    folders = [tmp_path / name for name in ("first", "try", "again")]
    for folder, spec in zip(folders[1:], (replace(OTHER, num_epochs=2), job.spec), strict=True):
        job.directory, job.spec = folder, spec
        job.restart(Token.decode(token).onto(spec).encode())
        job.train_batches(2)
    job.finish()
    verdicts = {verdict.ledger: verdict for verdict in audit(folders)}
    assert {ledger: v.outcome.label for ledger, v in verdicts.items()} == {
        "ledger1": "PROVEN",
        "ledger2": "REFUTED",
        "ledger3": "PROVEN",
    }


def test_an_evaluation_that_begins_from_a_token_of_the_training_is_left_out(tmp_path):
    job = Job(tmp_path, SMALL, trainers=1)
    job.train_batches(2)
    token = job.checkpoint(0)
    job.spec = replace(SMALL, task_type=TaskType.EVALUATION)
    job.restart(token)
    job.train_batches(2)
    job.spec = SMALL
    job.restart(token)
    job.finish()
    (verdict,) = audit([tmp_path])
    assert (verdict.outcome, verdict.left_out) == (Outcome.PROVEN, {"ledger2": 5})


def test_a_run_that_is_like_one_that_is_like_the_last_has_a_verdict(tmp_path):
    """An unknown fingerprint is like any other, so it ties two that differ."""
    Writer(tmp_path, "one", replace(SMALL, fingerprint=PRINTS[1]), ledger="old").whole(1, 0)
    Writer(tmp_path, "two", ledger="mid").whole(1, 0)
    whole_job(tmp_path, "three", spec=replace(SMALL, fingerprint=PRINTS[2]))
    verdicts = by_ledger(tmp_path)
    assert {name: verdict.outcome.label for name, verdict in verdicts.items()} == {
        "old": "REFUTED",
        "L": "PROVEN",
    }
    assert (verdicts["L"].left_out, verdicts["L"].beside) == ({"mid": 8}, ("old",))


def look(value):
    return Fingerprint.of("sampled", (), attributes=[("data", value)]).encode()


GIVEN = Fingerprint.given("v1").encode()
OTHER_GIVEN = Fingerprint.given("v2").encode()
SAID = "changed 'data'"


def job_of_sessions(folder, looks):
    """Each loads the token of the one before, and a master of its own."""
    job = Job(folder, replace(SMALL, fingerprint=looks[0]), trainers=1)
    for fingerprint in looks[1:]:
        job.train_batches(1)
        job.spec = replace(job.spec, fingerprint=fingerprint)
        job.restart(job.checkpoint(0))
    job.finish()


def sessions_of_one_master(folder, looks):
    for place, fingerprint in enumerate(looks):
        session = Writer(folder, f"{9 - place}", replace(SMALL, fingerprint=fingerprint), member=place)
        if place < 2:
            session.whole(place, place)


@pytest.mark.parametrize("job", [job_of_sessions, sessions_of_one_master])
@pytest.mark.parametrize(
    ("looks", "said"),
    [
        ((look("a"), GIVEN, look("a")), ""),
        ((look("a"), GIVEN, look("b")), SAID),
        ((GIVEN, look("a"), OTHER_GIVEN), "fingerprint 'v1' then, 'v2' now"),
    ],
    ids=["same", "changed", "given"],
)
def test_a_change_behind_a_session_that_compared_something_else_is_named(tmp_path, job, looks, said):
    job(tmp_path, looks)
    (verdict,) = audit([tmp_path])
    assert verdict.lost == verdict.doubled == 0
    assert [said in one for one in verdict.changed] == [True] * bool(said)
    assert (verdict.outcome is Outcome.INEXACT, verdict.known_by) == (bool(said), "none")


def test_a_change_behind_a_session_that_compared_nothing_is_named(tmp_path):
    sessions_of_one_master(tmp_path, (look("a"), "", look("b")))
    (verdict,) = audit([tmp_path])
    assert [SAID in one for one in verdict.changed] == [True]


def test_a_change_of_a_component_behind_a_session_that_gave_a_word_is_named(tmp_path):
    order = {"shuffle": False, "shuffle_shards": False, "shuffle_in_shard": False, "shuffle_window": 1}
    for place, fingerprint in enumerate((look("a"), GIVEN, look("b"))):
        components = tuple(
            Component(name=name, sources=SMALL.sources, records_per_shard=8, fingerprint=its, **order)
            for name, its in (("x", look("x")), ("y", fingerprint))
        )
        weights = (MixtureWeights(start=0, parts=(1, 1)),)
        sources = (Source(name="", count=16),)
        asked = Registration(name="training", sources=sources, components=components, weights=weights)
        Writer(tmp_path, f"{place}", new_spec(asked, BATCH), member=place)
    (verdict,) = audit([tmp_path], unfinished=True)
    assert [
        one.startswith(f"component 'y': attributes of the dataset: {SAID}") for one in verdict.changed
    ] == [True]


def test_the_masters_word_on_a_start_that_learnt_nothing_hides_no_run(tmp_path):
    Writer(tmp_path, "one", replace(SMALL, seed=9), ledger="old").whole(1, 0)
    whole_job(tmp_path, "two")
    Writer(tmp_path, "three", replace(SMALL, seed=5), ledger="idle")
    verdicts = audit([tmp_path], words={"training": FinalWord(ledger="idle")})
    found = {verdict.ledger: (verdict.outcome.label, verdict.lost) for verdict in verdicts}
    assert len(verdicts) == 3
    assert found == {"old": ("REFUTED", 8), "L": ("PROVEN", 0), "idle": ("REFUTED", 16)}


def test_an_evaluation_over_data_that_the_job_has_left_is_another_job(tmp_path):
    job = Job(tmp_path, replace(SMALL, num_epochs=2), trainers=1)
    job.train_batches(6)
    token = job.checkpoint(0)
    spec, job.spec = job.spec, replace(OTHER, num_epochs=2)
    job.restart(Token.decode(token).onto(job.spec).encode())
    job.finish()
    whole = Writer(tmp_path, "z", replace(spec, num_epochs=1, task_type=TaskType.EVALUATION), ledger="z")
    whole.whole(1, 0)
    whole.whole(2, 1)
    found = {ledger: (v.task_type, v.outcome.label) for ledger, v in by_ledger(tmp_path).items()}
    assert found == {
        "ledger1": (TaskType.TRAINING, "PROVEN"),
        "ledger2": (TaskType.TRAINING, "PROVEN"),
        "z": (TaskType.EVALUATION, "DELIVERED"),
    }


def test_a_run_over_data_that_the_job_has_left_is_another_where_nothing_tells_which_came_later(tmp_path):
    job = Job(tmp_path / "job", replace(SMALL, num_epochs=2), trainers=1)
    job.train_batches(6)
    Writer(tmp_path / "alone", "a", job.spec, ledger="alone").whole(1, 0)
    token = job.checkpoint(0)
    job.spec = replace(OTHER, num_epochs=2)
    job.restart(Token.decode(token).onto(job.spec).encode())
    job.finish()
    verdicts = audit([tmp_path / "job", tmp_path / "alone"])
    found = {verdict.ledger: verdict.outcome.label for verdict in verdicts}
    assert found == {"alone": "REFUTED", "ledger1": "PROVEN", "ledger2": "PROVEN"}


PRINTS = ("", *(Fingerprint.of("whole", [("x", run)]).encode() for run in "ab"))
RUNS = st.tuples(
    st.sampled_from(PRINTS),
    st.sampled_from([0, 9]),
    st.sampled_from([TaskType.TRAINING, TaskType.EVALUATION]),
    st.integers(0, 6),  # batches that it learns
    st.sampled_from(["anew", "from the token", "onto other data"]),
    st.integers(0, 1),  # folder
)


@settings(max_examples=150, deadline=None)
@given(st.lists(RUNS, min_size=1, max_size=6), st.none() | st.integers(0, 5))
def test_no_run_that_learnt_something_is_missing_from_the_verdicts(runs, word):
    """What the audit refuses, as a token of data that no log has, hides nothing."""
    with tempfile.TemporaryDirectory() as name, suppress(AuditError):
        check_that_none_is_missing(Path(name), runs, word)


def check_that_none_is_missing(folder, runs, word):
    tokens, learnt = {}, set()
    for number, (fingerprint, seed, task_type, batches, start, where) in enumerate(runs):
        spec = replace(SMALL, fingerprint=fingerprint, seed=seed, task_type=task_type, num_epochs=3)
        job = Job(folder / str(where), spec, trainers=0)
        job.sessions, job.ledger_id = 10 * number, f"l{number}"
        job.trainers = [job.new_trainer()]
        if task_type in tokens and start != "anew":
            token = tokens[task_type].onto(spec) if start == "onto other data" else tokens[task_type]
            with suppress(TokenError):
                token.check(spec)
                job.restore(0, token.encode())
        before = job.ledger.acknowledged
        job.train_batches(batches)
        if job.ledger.acknowledged > before:
            learnt.add(job.ledger_id)
        tokens[task_type] = Token.decode(job.checkpoint(0))
    words = {} if word is None else {"training": FinalWord(ledger=f"l{word % len(runs)}")}
    found = set()
    for judgement in judge(sorted(folder.iterdir()), words=words):
        found |= {part.lineage.key[0] for part in judgement.era.parts} | judgement.verdict.left_out.keys()
    assert learnt <= found
