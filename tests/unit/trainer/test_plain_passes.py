"""Passes of a plain DataLoader and of `fetch_shard`: who takes part in which, and what reports prove."""

from __future__ import annotations

import pytest
from trainer_kit import Delivered, Master, Shell, back, reports_of

from edl_torch.errors import AccountingError, InvalidArgument
from edl_torch.trainer.foreign_loop import NO_PASS, OWN_STREAM, Reading
from edl_torch.trainer.vocabulary import Voided

# Who takes part ---------------------------------------------------------------------------------------------


def test_a_late_worker_does_not_bring_back_a_pass_that_a_restore_ended(shell: Shell) -> None:
    shell.begin_plain("worker 0", "7", 1)
    shell.run(shell.trainer.position.restore(None))
    assert shell.begin_plain("worker 1", "7", 1) == NO_PASS
    assert shell.begin_plain("worker 0", "7", 2) != NO_PASS


def test_a_late_worker_does_not_end_an_elastic_pass(shell: Shell) -> None:
    shell.begin_plain("worker 0", "7", 1)
    number = shell.run(shell.trainer.open())
    assert shell.begin_plain("worker 1", "7", 1) == NO_PASS
    assert shell.elastic.is_open(number)


def test_workers_of_an_older_iteration_get_nothing_though_none_of_them_began_before(shell: Shell) -> None:
    number = shell.begin_plain("worker 0", "i7", 1, number=7, newest=9)
    assert shell.begin_plain("worker 0", "i6", 1, number=6, newest=9) == NO_PASS
    assert shell.begin_plain("worker 1", "i7", 1, number=7, newest=9) == number
    assert shell.begin_plain("worker 0", "i6", 2, number=6, newest=9) > number  # persistent ones begin again
    own = shell.begin_plain(OWN_STREAM, newest=9)
    assert shell.begin_plain("worker 0", "i9", 1, number=9, newest=9) == NO_PASS
    assert shell.begin_plain("worker 0", "i10", 1, number=10, newest=10) > own


def test_the_first_iteration_of_all_may_be_an_older_one(shell: Shell) -> None:
    shell.begin_plain("worker 0", "i2", 1, number=2)
    assert shell.begin_plain("worker 0", "i1", 1, number=1) == NO_PASS


def test_one_pass_begins_at_a_time(shell: Shell) -> None:
    """Workers of one iteration arrive together: the second joins the pass that the first one begins."""
    shell.begin_plain("worker 0", "7", 1)
    shell.draw("worker 0")
    first = shell.start(shell.trainer.begin_plain(Reading(stream="worker 0", run="7", begun=2))).to("report")
    second = shell.start(shell.trainer.begin_plain(Reading(stream="worker 1", run="7", begun=2)))
    assert second.must_wait
    number, plan = first.finish()
    assert second.finish() == (number, plan)


def test_a_worker_whose_iteration_was_given_up_while_it_waited_gets_nothing(shell: Shell) -> None:
    shell.begin_plain("worker 0", "7", 1)
    shell.draw("worker 0")
    first = shell.start(shell.trainer.begin_plain(Reading(stream="worker 0", run="8", begun=1, number=8)))
    first.to("report")
    second = shell.start(shell.trainer.begin_plain(Reading(stream="worker 1", run="6", begun=1, number=6)))
    assert second.must_wait
    first.finish()
    assert second.finish()[0] == NO_PASS


def test_a_pass_begins_with_none_of_the_leases_of_the_one_before(shell: Shell) -> None:
    """The one before may have been opened while this one waited to begin."""
    shell.begin_elastic()
    assert shell.state.supply.ready == 1
    shell.run(shell.trainer.plain.begin(Reading(stream=OWN_STREAM)))
    assert shell.state.supply.ready == 0


# Reports ----------------------------------------------------------------------------------------------------


def test_reports_outside_a_pass_prove_nothing(master: Master, shell: Shell) -> None:
    assert shell.report() == 0
    shell.begin_plain()
    shell.draw()
    shell.run(shell.trainer.plain.finish(abandoned=True))
    assert shell.report() == 0
    assert shell.state.inflight.records == 0
    assert master.status.acknowledged == 0
    assert shell.warnings == []


def test_reported_batches_and_their_records_are_measured(shell: Shell) -> None:
    shell.begin_plain()
    shell.draw()
    shell.report()
    shell.report(3)
    measures = shell.state.measuring.measures()
    assert (measures.batches, measures.records) == (2, 7)


