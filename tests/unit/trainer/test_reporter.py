"""Reports reach the master in order and without loss, whatever happens on the way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from trainer_kit import Running, ScriptedMaster, Shell, ack, back, reports_of

from edl_torch.core.calls import Acknowledgement, Failure, ReportAnswer
from edl_torch.errors import EdlError, MasterUnavailable, SessionLost, StaleLease
from edl_torch.trainer.vocabulary import (
    Answered,
    Dropped,
    Evidence,
    Granted,
    Refused,
    Register,
    Reporting,
    Telling,
    Unanswered,
)


class Case(Shell):
    """A trainer that is registered, and whose reports are answered with nothing but their number."""

    def __init__(self, *, in_process: bool) -> None:
        super().__init__(ScriptedMaster(), in_process=in_process, attended=False)
        self.run(self.trainer.registrar.plan())
        self.facts.clear()
        self.reporter = self.trainer.reporter
        self.outbox = self.state.outbox

    def tell(self, *acknowledgements: Acknowledgement) -> None:
        self.outbox.note(acknowledgements=acknowledgements)
        self.run(self.reporter.send())

    def tell_and_wait(self, done: Acknowledgement) -> None:
        self.tell(done)
        self.run(self.reporter.wait_answered(0))

    def flush(self) -> None:
        self.run(self.reporter.flush())
        assert not self.outbox.unanswered

    def sending(self) -> Running[None]:
        """A report is on its way."""
        return self.start(self.reporter.send_one())

    def move_to(self, **change: Any) -> None:
        self.state.become(replace(self.state.fence, **change))

    @property
    def reports(self) -> list[Any]:
        return reports_of(self.master)

    @property
    def acknowledged(self) -> list[Any]:
        return [call.acknowledgements for call in self.reports]

    @property
    def lost(self) -> str:
        try:
            self.state.check()
        except StaleLease as error:
            return str(error)
        return ""


@pytest.fixture(params=[True, False], ids=["embedded", "remote"])
def case(request: pytest.FixtureRequest) -> Case:
    return Case(in_process=request.param)


@pytest.fixture
def remote() -> Case:
    return Case(in_process=False)


@pytest.fixture
def embedded() -> Case:
    return Case(in_process=True)


def test_reports_that_come_faster_than_answers_are_merged(remote: Case) -> None:
    remote.tell(ack(1, 4))
    sending = remote.sending()
    remote.tell(ack(1, 8, 4))
    remote.tell(ack(1, 10, 8), ack(1, 20, 16))
    remote.outbox.note(give_backs=[back(2, 0)])
    assert not remote.outbox.sendable, "one at a time"
    assert remote.start(remote.reporter.wait_answered(4)).is_done
    impatient = remote.start(remote.reporter.wait_answered(3))
    assert impatient.must_wait
    sending.finish()
    impatient.finish()
    remote.flush()
    merged = remote.reports[1]
    assert len(remote.reports) == 2
    assert merged.acknowledgements == (ack(1, 10, 4), ack(1, 20, 16))
    assert merged.give_backs == (back(2, 0),)


def test_a_master_that_is_away_is_not_asked_in_a_tight_loop(remote: Case) -> None:
    remote.master.errors = [MasterUnavailable("away")] * 3
    for _ in range(3):
        with pytest.raises(MasterUnavailable):
            remote.tell_and_wait(ack(1, 4))
        assert not remote.trainer.has_work
    assert remote.master.errors == []
    remote.flush()
    assert len(remote.reports) == 2  # the first as it was, and all that was noted since


@pytest.mark.parametrize("why", ["an error", "no answer", "nothing"])
def test_a_loop_must_send_where_it_is_to_hear_of_the_last_report(remote: Case, why: str) -> None:
    if why == "an error":
        remote.trainer.fail(StaleLease("another lineage"))
    elif why == "no answer":
        remote.tell(ack(1, 4))
        remote.sending().interrupt()
    assert remote.reporter.is_due == (why != "nothing")


def test_a_lost_session_is_told_with_the_fence_that_was_lost(case: Case) -> None:
    lost = case.state.fence
    case.master.give_up_all()
    case.master.errors = [SessionLost("who?")]
    case.tell(ack(1, 4))
    case.flush()
    assert [call.fence for call in case.master.of("progress") or [lost, lost]] == [lost, lost]
    assert case.state.fence == replace(lost, member=2)
    assert case.reports == []
    assert "batches of 1 lease(s)" in case.lost
    assert case.told(Refused) == [Refused()]
    assert not any(fact.acknowledgements for fact in case.told(Dropped)), "it is told already"


@pytest.mark.parametrize(
    ("error", "phase", "unanswered"),
    [(MasterUnavailable("away"), Telling.STALLED, 1), (StaleLease("another master"), Telling.IDLE, 0)],
)
def test_a_report_waits_for_a_master_that_is_away_as_its_trainer_registers_anew(
    remote: Case, error: EdlError, phase: Telling, unanswered: int
) -> None:
    remote.outbox.note(acknowledgements=[ack(1, 4)])
    sending = remote.sending()
    remote.master.give_up_all()
    sending.fail(SessionLost("who?"))
    sending.to(Register).fail(error)
    assert sending.is_done
    assert (remote.outbox.phase, remote.outbox.unanswered, remote.outbox.error) == (phase, unanswered, error)


def test_a_member_that_was_given_up_while_its_report_was_answered_says_what_was_answered(
    remote: Case,
) -> None:
    """A master whose journal went back behind that answer is found out by it."""
    remote.outbox.note(acknowledgements=[ack(1, 4)])
    sending = remote.sending()
    lost = remote.state.fence
    remote.master.give_up_all()
    remote.run(remote.trainer.registrar.again(lost))
    sending.answer(ReportAnswer(request=1))
    sending.finish()
    told = remote.master.of("progress")
    assert len(told) == 0 or told[-1].fence == lost
    assert remote.state.registered.known(lost) == (0, 1)


@pytest.mark.parametrize("error", [StaleLease("another lineage"), MasterUnavailable("away")])
def test_what_a_report_of_another_lineage_raised_is_not_raised_in_this_one(
    remote: Case, error: EdlError
) -> None:
    """A loader worker of before may draw a lease, and it go back, while the dataset goes back to a token."""
    remote.tell(ack(1, 4))
    sending = remote.sending()
    remote.move_to(lineage=2, member=2)
    sending.fail(error)
    sending.finish()
    remote.tell(ack(9, 1))
    remote.flush()
    assert [c.fence.lineage for c in remote.reports] == [2]


def test_what_was_not_answered_is_void_in_another_lineage(remote: Case) -> None:
    remote.master.errors = [MasterUnavailable("away")]
    remote.tell(ack(1, 4))
    remote.work()
    remote.outbox.note(give_backs=[back(2, 0)], returned=[(2, 0, 4)])
    remote.move_to(lineage=2)
    assert remote.outbox.unanswered == 0
    assert remote.outbox.phase is Telling.IDLE
    assert remote.told(Dropped) == [
        Dropped(acknowledgements=(), returned=((2, 0, 4),), on_its_way=False),
        Dropped(acknowledgements=(ack(1, 4),), returned=(), on_its_way=False),
    ]
    assert "batches of 1 lease(s)" in remote.lost


def test_what_is_posted_is_sent_and_raised_later(case: Case) -> None:
    """By callers who cannot act on it: a thread that hears of another trainer's want."""
    case.master.errors = [StaleLease("another lineage")]
    case.outbox.note(acknowledgements=[ack(1, 4)])
    case.run(case.reporter.post())
    case.work()
    assert case.outbox.error is not None
    case.outbox.note(give_backs=[back(2, 0)])
    case.run(case.reporter.post())
    case.work()
    with pytest.raises(StaleLease):
        case.flush()
    case.flush()
    assert len(case.reports) == 1


