"""Calls of a loop that need no master, batches that it gives back, and what it is warned of."""

from __future__ import annotations

import pytest
from trainer_kit import Master, Shell, whole

from edl_torch.core.calls import Grant, ReportCall
from edl_torch.errors import AccountingError, InvalidArgument, StaleLease
from edl_torch.trainer.vocabulary import Loop


def hand_next(shell: Shell) -> Grant:
    shell.request()
    grant = shell.draw()
    assert shell.hand(grant)
    return grant


# At once ----------------------------------------------------------------------------------------------------


def test_a_batch_is_handed_at_once_where_nothing_is_unanswered(remote: Shell) -> None:
    remote.begin_elastic()
    first, second = remote.draw(), remote.draw()
    assert remote.at_once(remote.elastic.hand(whole(first)))
    assert remote.elastic.phase is Loop.TRAINING
    remote.request()
    handing = remote.start(remote.elastic.hand(whole(second)))
    assert isinstance(handing.request, ReportCall), "the report of the first is not answered"
    assert handing.finish()


def test_a_batch_in_doubt_or_after_an_error_is_not_handed_at_once(master: Master) -> None:
    shell = Shell(master)
    shell.begin_elastic()
    grant = shell.draw()
    moved = shell.liveness.progress
    shell.break_stream()
    assert not shell.at_once(shell.elastic.hand(whole(grant)))
    assert shell.hand(grant)
    assert shell.liveness.progress == moved + 2
    shell.request()
    second = shell.draw()
    shell.trainer.fail(StaleLease("another history"))
    with pytest.raises(StaleLease):
        shell.hand(second)
    assert len(shell.state.batches) == 0


def test_the_next_batch_is_asked_for_at_once_where_there_is_nothing_to_tell(
    master: Master, shell: Shell
) -> None:
    number = shell.begin_elastic()
    assert shell.at_once(shell.elastic.request(number)) is True
    assert shell.elastic.phase is Loop.ASKING
    assert shell.hand(shell.draw())
    asking = shell.start(shell.elastic.request(number))
    assert isinstance(asking.request, ReportCall), "its acknowledgement must be sent"
    assert asking.finish() is True
    assert master.status.acknowledged == 8
    assert shell.at_once(shell.elastic.request(number + 1)) is False
    shell.run(shell.elastic.close(number))
    assert shell.at_once(shell.elastic.request(number)) is False
    assert shell.at_once(shell.elastic.request(shell.begin_plain())) is False


# A wrapper that tells ---------------------------------------------------------------------------------------


def test_a_batch_that_stands_in_passes_on_none_that_was_read_after_it(master: Master) -> None:
    shell = Shell(master, attended=False)
    shell.state.batches.__init__(None)  # type: ignore[misc]
    optimizer = shell.state.batches.attach()
    number = shell.begin_elastic()
    assert shell.at_once(shell.elastic.request(number)) is True
    shell.elastic.pad()
    assert shell.at_once(shell.elastic.request(number)) is True
    assert shell.hand(shell.draw())
    shell.run(shell.elastic.passed_on())
    shell.run(shell.elastic.stepped(optimizer))
    assert master.status.acknowledged == 0, "the loop steps on the padding batch"
    shell.run(shell.elastic.passed_on())
    shell.run(shell.elastic.stepped(optimizer))
    assert master.status.acknowledged == 8


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


def test_a_batch_in_hand_goes_back_where_one_that_stands_in_was_read_after_it(master: Master) -> None:
    shell = Shell(master, attended=False)
    shell.state.batches.__init__(None)  # type: ignore[misc]
    shell.state.batches.attach()
    number = shell.begin_elastic()
    assert shell.at_once(shell.elastic.request(number)) is True
    assert shell.hand(shell.draw())
    assert shell.at_once(shell.elastic.request(number)) is True
    shell.elastic.pad()
    shell.run(shell.elastic.passed_on())
    shell.run(shell.elastic.close(number))
    assert master.status.leased == 0


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


def test_after_a_restore_the_epochs_are_not_over(shell: Shell) -> None:
    shell.train_through()
    shell.run(shell.trainer.position.restore(None))
    assert shell.train_through() == 64
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


def test_looks_at_the_data_are_no_loop_that_never_gets_on(shell: Shell) -> None:
    for _ in range(12):
        leave_with_a_batch(shell)
    shell.elastic.warnings.check_gets_on()
    assert shell.train_through() == 64
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


def test_passes_of_before_a_token_do_not_count(shell: Shell) -> None:
    token = shell.run(shell.trainer.position.snapshot())
    for _ in range(9):
        leave_with_a_batch(shell)
        shell.elastic.warnings.check_gets_on()
    shell.run(shell.trainer.position.restore(None if token == shell.beginning else token))
    for _ in range(9):
        leave_with_a_batch(shell)
        shell.elastic.warnings.check_gets_on()
