"""Which leases a pass asks for, who draws them, and when it is over."""

from __future__ import annotations

import pytest
from trainer_kit import Master, Shell, back, reports_of

from edl_torch.core.calls import NEW_PASS, Grant, LeaseAnswer, PassState
from edl_torch.errors import ConcurrentIteration, MasterUnavailable
from edl_torch.shard import Slice
from edl_torch.trainer.inflight import LeaseQueue, Mode
from edl_torch.trainer.leasing import POLL_S
from edl_torch.trainer.vocabulary import Asking, Call, LookAround, SiblingSession


def lease(task: int, bundle: int = 0) -> Grant:
    return Grant(task=task, attempt=1, slice=Slice(epoch=0, shard=task, skip=0, limit=8), bundle=bundle)


def answer(*grants: Grant, state: PassState = PassState.OPEN, epoch: int = 0) -> LeaseAnswer:
    return LeaseAnswer(request=1, epoch=epoch, state=state, grants=grants)


def asks(shell: Shell) -> list[int]:
    return [call.count for call in shell.master.of("lease")]


# Drawing ----------------------------------------------------------------------------------------------------


def test_a_plain_stream_that_holds_nothing_waits_for_more(master: Master, shell: Shell) -> None:
    """What others hold may come back: an end now would lose it."""
    other = Shell(master, "other", attended=False)
    number = other.begin_elastic()
    while other.next() is not None:
        pass
    shell.begin_plain()
    drawing = shell.start(shell.trainer.leasing.next("main", 1))
    for _ in range(3):
        assert isinstance(drawing.action, Call)
        assert drawing.action.wait_s == POLL_S
        drawing.step()
        assert isinstance(drawing.action, LookAround)
        drawing.step()
    other.run(other.elastic.close(number))
    assert drawing.finish() is not None


def test_the_rest_of_a_bundle_stays_when_others_wait_and_goes_back_at_the_end() -> None:
    supply = LeaseQueue(ahead=True)
    number = supply.open(Mode.ELASTIC)
    supply.take_in(answer(lease(1, bundle=7), lease(2, bundle=7), lease(3, bundle=7), lease(4)), number)
    supply.draw("worker 0", number)
    assert [grant.task for grant in supply.rest()] == [4]
    supply.void((3,))
    assert [grant.task for grant in supply.close()] == [2]
    assert supply.close() == []


def test_void_leases_are_not_drawn() -> None:
    supply = LeaseQueue(ahead=True)
    number = supply.open(Mode.ELASTIC)
    supply.take_in(answer(lease(1), lease(2)), number)
    supply.void((1,))
    assert supply.draw("worker 0", number) == lease(2)
    supply.take_in(answer(lease(3, bundle=1), lease(4, bundle=1), lease(5)), number)
    supply.draw("worker 0", number)
    supply.clear()
    assert supply.draw("worker 0", number) is None
    assert supply.close() == []


# Passes that are over ---------------------------------------------------------------------------------------


def test_a_pass_that_has_read_nothing_joins_the_next_epoch() -> None:
    supply = LeaseQueue(ahead=False)
    number = supply.open(Mode.ELASTIC)
    supply.take_in(answer(state=PassState.EPOCH_OVER, epoch=3), number)
    assert not supply.current.is_over
    assert supply.current.epoch == NEW_PASS


def test_a_stream_of_an_earlier_pass_draws_nothing_of_a_later_one() -> None:
    supply = LeaseQueue(ahead=True)
    first = supply.open(Mode.ELASTIC)
    second = supply.open(Mode.ELASTIC)
    supply.take_in(answer(lease(1)), second)
    assert supply.draw("worker 0", first) is None
    assert supply.draw("worker 0", second) == lease(1)


# One call at a time -----------------------------------------------------------------------------------------


def test_who_waits_for_an_answer_ends_with_the_pass(shell: Shell) -> None:
    number = shell.run(shell.trainer.open())
    first = shell.start(shell.trainer.leasing.next("worker 0", number))
    second = shell.start(shell.trainer.leasing.next("worker 1", number))
    third = shell.start(shell.trainer.leasing.wait_for_more())
    shell.siblings = (
        SiblingSession(session="other", records=8, same_thread=True),
    )  # no call has said "wait"
    shell.state.close_pass()
    assert second.finish() is None
    assert third.finish() is False
    first.interrupt()


def test_a_trainer_with_a_batch_waits_for_what_others_hold_of_its_epoch(master: Master, shell: Shell) -> None:
    shell.begin_elastic()
    shell.state.batches.attach()
    assert shell.hand(shell.draw())
    other = Shell(master, "other", attended=False)
    other.begin_plain()
    while other.next() is not None:
        pass
    shell.request()
    waiting = shell.start(shell.trainer.leasing.wait_for_more())
    for _ in range(3):
        waiting.step()
        assert isinstance(waiting.action, LookAround)
        waiting.step()
        assert isinstance(waiting.action, Call)
    other.run(other.trainer.plain.finish(abandoned=True))
    assert waiting.finish()