def test_acknowledgements_that_are_never_sent_are_refused(remote: Case) -> None:
    """The model has learnt from those records, and the master lends them again."""
    remote.tell(ack(1, 4))
    sending = remote.sending()
    remote.tell(ack(2, 8))
    remote.move_to(member=2)
    assert "batches of 1 lease(s)" in remote.lost
    assert remote.told(Dropped) == [Dropped(acknowledgements=(ack(2, 8),), returned=(), on_its_way=True)]
    remote.state.restored()
    sending.fail(MasterUnavailable("away"))
    assert "batches of 1 lease(s)" in remote.lost
    assert remote.told(Dropped)[1:] == [Dropped(acknowledgements=(ack(1, 4),), returned=(), on_its_way=False)]


def test_an_answer_may_lead_to_another_report(embedded: Case) -> None:
    """Another trainer waits: what nobody has drawn goes back too."""
    embedded.begin_elastic()
    embedded.outbox.note(acknowledgements=[ack(9, 4)])
    sending = embedded.start(embedded.reporter.send())
    sending.answer(ReportAnswer(request=1, wanted=True))
    sending.finish()
    assert [call.give_backs for call in embedded.reports] == [(back(1, 0),)]


def test_stale_leases_are_void_and_the_model_has_learnt_from_their_batches(embedded: Case) -> None:
    embedded.begin_elastic()
    grant = embedded.draw()
    embedded.outbox.note(acknowledgements=[ack(grant.task, 4)], give_backs=[back(7, 0)])
    sending = embedded.start(embedded.reporter.send())
    sending.answer(ReportAnswer(request=1, stale=(grant.task, 7)))
    assert not embedded.state.inflight
    assert "batches of 1 lease(s)" in embedded.lost


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), RuntimeError("DataLoader worker was killed")])
def test_an_interrupted_report_is_sent_again(case: Case, interruption: BaseException) -> None:
    case.master.errors = [interruption]
    with pytest.raises(type(interruption)):
        case.tell_and_wait(ack(1, 4))
    assert case.reports == []
    case.flush()
    assert [(c.request, c.acknowledgements) for c in case.reports] == [(1, (ack(1, 4),))]


