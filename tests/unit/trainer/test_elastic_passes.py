"""Passes of an `ElasticDataLoader`: what goes to the loop, what counts as trained on, and what goes back."""

from __future__ import annotations

import pytest
from trainer_kit import Master, Shell, back, reports_of, whole

from edl_torch.core.calls import NEW_PASS, Grant
from edl_torch.errors import AccountingError, InvalidArgument, MasterUnavailable, StaleLease
from edl_torch.trainer.vocabulary import Evidence, Logged, Loop, Reporting, StepShown, Voided, Warn


def acknowledged(master: Master) -> list[tuple[int, int]]:
    return [(done.task, done.upto) for call in reports_of(master) for done in call.acknowledgements]


def given_back(master: Master) -> list[tuple[int, int]]:
    return [(gone.task, gone.start) for call in reports_of(master) for gone in call.give_backs]


def hand_next(shell: Shell) -> Grant:
    """The loop asks for a batch, and gets a whole lease."""
    shell.request()
    grant = shell.draw()
    assert shell.hand(grant)
    return grant


def ways(shell: Shell) -> list[int]:
    return [fact.way for fact in shell.told(Reporting) if fact.acknowledgements]


# What counts as trained on ----------------------------------------------------------------------------------


def test_a_padding_batch_has_no_records_to_fail(master: Master, shell: Shell) -> None:
    shell.begin_elastic()
    hand_next(shell)
    shell.request()
    shell.elastic.pad()
    shell.run(shell.trainer.fail_batch(None, "NaN"))
    assert master.status.quarantined == 0
    assert shell.elastic.discarded == 0
    assert len(shell.elastic.records_in_hand()) == 0


def test_the_records_in_hand_have_names_and_numbers(shell: Shell) -> None:
    assert len(shell.elastic.records_in_hand()) == 0
    shell.begin_elastic()
    assert len(shell.elastic.records_in_hand()) == 0
    first, second = shell.draw(), shell.draw()
    assert shell.run(shell.elastic.hand(((first.task, 0, 2),)))
    shell.request()
    assert shell.run(shell.elastic.hand(((first.task, 2, 8), (second.task, 0, 3))))
    assert list(shell.elastic.records_in_hand()) == [("a", number) for number in range(2, 11)]


# The end of a pass ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("looks", [True, False])
def test_a_loop_that_is_left_between_batches_gives_back_what_was_drawn(
    master: Master, shell: Shell, looks: bool
) -> None:
    number = shell.run(shell.trainer.open())
    assert shell.run(shell.elastic.look_for_more() if looks else shell.elastic.more_to_read())
    shell.draw()
    shell.run(shell.elastic.close(number))
    assert given_back(master) == [(1, 0)]


def test_a_padding_batch_is_in_hand_in_the_place_of_those_before(master: Master, shell: Shell) -> None:
    number = shell.begin_elastic()
    shell.state.batches.attach()
    hand_next(shell)
    shell.request()
    shell.elastic.pad()
    shell.run(shell.elastic.close(number))
    assert given_back(master) == []
    assert shell.elastic.discarded == 0


def test_a_loop_whose_last_question_failed_has_no_batch_in_hand(master: Master, shell: Shell) -> None:
    """It has asked after the last batch: that one waits for a step, and does not go back."""
    number = shell.begin_elastic()
    optimizer = shell.state.batches.attach()
    hand_next(shell)
    shell.request()
    master.errors = [MasterUnavailable("away")]
    with pytest.raises(MasterUnavailable):
        shell.run(shell.elastic.look_for_more())
    shell.run(shell.elastic.close(number))
    assert given_back(master) == []
    assert shell.elastic.phase is Loop.IDLE
    shell.run(shell.elastic.stepped(optimizer))
    assert acknowledged(master) == [(1, 8)]


