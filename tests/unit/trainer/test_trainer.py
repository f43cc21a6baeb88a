"""What no single part of a trainer does: its end, records that cannot be read, processes that die."""

from __future__ import annotations

import pytest
from trainer_kit import Master, ScriptedMaster, Shell, ack, reports_of

from edl_torch.errors import MasterUnavailable
from edl_torch.shard import Slice
from edl_torch.trainer.outbox import Report
from edl_torch.trainer.vocabulary import DataChanged, Logged, Reporting, Wait


def test_every_part_shows_its_state(master: Master) -> None:
    shell = Shell(master, "0123456789", attended=False)
    trainer, state = shell.trainer, shell.state
    assert repr(trainer).startswith("<Trainer 01234567 <State NEW <LeaseQueue pass=0 closed ready=0>")
    assert repr(trainer.position).startswith("<Position 'training' Fence(ledger=''")
    assert repr(trainer.registrar).startswith("<Registrar NEW Fence(ledger=''")
    assert repr(trainer.confirmer) == "<Confirmer <Liveness standing=False doubts=0>>"
    assert repr(shell.elastic) == "<ElasticPasses IDLE exhausted=False <LeaseQueue pass=0 closed ready=0>>"
    assert repr(trainer.plain) == "<PlainPasses streams=0 silent=0 None>"
    shell.begin_plain()
    shell.draw()
    state.outbox.note(acknowledgements=[ack(1, 4)])
    assert [repr(part) for part in (trainer.confirmer, trainer.plain, trainer.leasing, trainer.reporter)] == [
        "<Confirmer in one process with the master>",
        "<PlainPasses streams=1 silent=0 <StreamCounts streams=1 unreported=8>>",
        "<Leasing <LeaseQueue pass=1 open epoch=0 ready=0>>",
        "<Reporter <Outbox IDLE request=0 unanswered=1>>",
    ]
    assert repr(Report()) == "<Report 0 0 0>"


def test_closing_gives_back_all_that_was_not_trained_on(master: Master, shell: Shell) -> None:
    shell.begin_elastic()
    for _ in range(2):
        assert shell.hand(shell.draw())
        if len(shell.state.batches) < 2:
            shell.state.batches.attach()
            shell.request()
    shell.draw()
    shell.run(shell.trainer.close(5.0))
    assert shell.state.closed
    assert master.status.leased == 0
    assert master.status.acknowledged == 0
    assert sorted(back.task for back in reports_of(master)[-1].give_backs) == [1, 2, 3]
    assert shell.told(Reporting)[-1].returned == ((1, 0, 8),), "the second was not stepped on"


# The end ----------------------------------------------------------------------------------------------------


def test_closing_before_the_first_use_makes_no_call(master: Master, shell: Shell) -> None:
    shell.run(shell.trainer.close(5.0))
    assert master.calls == []


@pytest.mark.parametrize("fails", [False, True])
def test_closing_waits_for_the_answer_or_for_an_error_and_no_longer(fails: bool, remote: Shell) -> None:
    remote.begin_elastic()
    remote.draw()
    closing = remote.start(remote.trainer.close(5.0))
    assert isinstance(closing.action, Wait)
    assert (closing.must_wait, closing.action.timeout_s) == (True, 5.0)
    if fails:
        remote.trainer.fail(MasterUnavailable("away"))
    else:
        remote.work()
    assert not closing.must_wait
    assert remote.state.outbox.unanswered == fails


def test_a_closed_trainer_whose_session_is_gone_does_not_register_again(
    master: Master, remote: Shell
) -> None:
    remote.begin_elastic()
    remote.draw()
    closing = remote.start(remote.trainer.close(5.0))
    assert isinstance(closing.action, Wait)
    closing.answer(None)
    master.give_up_all()
    remote.work()
    assert len(master.of("register")) == 1


# Processes that read ----------------------------------------------------------------------------------------


def test_data_that_changed_are_noted_each_time_and_told_once(shell: Shell) -> None:
    for said in ("record 3 is another", "record 4 is another"):
        shell.run(shell.trainer.data_changed(said))
    assert [fact.said for fact in shell.told(DataChanged)] == ["record 3 is another", "record 4 is another"]
    (told,) = [fact for fact in shell.told(Logged) if "were changed while they were read" in fact.text]
    assert "record 3" in told.text


def test_a_process_that_dies_is_told_with_the_records_that_it_was_at(shell: Shell) -> None:
    shell.begin_elastic()
    first, second = shell.draw("worker 1"), shell.draw("worker 1")
    assert shell.run(shell.elastic.hand(((first.task, 0, 3),)))
    shell.run(shell.trainer.stream_broke("worker 1"))
    where = "records 8 to 15 of 'a' (before them records 3 to 7 of 'a', not delivered yet)"
    assert second.slice.shard == 1
    assert shell.run(shell.trainer.broken_streams(1.0)) == {"worker 1": where}
    assert shell.told(Logged) == [Logged(f"loader worker 1 ended before its pass: {where}")]
    shell.run(shell.trainer.stream_broke("worker 1"))
    assert len(shell.told(Logged)) == 1


# Trainers that follow another -------------------------------------------------------------------------------


def following(**options: int) -> Shell:
    """A trainer that follows another, whose master answers it at once and knows none of its leases."""
    shell = Shell(ScriptedMaster(), in_process=False, **options)  # type: ignore[arg-type]
    shell.run(shell.trainer.begin_stream())
    shell.trainer.follow()
    return shell


@pytest.fixture
def follower() -> Shell:
    return following()


def follow(shell: Shell, *slices: Slice) -> None:
    shell.request()
    assert shell.run(shell.elastic.hand(shell.elastic.follow(slices)))


def test_a_follower_writes_nothing_down_and_is_never_in_doubt(follower: Shell) -> None:
    follower.run(follower.trainer.open())
    for skip in (0, 4):
        follow(follower, Slice(epoch=0, shard=3, skip=skip, limit=4))
    assert follower.told(Reporting) == []
    assert follower.state.liveness is None


def test_a_follower_is_at_the_end_where_the_other_is() -> None:
    """From then on each step passes on one more of what a wrapper has read ahead."""
    follower = following(lookahead=1)
    optimizer = follower.state.batches.attach()
    number = follower.run(follower.trainer.open())
    follow(follower, Slice(epoch=0, shard=3, skip=0, limit=4))
    follower.elastic.follow_to_the_end()
    follower.request()
    follower.run(follower.elastic.close(number))
    follower.run(follower.elastic.stepped(optimizer))
    assert [done.upto for call in reports_of(follower.master) for done in call.acknowledgements] == [4]


def test_a_follower_that_gets_a_batch_after_all_is_not_at_the_end() -> None:
    """Records came back to the other one's master: a wrapper holds the newest batch again."""
    follower = following(lookahead=1)
    optimizer = follower.state.batches.attach()
    follower.run(follower.trainer.open())
    follower.elastic.follow_to_the_end()
    follow(follower, Slice(epoch=0, shard=3, skip=0, limit=4))
    follower.run(follower.elastic.stepped(optimizer))
    assert reports_of(follower.master) == []
