"""Tokens of a trainer's position, and the way back to one."""

from __future__ import annotations

import pytest
from trainer_kit import DATASET, Master, Shell

from edl_torch.errors import MasterUnavailable, StaleLease, UnknownDataset
from edl_torch.trainer.foreign_loop import OWN_STREAM
from edl_torch.trainer.vocabulary import Describe, Restored, TokenTaken


def snapshot(shell: Shell) -> str:
    return shell.run(shell.trainer.position.snapshot())


def restore(shell: Shell, token: str | None) -> None:
    shell.run(shell.trainer.position.restore(token))


# The token --------------------------------------------------------------------------------------------------


def test_a_token_waits_until_all_is_reported(master: Master) -> None:
    shell = Shell(master, in_process=False, attended=False)
    shell.begin_elastic()
    assert shell.hand(shell.draw())
    snapshot(shell)
    assert master.status.acknowledged == 8


def test_the_token_of_data_that_nobody_asked_for_is_their_beginning(master: Master, shell: Shell) -> None:
    taking = shell.start(shell.trainer.position.snapshot()).to("status")
    taking.fail(UnknownDataset("who?"))
    assert isinstance(taking.action, Describe)
    taking.answer("from the beginning")
    assert taking.is_done
    assert shell.state.registered.plan is None
    assert master.calls == []


def test_a_token_says_what_it_lacks(shell: Shell) -> None:
    for stream in ("worker 0", "worker 1"):
        shell.begin_plain(stream, "7 1")
        shell.draw(stream)
    shell.report()
    token = snapshot(shell)
    assert shell.told(TokenTaken) == [TokenTaken(token=token, exact=False, uncounted=4, half_stepped=0)]


def test_a_token_of_one_stream_is_exact(shell: Shell) -> None:
    shell.begin_plain(OWN_STREAM)
    shell.draw()
    shell.report()
    token = snapshot(shell)
    assert shell.told(TokenTaken) == [TokenTaken(token=token, exact=True, uncounted=0, half_stepped=0)]


def test_a_model_that_has_learnt_what_comes_again_gets_no_token(shell: Shell) -> None:
    shell.begin_elastic()
    shell.state.lose("1 batch(es)")
    shell.state.lose("2 batch(es)")
    with pytest.raises(StaleLease, match=r"^1 batch\(es\) of dataset 'training'"):
        snapshot(shell)
    with pytest.raises(StaleLease):
        shell.run(shell.trainer.position.settle())  # on a rank that takes no token itself


def test_a_session_that_is_given_up_while_it_takes_the_token_gets_none(master: Master, shell: Shell) -> None:
    shell.begin_elastic()
    shell.state.batches.attach()
    assert shell.hand(shell.draw())
    taking = shell.start(shell.trainer.position.snapshot()).to("snapshot")
    master.give_up_all()
    with pytest.raises(StaleLease, match="this trainer was cut off"):
        taking.finish()
    assert shell.state.fence.member == 2
    assert [call.fence.member for call in master.of("snapshot")] == [1, 2]
    assert shell.told(TokenTaken) == []


# The way back -----------------------------------------------------------------------------------------------


def test_going_back_reads_again_what_came_after(master: Master, shell: Shell) -> None:
    shell.begin_elastic()
    assert shell.hand(shell.draw())
    token = snapshot(shell)
    shell.request()
    assert shell.hand(shell.draw())
    restore(shell, token)
    assert shell.told(Restored) == [Restored(token=token, lineage=2)]
    assert shell.state.fence.lineage == 2
    assert not shell.state.inflight
    assert not shell.state.supply.current.is_open
    shell.run(shell.elastic.close(1))
    assert shell.train_through() == 56
    assert master.status.finished


@pytest.mark.parametrize(
    ("lookahead", "is_left", "holds"),
    [(1, False, True), (None, False, True), (0, False, False), (1, True, False)],
)
def test_a_restore_notes_the_pass_that_a_wrapper_holds_batches_of(
    master: Master, lookahead: int | None, is_left: bool, holds: bool
) -> None:
    shell = Shell(master, lookahead=lookahead, attended=False)
    shell.begin_elastic()
    number = shell.begin_elastic()
    assert shell.hand(shell.draw())
    if is_left:
        shell.run(shell.elastic.close(number))
    restore(shell, None)
    assert shell.elastic.read_ahead == (number if holds else 0)
    restore(shell, None)
    assert shell.elastic.read_ahead == 0


def test_restores_are_numbered(master: Master, shell: Shell) -> None:
    restore(shell, None)
    restore(shell, None)
    assert [call.request for call in master.of("restore")] == [1, 2]
    assert [call.fence.lineage for call in master.of("restore")] == [1, 2]
    assert shell.state.fence.lineage == 3


def test_the_batch_in_hand_of_a_restore_that_failed_is_not_trained_on(master: Master, shell: Shell) -> None:
    """The loop is left in its midst, and the next pass would take it for done."""
    number = shell.begin_elastic()
    assert shell.hand(shell.draw())
    shell.request()
    assert shell.hand(shell.draw())
    restoring = shell.start(shell.trainer.position.restore(None)).to("restore")
    with pytest.raises(MasterUnavailable):
        restoring.fail(MasterUnavailable("away"))
    shell.run(shell.elastic.close(number))
    shell.run(shell.trainer.open())
    assert master.status.acknowledged == 8
    assert master.status.leased == 0


def test_a_restore_that_another_one_preceded_is_refused(master: Master, shell: Shell) -> None:
    shell.run(shell.trainer.position.note_history())
    master.dispatcher.go_back(DATASET, None)
    with pytest.raises(StaleLease, match="by another trainer while this one read its own: lineage 2, not 1"):
        restore(shell, None)
    restore(shell, None)
    assert shell.state.fence.lineage == 3, "the look was of another checkpoint"


def test_a_look_notes_the_lineage_that_is(master: Master, shell: Shell) -> None:
    master.dispatcher.go_back(DATASET, None)
    shell.run(shell.trainer.position.note_history())
    restore(shell, None)
    assert shell.state.fence.lineage == 3


def test_another_master_since_the_look_is_refused(master: Master, shell: Shell) -> None:
    shell.run(shell.trainer.position.note_history())
    master.dispatcher.ledger_id = "M"
    with pytest.raises(StaleLease, match=r"another master since .*: ledger M, not L"):
        restore(shell, None)