def test_a_pass_begins_with_none_of_the_leases_of_one_that_was_opened_meanwhile(shell: Shell) -> None:
    number = shell.begin_elastic()
    hand_next(shell)
    shell.run(shell.elastic.close(number))
    opening = shell.start(shell.trainer.open()).to(Warn)  # of the batch that went back
    shell.begin_plain("worker 0", "7", 1)
    assert shell.run(shell.trainer.leasing.look_for_more())
    opening.finish()
    assert shell.state.supply.ready == 0


def test_what_the_end_of_an_abandoned_pass_raises_is_raised_later(master: Master, shell: Shell) -> None:
    number = shell.begin_elastic()
    hand_next(shell)
    master.errors = [StaleLease("another lineage")]
    shell.run(shell.elastic.end_abandoned(number))
    assert not shell.elastic.is_open(number)
    with pytest.raises(StaleLease):
        shell.run(shell.trainer.reporter.flush())


# More to read -----------------------------------------------------------------------------------------------


def test_what_was_drawn_and_no_batch_brought_goes_back_before_the_verdict(
    master: Master, shell: Shell
) -> None:
    shell.begin_elastic()
    hand_next(shell)
    shell.draw()
    assert shell.run(shell.elastic.look_for_more())
    assert given_back(master) == [(2, 0)]
    assert master.of("lease")[-1].drained


def train_without_the_last_step(shell: Shell, epochs: int) -> None:
    """Train on two batches of 8 in each epoch; the optimizer does not step on the last one."""
    optimizer = shell.state.batches.attach("sgd")
    left = 2 * epochs
    for _ in range(epochs):
        number = shell.begin_elastic()
        while shell.run(shell.elastic.more_to_read()):
            while (grant := shell.next()) is not None:
                assert shell.hand(grant)
                left -= 1
                if left:
                    shell.run(shell.elastic.stepped(optimizer))
                shell.request()
        shell.run(shell.elastic.close(number))


@pytest.mark.parametrize(("epochs", "next_one"), [(1, NEW_PASS), (1, 1), (2, NEW_PASS), (2, 2)])
def test_batches_without_a_step_count_where_all_epochs_are_read(epochs: int, next_one: int) -> None:
    shell = Shell(Master(records=16, num_epochs=epochs), batch_size=8, attended=False)
    train_without_the_last_step(shell, epochs)
    assert shell.master.status.acknowledged == 16 * epochs - 8
    shell.run(shell.trainer.open(next_one))
    assert not shell.run(shell.elastic.more_to_read())
    assert shell.master.status.finished
    assert ways(shell)[-1] is Evidence.UNSTEPPED
    assert shell.warnings[-1].startswith("8 record(s) of 'training' were handed out after the last optimizer")
    assert len(shell.state.batches) == 0


@pytest.mark.parametrize("num_epochs", [3, 0])
def test_batches_without_a_step_do_not_count_where_an_epoch_follows(num_epochs: int) -> None:
    shell = Shell(Master(records=16, num_epochs=num_epochs), batch_size=8, attended=False)
    train_without_the_last_step(shell, 2)
    shell.run(shell.trainer.open(1))
    with pytest.raises(AccountingError, match="nothing else is left"):
        shell.run(shell.elastic.more_to_read())


def test_batches_without_a_step_do_not_count_where_the_master_does_not_tell_of_the_end() -> None:
    """Others may give records back, and epochs may follow."""
    shell = Shell(Master(records=16), batch_size=8, keeps_ledger=False, attended=False)
    train_without_the_last_step(shell, 1)
    shell.run(shell.trainer.open())
    with pytest.raises(AccountingError, match="nothing else is left"):
        shell.run(shell.elastic.more_to_read())


def test_a_partial_batch_goes_back_as_a_remainder(master: Master, shell: Shell) -> None:
    shell.begin_elastic()
    grant = shell.draw()
    shell.run(shell.elastic.return_remainder(((grant.task, 0, 8),)))
    assert reports_of(master)[-1].give_backs == (back(grant.task, 0, remainder=True),)


# Promises ---------------------------------------------------------------------------------------------------


