"""Calls of a loop that need no master, batches that it gives back, and what it is warned of."""

from __future__ import annotations

import pytest
from trainer_kit import Master, Shell

from edl_torch.core.calls import Grant
from edl_torch.errors import AccountingError, InvalidArgument
from edl_torch.trainer.vocabulary import Loop


def hand_next(shell: Shell) -> Grant:
    shell.request()
    grant = shell.draw()
    assert shell.hand(grant)
    return grant


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
