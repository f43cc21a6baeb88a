"""The journal settles what a kill cut off between a report and its answer; numbers get names again."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
from audited_job import BATCH, SPEC, KeptJob
from hypothesis import given
from hypothesis import strategies as st

from edl_torch.audit import findings
from edl_torch.audit.chain import final_words
from edl_torch.audit.findings import name_records
from edl_torch.audit.intervals import Coordinates, Intervals
from edl_torch.audit.verdict import Outcome, audit
from edl_torch.cli.main import main
from edl_torch.core.plan import Plan
from edl_torch.core.registration import new_spec
from edl_torch.errors import AuditError
from edl_torch.master.journal import FILE, VERSION, Journal, view
from edl_torch.shard import Component, DatasetSpec, MixtureWeights, Registration, Slice, Source


@pytest.fixture
def job(tmp_path):
    job = KeptJob(tmp_path)
    yield job
    job.close()


def by_journal(job, **options):
    (verdict,) = audit([job.directory], words=lambda: final_words(view(job.state)), **options)
    return verdict


def by_logs(job, **options):
    (verdict,) = audit([job.directory], **options)
    return verdict


def test_a_journal_that_went_back_has_no_word(job):
    job.train_batches(3)
    job.keep()
    dispatcher = view(job.state)
    dispatcher.rollback.suspend("a test says so")
    with pytest.raises(AuditError, match="trainers were told, and 'training' is suspended"):
        final_words(dispatcher)


# What it settles -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heard", [True, False])
@pytest.mark.parametrize("given_up", [True, False])
def test_a_job_stopped_at_a_cut_off_report_counts_what_the_master_heard(job, heard, given_up):
    job.train_batches(3)
    before = job.ledger.acknowledged
    job.fetch(job.trainers[0])
    job.cut_off(0, heard=heard)
    if given_up:
        job.take_over(0)
    job.keep()
    verdict = by_journal(job, unfinished=True)
    assert verdict.outcome is Outcome.UNFINISHED
    assert verdict.acknowledged == job.ledger.acknowledged
    assert (verdict.acknowledged > before) == heard
    assert verdict.open == SPEC.size - job.ledger.acknowledged
    assert by_logs(job, unfinished=True).acknowledged == before + BATCH  # the logs alone must assume it


@pytest.mark.parametrize("heard", [True, False])
def test_a_job_whose_last_report_was_not_heard_is_not_proven(tmp_path, heard):
    job = KeptJob(tmp_path, replace(SPEC, sources=(Source(name="a.csv", start=5, count=BATCH),)))
    job.fetch(job.trainers[0])
    job.cut_off(0, heard=heard)
    job.keep()
    job.close()
    assert by_logs(job).proven
    verdict = by_journal(job)
    assert verdict.proven == heard
    assert verdict.records == BATCH
    lost = [f.records for f in verdict.findings if f.kind == "lost"]
    assert [(r.name, r.start, r.end) for r in lost] == ([] if heard else [("a.csv", 5, 5 + BATCH)])
    assert by_journal(job, unfinished=True).open == (0 if heard else BATCH)


def test_what_one_had_acknowledged_unanswered_and_another_trained_on_again_is_doubled(tmp_path):
    with closing(KeptJob(tmp_path, trainers=1)) as job:  # who is alone is lent more than a batch
        (victim,) = job.trainers
        job.fetch(victim)
        other = job.new_trainer()
        job.cut_off(0, heard=True)
        task, (grant, _, _) = next(iter(victim.held.items()))
        other.log.granted(replace(grant, task=1000))
        done = replace(grant.slice, limit=BATCH)
        other.held[1000] = [replace(grant, task=1000), done.skip, done.stop]
        job.tell = lambda *_: []  # a master that accepts it by mistake
        job.train(other)
        job.keep()
        assert job.ledger.leases.find(task).done == done.stop
        assert by_journal(job, unfinished=True).doubled == BATCH
        assert by_logs(job, unfinished=True).doubled == 0


def test_bad_records_and_remainders_are_settled_too(tmp_path):
    job = KeptJob(tmp_path, trainers=1)
    job.fetch(job.trainers[0])
    job.quarantine(job.trainers[0])
    job.cut_off(0, heard=True)
    job.keep()
    job.close()
    verdict = by_journal(job, unfinished=True)
    assert (verdict.outcome, verdict.quarantined) == (Outcome.UNFINISHED, 1)
    assert verdict.acknowledged == job.ledger.acknowledged == BATCH


# What it refuses -------------------------------------------------------------------------------------------


def refused(job, capsys, state):
    assert main(["audit", str(job.directory), "--state", str(state)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("edl-torch: error: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_a_job_that_goes_on_is_refused(job):
    job.train_batches(2)
    job.keep()
    looks = []

    def look():
        looks.append(final_words(view(job.state)))
        job.train_batches(1)
        job.keep()
        return looks[-1]

    with pytest.raises(AuditError, match="the job went on while its logs were read"):
        audit([job.directory], words=look)
    assert len(looks) == 2


def test_the_journal_of_another_job_is_refused(job, tmp_path, capsys):
    other = KeptJob(tmp_path / "other")
    other.finish()
    other.keep()
    other.close()
    said = refused(job, capsys, other.state)
    assert other.ledger_id in said
    assert job.ledger_id in said


def test_a_journal_without_the_dataset_of_the_logs_is_refused(job, tmp_path, capsys):
    with closing(Journal(tmp_path / "fresh")):
        pass
    assert "the master has no dataset 'training'" in refused(job, capsys, tmp_path / "fresh")


@pytest.mark.parametrize("forgotten", ["restore in the logs", "restore in the journal"])
def test_another_lineage_is_refused(job, capsys, forgotten):
    if forgotten == "restore in the logs":
        job.ledger.restore(None)
        job.keep()
    else:
        job.keep()
        job.restore(0, None)
    assert "lineage" in refused(job, capsys, job.state)


def change(state, statement):
    with closing(sqlite3.connect(state / FILE, isolation_level=None)) as connection:
        connection.execute(statement)


def newer(state):
    change(state, "PRAGMA user_version = 99")


def damaged(state):
    change(state, """DELETE FROM state WHERE key LIKE '["head"%'""")


def foreign(state):
    (state / FILE).unlink()
    change(state, "CREATE TABLE people (name TEXT)")


def rubbish(state):
    (state / FILE).write_bytes(b"no database at all, but long enough to have a header" * 9)


def empty(state):
    (state / FILE).write_bytes(b"")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (shutil.rmtree, f"there is no journal ({FILE}) in"),
        (newer, f"has version 99, this edl-torch knows {VERSION}: use the edl-torch that wrote it"),
        (foreign, "a database of something else"),
        (rubbish, "cannot read the journal"),
        (empty, "a database of something else"),
        (damaged, "is damaged"),
    ],
)
def test_what_is_no_journal_is_refused_and_left_as_it_is(job, capsys, spoil, said):
    job.train_batches(1)
    job.keep()
    job.close()
    spoil(job.state)
    before = job.state.exists() and (job.state / FILE).read_bytes()
    assert said in refused(job, capsys, job.state)
    assert (job.state.exists() and (job.state / FILE).read_bytes()) == before


# How it looks ----------------------------------------------------------------------------------------------


def test_looking_leaves_a_journal_that_nobody_uses_as_it_is(job):
    job.train_batches(3)
    job.keep()
    job.close()
    before = {path.name: path.read_bytes() for path in job.state.iterdir()}
    assert view(job.state).find_ledger("training").acknowledged == job.ledger.acknowledged
    assert {path.name: path.read_bytes() for path in job.state.iterdir()} == before


def test_what_a_killed_master_left_in_the_log_is_read(job, tmp_path):
    job.train_batches(3)
    job.keep()
    shutil.copytree(job.state, tmp_path / "left")  # the master never closed it
    assert (tmp_path / "left" / f"{FILE}-wal").stat().st_size > 0
    job.finish()
    found = view(tmp_path / "left").find_ledger("training")
    assert 0 < found.acknowledged < job.ledger.acknowledged


def test_looking_keeps_no_master_from_starting_or_writing(job):
    job.train_batches(3)
    job.keep()
    view(job.state)
    job.train_batches(2)
    job.keep()
    job.close()
    view(job.state)
    with closing(Journal(job.state)) as again:
        assert again.ledger_id == job.ledger_id
    assert view(job.state).find_ledger("training").acknowledged == job.ledger.acknowledged


def test_names_that_are_no_unicode_are_read_back(tmp_path):
    odd = "caf\udce9.csv"
    job = KeptJob(tmp_path, replace(SPEC, sources=(Source(name=odd, count=9),)))
    job.keep()
    job.close()
    assert view(job.state).find_ledger("training").spec.sources[0].name == odd


# Numbers back to names --------------------------------------------------------------------------------------


SOURCES = (Source(name="a", start=5, count=20), Source(name="empty", count=0), Source(name="b", count=5))
ORDERS = [
    {},
    {"shuffle_in_shard": True},
    {"shuffle": True},
    {"shuffle_shards": True, "shuffle_in_shard": True},
]
WINDOWED = [
    {"shuffle_in_shard": True, "shuffle_window": 2},
    {"shuffle_shards": True, "shuffle_in_shard": True, "shuffle_window": 2},
    {"shuffle_shards": True, "shuffle_in_shard": True, "shuffle_window": 100},
]


def make(**order) -> Coordinates:
    return Coordinates(DatasetSpec(name="d", sources=SOURCES, records_per_shard=8, seed=3, **order))


def every_record(plan: Plan, epochs: int) -> list[tuple[int, str, int]]:
    """Epoch, name and index of each number on the line, by the plan alone."""
    windows = [(e, w) for e in range(epochs) for w in plan.windows_at(e, 0, plan.num_windows)]
    slices = [Slice(epoch=e, shard=w, skip=0, limit=plan.records_in(e, w)) for e, w in windows]
    return [(cut.epoch, *pair) for cut in slices for pair in plan.indices(cut)]


@pytest.mark.parametrize("order", ORDERS + WINDOWED)
@given(chosen=st.sets(st.integers(0, 74)))
def test_ranges_are_the_records_that_the_plan_has_there(order, chosen):
    line = make(**order)
    records = every_record(line.plan, 3)
    ranges = name_records(line.plan, Intervals.of([(one, one + 1) for one in chosen]), 1000)
    named = [(r.epoch, r.name, index) for r in ranges for index in range(r.start, r.end)]
    assert sorted(named) == sorted(records[number] for number in chosen)
    keys = [(r.epoch, "ab".index(r.name), r.start) for r in ranges]
    assert keys == sorted(keys)
    ends = {(r.epoch, r.name, r.end) for r in ranges}
    assert not ends & {(r.epoch, r.name, r.start) for r in ranges}  # nothing that touches is apart


@given(chosen=st.sets(st.integers(0, 39)))
def test_records_of_a_mixture_have_the_names_of_their_components_and_their_passes(chosen):
    order = {"shuffle_shards": True, "shuffle_in_shard": True, "shuffle_window": 1}
    components = tuple(
        Component(name=name, sources=SOURCES, records_per_shard=8, shuffle=False, **order) for name in "ac"
    )
    weights = (MixtureWeights(start=0, parts=(1, 2)),)
    sources = (Source(name="", count=40),)
    spec = new_spec(Registration(name="m", sources=sources, components=components, weights=weights), 4)
    plan = Plan(spec)
    indices = [plan.indices(cut) for cut in plan.slices(0, 40)]
    turns = [turn for part in indices for turn in part.passes.tolist()]
    records = [(turn, *record) for turn, record in zip(turns, chain.from_iterable(indices), strict=True)]
    ranges = name_records(plan, Intervals.of([(one, one + 1) for one in chosen]), 1000)
    named = {(r.epoch, r.name, index) for r in ranges for index in range(r.start, r.end)}
    assert named == {records[number] for number in chosen}


@pytest.mark.parametrize("order", ORDERS + WINDOWED)
def test_whole_epochs_are_one_range_a_source(order):
    ranges = name_records(make(**order).plan, Intervals.run(25, 75), 10)
    assert [(r.epoch, r.name, r.start, r.end) for r in ranges] == [
        (1, "a", 5, 25),
        (1, "b", 0, 5),
        (2, "a", 5, 25),
        (2, "b", 0, 5),
    ]


@pytest.mark.parametrize("order", ORDERS + WINDOWED)
def test_a_million_epochs_of_loss_are_named_at_once(order):
    ranges = name_records(make(**order).plan, Intervals.run(7, 25 * 1_000_000), 3)
    assert len(ranges) == 3


def test_few_shuffled_records_are_looked_up_of_many(monkeypatch):
    monkeypatch.setattr(findings, "MOST_LOOKED_UP", 4)
    ranges = name_records(make(shuffle=True).plan, Intervals.run(0, 24), 100)
    assert sum(map(len, ranges)) == 4


@pytest.mark.parametrize("order", ORDERS + WINDOWED)
def test_the_line_is_that_of_the_plan(order):
    line = make(**order)
    plan = line.plan
    windows = [(e, w) for e in range(3) for w in plan.windows_at(e, 0, plan.num_windows)]
    lengths = [plan.records_in(*window) for window in windows]
    firsts = [25 * e + plan.records_before(e, plan.window_position(e, w)) for e, w in windows]
    epochs, numbers = np.array(windows).T
    assert [part.tolist() for part in line.windows(epochs, numbers)] == [firsts, lengths]
    assert line.window_starts(np.arange(75)).tolist() == np.repeat(firsts, lengths).tolist()
    for epoch, shard in ((e, s) for e in range(3) for s in range(plan.num_shards + 3)):
        if (epoch, shard) not in windows:
            assert line.windows(np.array([epoch]), np.array([shard]))[1].tolist() == [0]


def test_more_than_64_bits_of_records_are_refused():
    line = Coordinates(
        DatasetSpec(name="d", sources=(Source(name="", count=2**61),), records_per_shard=2**50)
    )
    line.check_epochs(3)
    with pytest.raises(AuditError, match="5 epoch"):
        line.check_epochs(5)
