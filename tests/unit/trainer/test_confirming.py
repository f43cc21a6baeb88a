"""What the answer to leases that were presented does not cover."""

from __future__ import annotations

import pytest
from trainer_kit import Master, Shell, whole

from edl_torch.errors import MasterUnavailable
from edl_torch.trainer.vocabulary import Call, Voided

STALL_S = 30.0
TIMEOUT_S = 600.0


@pytest.fixture
def master() -> Master:
    return Master(lease_timeout_s=TIMEOUT_S, grace_s=TIMEOUT_S, progress_timeout_s=STALL_S)


@pytest.fixture
def shell(master: Master) -> Shell:
    shell = Shell(master)
    shell.run(shell.trainer.open())
    return shell


def stall(master: Master) -> None:
    assert any(released.slices for released in master.stall())


def test_a_lease_that_came_while_others_waited_to_be_presented_is_presented_too(
    master: Master, shell: Shell
) -> None:
    first = shell.draw()
    shell.break_stream()
    handing = shell.start(shell.elastic.hand(whole(first))).to("confirm")
    shell.draw()  # while the stream is away
    stall(master)
    assert not handing.finish()
    assert [[task for task, _ in call.leases] for call in master.of("confirm")] == [[1], [2]]
    assert shell.liveness.presented == 2
    assert not shell.state.inflight, "another trainer may have them"


def test_a_loop_that_does_not_begin_for_long_after_it_registered_is_in_doubt(
    master: Master, shell: Shell
) -> None:
    """The master counts from when the session is attended."""
    first = shell.draw()
    master.now += STALL_S / 3
    assert shell.hand(first)
    assert len(master.of("confirm")) == 1


def test_a_lease_whose_answer_was_on_its_way_when_others_were_presented_is_presented_too(
    master: Master, shell: Shell
) -> None:
    first = shell.draw()
    drawing = shell.start(shell.trainer.leasing.next("main", 1)).to("lease")
    assert isinstance(drawing.action, Call)
    answer = master.answer(drawing.action)
    stall(master)
    assert not shell.hand(first)
    assert len(master.of("confirm")) == 1
    drawing.answer(answer)
    late = drawing.finish()
    assert late is not None
    assert not shell.hand(late), "another trainer may have it"


def test_leases_that_were_asked_for_after_others_were_presented_need_no_question(
    master: Master, shell: Shell
) -> None:
    first = shell.draw()
    shell.break_stream()
    assert shell.hand(first)
    shell.request()
    assert shell.hand(shell.draw())
    assert len(master.of("confirm")) == 1


def test_an_answer_that_the_trainer_slept_over_is_not_believed(master: Master, shell: Shell) -> None:
    grant = shell.draw()
    shell.break_stream()
    handing = shell.start(shell.elastic.hand(whole(grant))).to("confirm")
    assert isinstance(handing.action, Call)
    answer = master.answer(handing.action)
    assert answer.void == ()
    shell.liveness.stood(master.now, lease_timeout_s=TIMEOUT_S)
    master.give_up_all()
    handing.answer(answer)
    assert not handing.finish(), "another trainer may have it"


def test_what_happens_while_the_answer_is_on_its_way_is_asked_about_again(
    master: Master, shell: Shell
) -> None:
    grant = shell.draw()
    shell.break_stream()
    handing = shell.start(shell.elastic.hand(whole(grant))).to("confirm")
    assert isinstance(handing.action, Call)
    answer = master.answer(handing.action)
    shell.liveness.stood(master.now, lease_timeout_s=TIMEOUT_S)
    shell.break_stream()
    handing.answer(answer)
    assert handing.finish()
    assert len(master.of("confirm")) == 2


def test_a_batch_whose_leases_are_void_is_thrown_away_and_the_rest_of_it_goes_back(
    master: Master, shell: Shell
) -> None:
    first = shell.draw()
    assert shell.hand(first)
    stall(master)
    second = shell.draw()
    batch = (*whole(first), *whole(second))
    shell.liveness.doubt()
    assert not shell.run(shell.elastic.hand(batch))
    assert [fact.runs for fact in shell.told(Voided)] == [whole(first)]
    assert not shell.state.inflight
    assert master.status.leases == 0
    with pytest.raises(Exception, match=r"1 batch\(es\) of dataset 'training': this trainer was cut off"):
        shell.state.check()


def test_a_master_that_is_away_leaves_the_batch_where_it_is(master: Master, shell: Shell) -> None:
    grant = shell.draw()
    shell.break_stream()
    master.is_away = True
    with pytest.raises(MasterUnavailable):
        shell.hand(grant)
    master.is_away = False
    assert shell.hand(grant)


def test_a_session_that_was_given_up_asks_as_the_new_member(master: Master, shell: Shell) -> None:
    grant = shell.draw()
    master.give_up_all()
    assert not shell.hand(grant)
    assert shell.liveness.member == shell.state.fence.member == 2
    fresh = shell.draw()
    shell.liveness.doubt()
    assert shell.hand(fresh)
    assert [call.fence.member for call in master.of("confirm")] == [1, 2, 2]


def test_where_liveness_is_never_in_doubt_nothing_is_presented(master: Master) -> None:
    shell = Shell(master, attended=False)
    shell.run(shell.trainer.open())
    assert shell.state.liveness is None
    master.now += TIMEOUT_S / 2
    assert shell.hand(shell.draw())
    assert shell.trainer.confirmer.is_sure
    assert master.of("confirm") == []
