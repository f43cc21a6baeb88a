"""Whether a trainer's leases are still its own: heartbeats, silence, questions, deliveries."""

from __future__ import annotations

import time
from typing import Any

import pytest
from trainer_kit import Master, Shell, whole

from edl_torch.core.status import MasterStatus, TrainerStatus
from edl_torch.errors import MasterUnavailable
from edl_torch.trainer.liveness import AGAIN_S, FIRST_S, Liveness, WaitLogSchedule
from edl_torch.trainer.vocabulary import Call, Logged, Voided


@pytest.fixture
def liveness() -> Liveness:
    """One that stands since 100 s, with a lease timeout of 30 s."""
    liveness = Liveness()
    liveness.stood(100.0, lease_timeout_s=30.0)
    return liveness


def confirm(liveness: Liveness, now: float = 100.0) -> None:
    liveness.confirmed(liveness.doubts, now)


def test_before_the_stream_has_stood_nothing_is_sure() -> None:
    liveness = Liveness()
    liveness.answered(100.0)
    assert not liveness.sure(100.0)
    assert not liveness.standing


def test_it_is_sure_for_two_thirds_of_the_timeout(liveness: Liveness) -> None:
    assert liveness.sure(119.9)
    assert not liveness.sure(120.0)


def test_an_answered_heartbeat_counts_from_when_it_was_sent(liveness: Liveness) -> None:
    liveness.answered(110.0)  # sent at 110; the process was stopped until 125
    assert liveness.sure(125.0)
    assert not liveness.sure(130.0)


@pytest.mark.parametrize("event", ["broke", "doubt"])
def test_a_doubt_outlives_a_heartbeat_and_a_new_stream(liveness: Liveness, event: str) -> None:
    getattr(liveness, event)()
    liveness.answered(100.0)
    liveness.stood(100.0, lease_timeout_s=30.0)
    assert not liveness.sure(100.0)
    confirm(liveness)
    assert liveness.sure(100.0)


def test_what_happens_while_leases_are_presented_is_not_settled_by_the_answer(liveness: Liveness) -> None:
    liveness.broke()
    liveness.stood(100.0, lease_timeout_s=30.0)
    doubts = liveness.doubts
    liveness.broke()  # the call is on its way
    liveness.confirmed(doubts, 100.0)
    assert not liveness.sure(100.0)


def test_the_answer_of_an_earlier_question_takes_no_certainty_back(liveness: Liveness) -> None:
    liveness.doubt()
    confirm(liveness)
    liveness.confirmed(0, 100.0)
    assert liveness.sure(100.0)


def test_leases_that_were_presented_are_sure_from_when_they_were(liveness: Liveness) -> None:
    liveness.confirmed(liveness.doubts, 115.0)
    assert liveness.sure(134.9)
    assert not liveness.sure(135.0)


def test_a_stream_that_does_not_stand_breaks_once(liveness: Liveness) -> None:
    for _ in range(3):
        liveness.broke()
    assert liveness.doubts == 1
    assert not liveness.standing


def test_a_loop_that_rested_long_is_in_doubt_where_the_master_asks_for_progress() -> None:
    liveness = Liveness()
    liveness.stood(100.0, lease_timeout_s=600.0, progress_timeout_s=30.0)
    liveness.begin(100.0)
    now = 100.0
    for _ in range(5):
        now += 9.9
        liveness.moved_on(now)
    assert liveness.sure(now)
    assert liveness.progress == 5
    now += 10.0
    liveness.moved_on(now)
    assert not liveness.sure(now)
    assert liveness.doubts == 1
    confirm(liveness, now)
    liveness.moved_on(now)
    assert liveness.sure(now)


def test_a_session_that_is_not_attended_yet_does_not_rest() -> None:
    """Its loop may have done anything else for any time, and it holds no lease."""
    liveness = Liveness()
    liveness.moved_on(1e6)
    liveness.stood(1e6, lease_timeout_s=600.0, progress_timeout_s=30.0)
    liveness.begin(1e6)
    liveness.moved_on(1e6 + 9.9)
    assert liveness.sure(1e6 + 9.9)


def test_a_session_rests_from_when_it_is_attended() -> None:
    liveness = Liveness()
    liveness.stood(1e6, lease_timeout_s=600.0, progress_timeout_s=30.0)
    confirm(liveness, 1e6)
    liveness.begin(1e6)
    liveness.moved_on(1e6 + 60.0)
    assert not liveness.sure(1e6 + 60.0)


def test_a_new_stream_is_no_progress_of_the_loop() -> None:
    """The master may have taken the leases while the stream was away."""
    liveness = Liveness()
    liveness.stood(100.0, lease_timeout_s=600.0, progress_timeout_s=30.0)
    liveness.begin(100.0)
    liveness.moved_on(100.0)
    liveness.stood(129.0, lease_timeout_s=600.0, progress_timeout_s=30.0)
    liveness.moved_on(129.0)
    assert not liveness.sure(129.0)