def test_who_waits_for_an_answer_asks_again_where_another_has_heard_that_the_master_is_away(
    remote: Case,
) -> None:
    """A loader worker's report of a bad record hears it, and the loop that waits does not."""
    remote.tell(ack(1, 4))
    sending = remote.sending()
    waiting = remote.start(remote.reporter.flush())
    assert waiting.must_wait
    sending.fail(MasterUnavailable("away"))
    with pytest.raises(MasterUnavailable):
        remote.tell(ack(2, 1))
    waiting.finish()
    assert remote.acknowledged == [(ack(1, 4),), (ack(2, 1),)]


# What the audit hears ---------------------------------------------------------------------------------------


def test_a_report_is_written_down_before_it_is_sent_and_its_answer_after(embedded: Case) -> None:
    failure = Failure(task=3, attempt=1, position=2, reason="torn")
    embedded.outbox.note(failures=[failure], acknowledgements=[ack(1, 4)], way=Evidence.STEP)
    embedded.outbox.note(give_backs=[back(2, 1)], returned=[(2, 1, 3)])
    sending = embedded.start(embedded.reporter.send())
    assert embedded.facts == [
        Reporting(
            failures=(failure,),
            acknowledgements=(ack(1, 4),),
            give_backs=(back(2, 1),),
            way=Evidence.STEP,
            returned=((2, 1, 3),),
        )
    ]
    sending.answer(ReportAnswer(request=1, stale=(2,)))
    assert embedded.told(Answered) == [Answered((2,))]


@pytest.mark.parametrize(
    ("error", "fact"),
    [
        (StaleLease("another lineage"), Refused()),
        (MasterUnavailable("away"), Unanswered()),
        (RuntimeError("DataLoader worker was killed"), Unanswered()),
    ],
)
def test_what_became_of_a_report_is_written_down(embedded: Case, error: Exception, fact: object) -> None:
    embedded.outbox.note(acknowledgements=[ack(1, 4)])
    sending = embedded.start(embedded.reporter.post())
    if isinstance(error, EdlError):
        sending.fail(error)
    else:
        with pytest.raises(RuntimeError):
            sending.fail(error)
    assert embedded.facts[1:] == [fact]


def test_what_became_of_an_interrupted_report_is_written_down(embedded: Case) -> None:
    embedded.outbox.note(acknowledgements=[ack(1, 4)])
    embedded.start(embedded.reporter.post()).interrupt()
    assert embedded.facts[1:] == [Unanswered()]


def test_without_an_audit_nothing_is_written_down() -> None:
    shell = Shell(ScriptedMaster(), audited=False, attended=False)
    shell.run(shell.trainer.registrar.plan())
    shell.facts.clear()
    shell.state.outbox.note(acknowledgements=[ack(1, 4)])
    shell.run(shell.trainer.reporter.flush())
    assert shell.facts == []
    shell.begin_elastic()
    assert shell.told(Granted) == []


# The outbox alone -------------------------------------------------------------------------------------------


def test_of_several_ways_the_one_that_proves_the_least_counts(embedded: Case) -> None:
    for way in (Evidence.STEP, Evidence.REPORT, Evidence.NEXT):
        embedded.outbox.note(acknowledgements=[ack(1, 4)], way=way)
    embedded.outbox.note(give_backs=[back(2, 0)], way=Evidence.COUNT)
    assert embedded.outbox.take(embedded.state.fence).way == Evidence.REPORT