@pytest.mark.parametrize("plain", [False, True])
def test_who_waits_for_another_loop_of_its_own_thread_is_told(
    master: Master, shell: Shell, plain: bool
) -> None:
    other = Shell(master, "other", attended=False)
    other.begin_elastic()
    while other.next() is not None:
        pass
    if plain:
        shell.begin_plain()
        waiting = shell.start(shell.trainer.leasing.next("main", 1))
    else:
        shell.run(shell.trainer.open())
        waiting = shell.start(shell.trainer.leasing.wait_for_more())
    shell.siblings = (SiblingSession(session="other", records=64, same_thread=False),)
    waiting.to(LookAround).step()
    assert isinstance(waiting.action, Call)  # its loop may go on in its own thread
    shell.siblings += (SiblingSession(session="third", records=8, same_thread=True),)
    waiting.to(LookAround)
    with pytest.raises(ConcurrentIteration, match=r"waits for 8 record\(s\) of 'training'"):
        waiting.step()
    assert shell.state.supply.phase is Asking.IDLE


def test_a_pass_that_is_over_is_not_asked_about_again(master: Master, shell: Shell) -> None:
    shell.begin_elastic()
    shell.read()
    assert not shell.run(shell.elastic.more_to_read())
    asked = len(asks(shell))
    assert not shell.run(shell.elastic.more_to_read())
    assert not shell.run(shell.elastic.look_for_more())
    assert len(asks(shell)) == asked


# Ahead ------------------------------------------------------------------------------------------------------


def test_from_afar_one_lease_a_stream_is_fetched_ahead(remote: Shell) -> None:
    remote.run(remote.trainer.open())
    assert not remote.trainer.has_work, "nothing was lent yet"
    assert remote.run(remote.elastic.more_to_read())
    remote.draw("worker 0")
    assert remote.trainer.has_work
    remote.work()
    assert remote.state.supply.ready == 1
    assert not remote.trainer.has_work
    for stream in ("worker 1", "worker 2"):
        remote.draw(stream)
    remote.work()
    assert remote.state.supply.ready == 3
    assert remote.master.of("lease")[-1].ahead


def test_a_call_asks_for_as_many_as_the_streams_lack(remote: Shell) -> None:
    number = remote.begin_elastic()
    assert asks(remote) == [1]
    supply = remote.state.supply
    supply.current.streams |= {"worker 0", "worker 1", "worker 2"}
    assert supply.to_ask_for == 2
    remote.draw("worker 0", number)
    assert supply.to_ask_for == 3
    remote.work()
    assert supply.ready == 3
    assert supply.to_ask_for == 1


def test_a_master_that_has_nothing_more_is_not_asked_in_a_tight_loop(master: Master, remote: Shell) -> None:
    """One lease waits for two streams, and others hold the rest of the epoch."""
    remote.begin_elastic()
    remote.draw("worker 0")
    remote.draw("worker 1")
    other = Shell(master, "other", attended=False)
    other.begin_plain()
    while master.status.todo > 8:
        assert other.next() is not None
    remote.run(remote.trainer.leasing.look_for_more())
    while other.next() is not None:
        pass
    assert remote.state.supply.ready == 1
    assert remote.trainer.has_work
    asked = len(asks(remote))
    remote.work()
    assert len(asks(remote)) == asked + 1
    assert not remote.trainer.has_work


def test_what_fetching_ahead_raised_the_next_to_ask_hears_once(master: Master, remote: Shell) -> None:
    number = remote.begin_elastic()
    remote.draw()
    master.errors = [MasterUnavailable("away")]
    remote.work()
    assert not remote.trainer.has_work
    with pytest.raises(MasterUnavailable):
        remote.next("main", number)
    assert remote.draw("main", number)


def test_another_trainer_that_waits_gets_what_is_not_drawn(master: Master, remote: Shell) -> None:
    remote.begin_elastic()
    drawn = remote.draw()
    remote.work()
    ready = remote.state.supply.ready
    assert ready == 1
    remote.run(remote.trainer.wanted())
    remote.work()
    assert reports_of(master)[-1].give_backs == (back(drawn.task + 1, 0),)
    assert not remote.trainer.has_work
    assert remote.state.inflight.leases() == ((drawn.task, 1),)


def test_what_is_not_wanted_goes_back_at_once_in_one_process(master: Master, shell: Shell) -> None:
    number = shell.run(shell.trainer.open())
    drawing = shell.start(shell.trainer.leasing.next("main", number)).to("lease")
    shell.state.close_pass()
    drawing.finish()
    assert master.status.leases == 0


# Which calls for leases say that they are made ahead of need: those that the master may refuse --------------


@pytest.fixture
def attended(master: Master) -> Shell:
    return Shell(master)


def test_plain_loops_ask_for_what_they_need(master: Master, attended: Shell) -> None:
    """Refused, a plain loop would take its pass for over."""
    while attended.fetch() is not None:
        pass
    assert len(master.of("lease")) > 2
    assert not any(call.ahead for call in master.of("lease"))