def test_without_a_progress_timeout_a_step_may_be_long(liveness: Liveness) -> None:
    liveness.begin(100.0)
    liveness.answered(1e6)
    liveness.moved_on(1e6)
    assert liveness.sure(1e6)


def test_the_question_costs_less_than_a_microsecond_or_two() -> None:
    liveness = Liveness()
    liveness.stood(100.0, lease_timeout_s=30.0)

    def batches(count: int = 1000) -> float:
        began = time.perf_counter()
        for _ in range(count):
            liveness.moved_on(100.0)
            assert liveness.sure(100.0)
        return (time.perf_counter() - began) / count

    assert min(batches() for _ in range(20)) < 10e-6  # 0.5 µs on a quiet machine


def test_repr_shows_state(liveness: Liveness) -> None:
    assert repr(liveness) == "<Liveness standing=True doubts=0>"
    liveness.broke()
    assert repr(liveness) == "<Liveness standing=False doubts=1>"
    liveness.doubt()
    assert repr(liveness) == "<Liveness standing=False doubts=2>"
    confirm(liveness)
    assert repr(liveness) == "<Liveness standing=False doubts=0>"


# Who waits for records of others says so: after a few seconds, then every minute ----------------------------


def test_a_message_is_due_after_a_few_seconds_and_then_every_minute() -> None:
    silence = WaitLogSchedule()
    due = [waited for waited in range(140) if silence.is_due(float(waited))]
    assert due == [FIRST_S, FIRST_S + AGAIN_S, FIRST_S + 2 * AGAIN_S]
    assert repr(silence) == "<WaitLogSchedule due_s=185>"
    silence.end()
    assert not silence.is_due(4.9)
    assert silence.is_due(5.0)


class Waiting:
    """A trainer that waits while another holds all records; each call takes a second."""

    def __init__(self) -> None:
        self.master = Master()
        self.other = Shell(self.master, "other", attended=False)
        self.other.begin_plain()
        while self.other.next() is not None:
            pass
        self.shell = Shell(self.master, attended=False)
        self.shell.run(self.shell.trainer.open())
        self.running = self.shell.start(self.shell.trainer.leasing.wait_for_more())

    def wait(self, seconds: int) -> None:
        """Let so many calls end with nothing."""
        for _ in range(seconds):
            self.running.to("lease")
            self.master.now += 1.0
            assert isinstance(self.running.action, Call)
            self.running.answer(self.master.answer(self.running.action))

    @property
    def said(self) -> list[str]:
        return [fact.text for fact in self.shell.told(Logged)]


def one(session: str, *, dataset: str = "training", leased: int = 3) -> TrainerStatus:
    return TrainerStatus(
        session=session, worker_id="w", datasets=(dataset,), leased=leased, idle_s=1.0, since_progress_s=7.0
    )


def status(*trainers: TrainerStatus) -> MasterStatus:
    return MasterStatus(ledger="L", durable=False, datasets=(), trainers=trainers)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            status(one("other-session"), one("s"), one("elsewhere", dataset="x"), one("idle", leased=0)),
            "heard of for the master's lease timeout: trainer 'w' (session other-se) has 3 record(s), last "
            "heard of 1 s ago, its loop last moved on 7 s ago",
        ),
        (
            status(one("a", leased=1), one("b", leased=1)),
            "moved on 7 s ago; trainer 'w' (session b) has 1 record(s), last heard of 1 s ago, its loop last "
            "moved on 7 s ago",
        ),
        (status(one("s", leased=0)), ": no other trainer has any"),
        (
            status(one("s")),
            "left are this trainer's own: 3 are lent to it, and count when its loop is done with them, by "
            "a step of each attached optimizer",
        ),
        (MasterUnavailable("away"), ": the master does not say who has them"),
    ],
)
def test_a_long_wait_is_told_with_those_who_have_the_records(answer: Any, message: str) -> None:
    waiting = Waiting()
    waiting.wait(5)
    waiting.running.to("status")
    if isinstance(answer, Exception):
        waiting.running.fail(answer)
    else:
        waiting.running.answer(answer)
    (said,) = waiting.said
    assert said.startswith("dataset 'training': this trainer has waited 5 s for records, or for the end of")
    assert said.endswith(message)
    waiting.wait(59)
    waiting.running.to("lease")
    assert len(waiting.said) == 1
    waiting.wait(1)
    waiting.running.to("status")


# What the answer to leases that were presented does not cover -----------------------------------------------


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


def test_a_session_that_was_given_up_asks_as_the_new_member(master: Master, shell: Shell) -> None:
    grant = shell.draw()
    master.give_up_all()
    assert not shell.hand(grant)
    assert shell.liveness.member == shell.state.fence.member == 2
    fresh = shell.draw()
    shell.liveness.doubt()
    assert shell.hand(fresh)
    assert [call.fence.member for call in master.of("confirm")] == [1, 2, 2]
