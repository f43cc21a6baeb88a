"""Which of several runs is judged: tokens and the folder say it, and no clock does."""

from __future__ import annotations

import pytest
from audited_job import Job
from verdict_kit import SMALL, Writer, one

from edl_torch.audit import log
from edl_torch.audit.chain import FinalWord
from edl_torch.audit.log import LEDGERS
from edl_torch.audit.verdict import Outcome, audit
from edl_torch.cli.main import main


@pytest.fixture
def clock(monkeypatch):
    """The clock of the machines: the first run's is an hour ahead."""
    times = {"now": 10_000.0}
    monkeypatch.setattr(log.time, "time", lambda: times["now"])
    return times


def whole(folder, session, ledger):
    writer = Writer(folder, session, ledger=ledger)
    writer.whole(1, 0)
    writer.whole(2, 1)


def half(folder, session, ledger):
    Writer(folder, session, ledger=ledger).whole(1, 0)


@pytest.mark.parametrize("folders", [1, 2])
def test_a_run_that_began_from_a_token_is_later_whatever_clocks_say(tmp_path, clock, folders):
    job = Job(tmp_path / "0", SMALL, trainers=1)
    job.train_batches(2)
    token = job.checkpoint(0)
    clock["now"] -= 3600
    job.directory = tmp_path / str(folders - 1)
    job.restart(token)
    job.finish()
    (verdict,) = audit(sorted(tmp_path.iterdir()))
    assert (verdict.outcome, verdict.ledger) == (Outcome.PROVEN, "ledger2")


@pytest.mark.parametrize(("first", "second"), [(half, whole), (whole, half)])
def test_of_two_runs_in_one_folder_the_later_is_judged_whatever_clocks_say(tmp_path, clock, first, second):
    first(tmp_path, "yesterday", "b")
    clock["now"] -= 3600
    second(tmp_path, "today", "a")
    verdict = one(tmp_path)
    assert (verdict.ledger, verdict.outcome) == ("a", Outcome.PROVEN if second is whole else Outcome.REFUTED)


def test_runs_that_nothing_ties_are_inexact_and_the_journal_tells(tmp_path, capsys):
    whole(tmp_path / "one", "s", "a")
    whole(tmp_path / "two", "t", "b")
    folders = [tmp_path / "one", tmp_path / "two"]
    (verdict,) = audit(folders)
    assert (verdict.outcome, sorted(verdict.unordered)) == (Outcome.INEXACT, ["a", "b"])
    assert main(["audit", *map(str, folders)]) == 3
    assert "2 runs lie here (a, b), and no token ties them" in capsys.readouterr().out
    (known,) = audit(folders, words={"training": FinalWord(ledger="a")})
    assert (known.outcome, known.ledger) == (Outcome.PROVEN, "a")


def test_a_run_that_goes_on_after_another_one_has_no_order(tmp_path):
    whole(tmp_path, "s", "a")
    half(tmp_path, "t", "b")
    Writer(tmp_path, "again", ledger="a")
    assert (tmp_path / LEDGERS).read_text() == "a\nb\na\n"
    assert one(tmp_path).outcome in (Outcome.INEXACT, Outcome.REFUTED)
    assert len(one(tmp_path).unordered) == 2


def test_an_empty_ledger_that_nobody_went_on_from_is_no_run(tmp_path):
    whole(tmp_path / "one", "s", "a")
    Writer(tmp_path / "two", "t", ledger="b")
    (verdict,) = audit([tmp_path / "one", tmp_path / "two"])
    assert (verdict.outcome, verdict.ledger) == (Outcome.PROVEN, "a")


def test_a_token_that_a_later_run_took_as_well_ties_nothing_to_it(tmp_path):
    """Another run, begun anew, was at the same position, and so had the same token."""
    job = Job(tmp_path, SMALL, trainers=1)
    job.train_batches(2)
    token = job.checkpoint(0)
    job.restart(token)
    job.finish()
    job.restart(None)
    job.train_batches(2)
    assert job.checkpoint(0) == token
    job.finish()
    assert (one(tmp_path).outcome, one(tmp_path).ledger) == (Outcome.PROVEN, "ledger3")