def test_a_promise_that_was_lost_meanwhile_is_not_delivered(shell: Shell) -> None:
    shell.begin_elastic()
    grant = shell.draw()
    assert shell.run(shell.elastic.promise(whole(grant), 0))
    shell.state.void((grant.task,))
    assert not shell.elastic.deliver(whole(grant))
    assert shell.elastic.phase is Loop.ASKING
    assert not shell.run(shell.elastic.promise(whole(grant), 0))


@pytest.mark.parametrize("window", [False, True])
def test_a_batch_goes_back_though_a_promised_one_is_of_its_lease(
    master: Master, shell: Shell, window: bool
) -> None:
    """Other ranks rely on the promised one."""
    shell.begin_elastic()
    grant = shell.draw()
    first, second = ((grant.task, 0, 4),), ((grant.task, 4, 8),)
    shell.state.batches.attach()
    assert shell.at_once(shell.elastic.hand(first))
    assert shell.run(shell.elastic.promise(second, 0))
    shell.run(shell.elastic.give_back(window=window))
    assert reports_of(master)[-1].give_backs == (back(grant.task, 0, 4),)
    shell.request()
    assert shell.elastic.deliver(second)
    shell.run(shell.elastic.give_back())
    assert reports_of(master)[-1].give_backs == (back(grant.task, 4),)


# Taken back -------------------------------------------------------------------------------------------------


def test_leases_that_were_taken_back_are_told_and_not_drawn_again(remote: Shell) -> None:
    remote.begin_elastic()
    for stream in ("worker 0", "worker 1"):
        remote.draw(stream)
    remote.work()
    ready = remote.state.supply.ready
    assert ready
    tasks = tuple(task for task, _ in remote.state.inflight.leases())
    remote.state.void(tasks)
    assert remote.state.supply.ready == 0
    assert remote.told(Logged)[-1].text == f"dataset training: {len(tasks)} lease(s) were taken back"
    assert remote.told(Voided) == []
    assert remote.elastic.is_open(1)
    remote.state.check()


def test_that_a_batch_was_learnt_in_several_steps_is_noted_once(shell: Shell) -> None:
    shell.begin_elastic()
    assert shell.hand(shell.draw())
    batch = shell.state.batches.in_hand
    assert batch is not None
    for _ in range(3):
        shell.elastic.learnt_in_several_steps([batch])
    (shown,) = shell.told(StepShown)
    assert [run for run, _ in shown.runs] == list(batch.ticket)
    assert shown.what == "several"


# Calls of a loop that need no master, and what it is warned of ----------------------------------------------


# A wrapper that tells ---------------------------------------------------------------------------------------


def test_what_a_wrapper_holds_when_its_trainer_is_given_up_is_passed_on_before_what_comes_after(
    master: Master,
) -> None:
    """Else a step on a batch that is void acknowledges one that the wrapper still has."""
    shell = Shell(master, attended=False)
    shell.state.batches.__init__(None)  # type: ignore[misc]
    optimizer = shell.state.batches.attach()
    number = shell.begin_elastic()
    assert shell.at_once(shell.elastic.request(number)) is True
    assert shell.hand(shell.draw())
    master.give_up_all()
    shell.run(shell.trainer.position.progress())  # it takes part anew
    assert shell.at_once(shell.elastic.request(number)) is True
    assert shell.hand(shell.draw())
    shell.run(shell.elastic.passed_on())
    shell.run(shell.elastic.stepped(optimizer))
    assert master.status.acknowledged == 0, "the loop steps on the void batch"
    shell.run(shell.elastic.passed_on())
    shell.run(shell.elastic.stepped(optimizer))
    assert master.status.acknowledged == 8


def test_a_loop_that_is_left_with_one_that_stands_in_is_not_at_the_end() -> None:
    """All is read, and a wrapper holds the last batch when the padding comes."""
    shell = Shell(Master(records=8), batch_size=8, attended=False)
    shell.state.batches.__init__(None)  # type: ignore[misc]
    number = shell.begin_elastic()
    hand_next(shell)
    shell.request()
    assert not shell.run(shell.elastic.look_for_more())
    shell.elastic.pad()
    assert shell.elastic.phase is Loop.TRAINING
    shell.run(shell.elastic.close(number))
    assert shell.master.status.leased == 0