def test_with_another_reader_only_leases_bound_the_reports(shell: Shell) -> None:
    """What it hands on cannot be seen."""
    shell.begin_plain("process 1", deliveries=Delivered(4))
    shell.draw("process 1")
    with pytest.raises(AccountingError):
        shell.report()
    shell.begin_plain("worker 0", "7", 1, deliveries=Delivered(4))
    shell.draw("worker 0")
    with pytest.raises(AccountingError):
        shell.report()
    assert shell.begin_plain("process 2") == shell.state.supply.current.number
    assert shell.report() == 0


def test_a_batch_that_could_not_be_trained_on_goes_to_quarantine(master: Master, shell: Shell) -> None:
    shell.begin_plain()
    shell.draw()
    shell.report()
    shell.run(shell.trainer.fail_batch(None, "NaN"))
    assert master.status.quarantined == 4
    assert [failure.position for failure in reports_of(master)[-1].failures] == [4, 5, 6, 7]
    assert not shell.state.inflight


def test_of_several_workers_no_batch_can_be_named(shell: Shell) -> None:
    shell.begin_plain("worker 0", "7", 1)
    shell.begin_plain("worker 1", "7", 1)
    shell.draw("worker 0")
    shell.draw("worker 1")
    with pytest.raises(InvalidArgument, match="err_msg cannot name its records"):
        shell.run(shell.trainer.fail_batch(None, "NaN"))


def test_leases_taken_back_end_the_pass(master: Master) -> None:
    """Batches of them are on their way, and a report does not say which one it means."""
    master = Master(progress_timeout_s=30.0, lease_timeout_s=600.0)
    shell = Shell(master)
    shell.begin_plain()
    first = shell.draw()
    shell.draw()
    released = master.stall()
    assert released
    shell.report()
    assert not shell.state.supply.current.is_open
    assert shell.told(Voided)[0].runs[0] == (first.task, 4, 8)
    assert shell.next() is None


def test_after_a_report_the_next_batch_is_sure(master: Master) -> None:
    """The loop takes it without asking here."""
    shell = Shell(master)
    shell.begin_plain()
    shell.draw()
    shell.break_stream()
    shell.report()
    assert len(master.of("confirm")) == 1
    assert shell.liveness.progress == 1


# The end of a pass ------------------------------------------------------------------------------------------


def read_all(shell: Shell) -> None:
    shell.begin_plain()
    while shell.next() is not None:
        pass


def test_what_was_not_reported_is_read_again_with_a_warning(master: Master, shell: Shell) -> None:
    read_all(shell)
    assert shell.trainer.plain.owed == 64
    shell.report()
    assert shell.trainer.plain.owed == 60
    shell.begin_plain()
    assert shell.trainer.plain.owed == 0
    (warning,) = shell.warnings
    assert "a pass over 'training' ended with 60 record(s) that were not reported as trained on" in warning
    assert (master.status.leased, master.status.acknowledged) == (0, 4)
    assert reports_of(master)[-1].give_backs[0] == back(1, 4)


def test_a_pass_owes_nothing_for_the_end_of_the_one_before(shell: Shell) -> None:
    read_all(shell)
    shell.begin_plain()
    shell.draw()
    assert shell.trainer.plain.owed == 0


def test_three_silent_passes_in_a_row_are_an_error(shell: Shell) -> None:
    for _ in range(3):
        read_all(shell)
    with pytest.raises(AccountingError, match=r"3 passes over 'training' went by without a report, and 64"):
        shell.begin_plain()
    assert len(shell.warnings) == 2


@pytest.mark.parametrize("between", ["report", "sized report", "abandon", "unread"])
def test_a_pass_that_is_not_silent_ends_the_row(shell: Shell, between: str) -> None:
    read_all(shell)
    read_all(shell)
    if between == "report":
        read_all(shell)
        shell.report()
    elif between == "sized report":
        read_all(shell)
        shell.report(3)
    elif between == "abandon":
        read_all(shell)
        shell.run(shell.trainer.plain.finish(abandoned=True))
    else:
        shell.begin_plain()
    read_all(shell)
    read_all(shell)
    shell.begin_plain()


def test_an_abandoned_pass_warns_of_nothing(master: Master, shell: Shell) -> None:
    read_all(shell)
    shell.run(shell.trainer.plain.finish(abandoned=True))
    assert shell.warnings == []
    assert master.status.leased == 0
    assert not shell.state.supply.current.is_open


def test_finishing_twice_finishes_once(shell: Shell) -> None:
    for passes in (1, 2):
        read_all(shell)
        for _ in range(2):
            shell.run(shell.trainer.plain.finish())
        assert len(shell.warnings) == passes
    read_all(shell)
    with pytest.raises(AccountingError, match="3 passes"):  # in a row, with nothing between
        shell.run(shell.trainer.plain.finish())