def test_a_wrapper_that_counts_does_not_tell(shell: Shell) -> None:
    shell.begin_elastic()
    with pytest.raises(InvalidArgument, match=r"passed_on\(\) is for lookahead='manual'"):
        shell.run(shell.elastic.passed_on())


# Warnings ---------------------------------------------------------------------------------------------------


def test_a_restore_in_the_midst_of_a_loop_is_no_matter(shell: Shell) -> None:
    """Model and data go back together: nothing of the batch in hand is in either."""
    shell.begin_elastic()
    hand_next(shell)
    shell.run(shell.trainer.position.restore(None))
    shell.run(shell.trainer.open())
    assert shell.warnings == []


def test_what_went_back_before_a_restore_is_no_matter(shell: Shell) -> None:
    number = shell.begin_elastic()
    hand_next(shell)
    shell.run(shell.elastic.close(number))
    shell.run(shell.trainer.position.restore(None))
    shell.run(shell.elastic.warnings.of_what_went_back())
    assert shell.warnings == []


@pytest.mark.parametrize("looks", [True, False])
def test_optimizers_that_never_step_are_told_of_when_there_is_more(looks: bool) -> None:
    shell = Shell(Master(num_epochs=2), attended=False)
    shell.state.batches.attach("sgd")
    number = shell.begin_elastic()
    hand_next(shell)
    hand_next(shell)
    shell.run(shell.elastic.close(number))
    shell.run(shell.trainer.open())
    assert shell.warnings == []
    assert shell.run(shell.elastic.look_for_more() if looks else shell.elastic.more_to_read())
    (warning,) = shell.warnings
    assert warning.startswith("sgd, attached for 'training', did not step since the last pass began, and no")


# Loops that never get on ----------------------------------------------------------------------------------


def leave_with_a_batch(shell: Shell) -> None:
    number = shell.begin_elastic()
    assert shell.hand(shell.draw())
    shell.run(shell.elastic.close(number))


@pytest.mark.parametrize("asks_before", [True, False])
def test_the_tenth_pass_in_a_row_that_keeps_nothing_is_an_error_to_who_asks(
    master: Master, shell: Shell, asks_before: bool
) -> None:
    if asks_before:
        shell.elastic.warnings.check_gets_on()  # no pass came before
    for _ in range(2):  # said once; then ten more
        for _ in range(9):
            leave_with_a_batch(shell)
            shell.elastic.warnings.check_gets_on()
        shell.elastic.warnings.check_gets_on()  # no pass came between
        leave_with_a_batch(shell)
        with pytest.raises(
            AccountingError, match=r"10 passes in a row over 'training'.*nothing says it is done"
        ):
            shell.elastic.warnings.check_gets_on()
    shell.elastic.warnings.check_gets_on()


@pytest.mark.parametrize("counts", ["a report", "quarantine", "a step"])
def test_a_batch_that_counts_begins_the_count_of_passes_anew(shell: Shell, counts: str) -> None:
    number = shell.state.batches.attach("SGD") if counts == "a step" else 0
    for done in (*[False] * 9, True, *[False] * 9):
        shell.begin_elastic()
        assert shell.hand(shell.draw())
        if done and counts == "a report":
            shell.run(shell.elastic.report())
        elif done and counts == "quarantine":
            shell.run(shell.elastic.fail_batch("blurred"))
        elif done:
            shell.run(shell.elastic.stepped(number))
        shell.run(shell.elastic.close(shell.state.supply.current.number))
        shell.elastic.warnings.check_gets_on()
    leave_with_a_batch(shell)
    with pytest.raises(AccountingError, match="did not step" if counts == "a step" else "is done"):
        shell.elastic.warnings.check_gets_on()
