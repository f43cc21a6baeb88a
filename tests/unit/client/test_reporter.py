"""Reports reach the master in order and without loss, whatever happens on the way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from edl_torch.client.reporter import Reporter
from edl_torch.client.threads import SYSTEM, SystemThread, SystemThreads, Thread, Threads
from edl_torch.core.calls import Acknowledgement, Fence, GiveBack, ReportAnswer, ReportCall
from edl_torch.errors import EdlError, MasterUnavailable, SessionLost, StaleLease
from edl_torch.testing import wait_until


class Port:
    """Answers reports, or raises what is planned for them; may be held up."""

    worker_id = "test"

    def __init__(self, *, in_process: bool) -> None:
        self.in_process = in_process
        self.calls: list[ReportCall] = []
        self.errors: list[BaseException | None] = []
        self.gate = threading.Event()
        self.gate.set()

    def report(self, call: ReportCall) -> ReportAnswer:
        assert self.gate.wait(10)
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error
        self.calls.append(call)
        return ReportAnswer(request=call.request)


def ack(task: int, upto: int) -> Acknowledgement:
    return Acknowledgement(task=task, attempt=1, upto=upto)


class Case:
    def __init__(self, *, in_process: bool, threads: Threads = SYSTEM) -> None:
        self.port = Port(in_process=in_process)
        self.answers: list[ReportAnswer] = []
        self.lost: list[Fence] = []
        self.refused: list[int] = []
        self.reporter = Reporter(
            *(self.port, "s", "training", self.answers.append, self.lost.append),  # type: ignore[arg-type]
            on_refused=self.refused.extend,
            threads=threads,
        )
        self.reporter.follow(Fence(ledger="l", lineage=3, member=1))

    def tell(self, *acknowledgements: Acknowledgement) -> None:
        self.reporter.note(acknowledgements=acknowledgements)
        self.reporter.send()

    def tell_and_wait(self, done: Acknowledgement) -> None:
        self.tell(done)
        self.reporter.wait_answered(0)


@pytest.fixture(params=[True, False], ids=["embedded", "remote"])
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    case = Case(in_process=request.param)
    yield case
    case.port.gate.set()
    case.port.errors.clear()
    case.reporter.close(5)


@pytest.fixture
def remote() -> Iterator[Case]:
    case = Case(in_process=False)
    yield case
    case.port.gate.set()
    case.reporter.close(5)


def test_a_report_carries_ledger_lineage_and_a_growing_number(case: Case) -> None:
    case.tell(ack(1, 4))
    case.reporter.flush()
    case.tell(ack(1, 8))
    case.reporter.flush()
    assert [(c.fence.ledger, c.fence.lineage, c.request) for c in case.port.calls] == [
        ("l", 3, 1),
        ("l", 3, 2),
    ]
    assert [c.acknowledgements for c in case.port.calls] == [(ack(1, 4),), (ack(1, 8),)]
    assert len(case.answers) == 2


def test_nothing_to_tell_is_no_call(case: Case) -> None:
    case.tell()
    assert case.reporter.flush()
    assert case.port.calls == []


def test_reports_that_come_faster_than_answers_are_merged(remote: Case) -> None:
    remote.port.gate.clear()
    remote.tell(ack(1, 4))
    wait_until(lambda: remote.reporter._sending)
    remote.tell(ack(1, 8))
    remote.tell(ack(1, 10))
    remote.reporter.note(give_backs=[GiveBack(task=2, attempt=1, start=0)])
    assert remote.reporter.wait_answered(4, 0.01)
    assert not remote.reporter.wait_answered(1, 0.01)
    remote.port.gate.set()
    assert remote.reporter.flush()
    merged = remote.port.calls[1]
    assert len(remote.port.calls) == 2
    assert merged.acknowledgements == (ack(1, 10),)
    assert merged.give_backs == (GiveBack(task=2, attempt=1, start=0),)


def test_what_no_master_answered_is_kept_and_sent_again(case: Case) -> None:
    case.port.errors = [MasterUnavailable("away")]
    with pytest.raises(MasterUnavailable, match="away"):
        case.tell_and_wait(ack(1, 4))
    assert case.port.calls == []
    case.reporter.note(give_backs=[GiveBack(task=1, attempt=1, start=4)])
    assert case.reporter.flush()
    again, newer = case.port.calls
    assert (again.request, again.acknowledgements, again.give_backs) == (1, (ack(1, 4),), ())
    assert (newer.request, newer.acknowledgements) == (2, ())
    assert newer.give_backs == (GiveBack(task=1, attempt=1, start=4),)
    assert (again.reported, newer.reported) == (0, 1)


def test_a_master_that_is_away_is_not_asked_in_a_tight_loop(remote: Case) -> None:
    remote.port.errors = [MasterUnavailable("away")] * 3
    for _ in range(3):
        with pytest.raises(MasterUnavailable):
            remote.tell_and_wait(ack(1, 4))
    assert remote.reporter.flush()
    assert len(remote.port.calls) == 2  # the first as it was, and all that was noted since


def test_flush_asks_again_instead_of_telling_of_a_time_gone_by(remote: Case) -> None:
    remote.port.errors = [MasterUnavailable("away")]
    remote.tell(ack(1, 4))
    wait_until(lambda: remote.reporter._stalled)
    assert remote.reporter.flush()
    assert len(remote.port.calls) == 1


def test_a_refused_report_raises_once_and_is_not_repeated(case: Case) -> None:
    case.port.errors = [StaleLease("another lineage")]
    with pytest.raises(StaleLease):
        case.tell_and_wait(ack(1, 4))
    assert case.reporter.flush()
    assert case.port.calls == []


def test_a_lost_session_is_told_with_the_membership_that_was_lost(case: Case) -> None:
    case.port.errors = [SessionLost("who?")]
    case.tell(ack(1, 4))
    case.reporter.flush()
    assert case.lost == [Fence(ledger="l", lineage=3, member=1)]


def test_another_lineage_drops_what_was_not_sent(remote: Case) -> None:
    remote.port.gate.clear()
    remote.tell(ack(1, 4))
    wait_until(lambda: remote.reporter._sending)
    remote.tell(ack(1, 8))
    remote.reporter.follow(Fence(ledger="l", lineage=4, member=2))
    assert remote.reporter.flush()
    remote.port.gate.set()
    remote.tell(ack(9, 1))
    assert remote.reporter.flush()
    assert [(c.fence.lineage, c.acknowledgements) for c in remote.port.calls] == [
        (3, (ack(1, 4),)),
        (4, (ack(9, 1),)),
    ]


@pytest.mark.parametrize("error", [StaleLease("another lineage"), MasterUnavailable("away")])
def test_what_a_report_of_another_lineage_raised_is_not_raised_in_this_one(
    remote: Case, error: EdlError
) -> None:
    """A loader worker of before may draw a lease, and it go back, while the dataset goes back to a token."""
    remote.port.gate.clear()
    remote.port.errors = [error]
    remote.tell(ack(1, 4))
    wait_until(lambda: remote.reporter._sending)
    remote.reporter.follow(Fence(ledger="l", lineage=4, member=2))
    remote.port.gate.set()
    remote.tell(ack(9, 1))
    assert remote.reporter.flush()
    assert [c.fence.lineage for c in remote.port.calls] == [4]


def test_what_is_posted_is_sent_and_raised_later(case: Case) -> None:
    """By callers who cannot act on it: a thread that hears of another trainer's want."""
    case.port.errors = [StaleLease("another lineage")]
    case.reporter.note(acknowledgements=[ack(1, 4)])
    case.reporter.post()
    wait_until(lambda: case.reporter._error is not None)
    case.reporter.note(give_backs=[GiveBack(task=2, attempt=1, start=0)])
    case.reporter.post()
    with pytest.raises(StaleLease):
        case.reporter.flush()
    assert case.reporter.flush()
    assert len(case.port.calls) == 1


def test_acknowledgements_that_are_never_sent_are_refused(remote: Case) -> None:
    """The model has learnt from those records, and the master lends them again."""
    remote.port.gate.clear()
    remote.tell(ack(1, 4))
    wait_until(lambda: remote.reporter._sending)
    remote.tell(ack(2, 8))
    remote.reporter.follow(Fence(ledger="l", lineage=3, member=2))
    assert remote.refused == [2]
    remote.port.errors = [MasterUnavailable("away")]
    remote.port.gate.set()
    wait_until(lambda: remote.refused == [2, 1])


def test_an_answer_may_lead_to_another_report(case: Case) -> None:
    def on_answer(answer: ReportAnswer) -> None:
        case.answers.append(answer)
        if len(case.answers) == 1:
            case.tell(ack(2, 1))

    case.reporter._on_answer = on_answer
    case.tell(ack(1, 4))
    assert case.reporter.flush()
    assert [c.acknowledgements for c in case.port.calls] == [(ack(1, 4),), (ack(2, 1),)]


def test_close_does_not_insist_on_a_master_that_is_away(case: Case) -> None:
    case.port.errors = [MasterUnavailable("away"), MasterUnavailable("away")]
    case.reporter.note(acknowledgements=[ack(1, 4)])
    case.reporter.close(1)
    assert case.port.calls == []
    assert case.reporter._thread is None or not case.reporter._thread.is_alive()


def test_close_sends_what_is_left(case: Case) -> None:
    case.reporter.note(acknowledgements=[ack(1, 4)])
    case.reporter.close(5)
    assert len(case.port.calls) == 1


class NeverRun(SystemThreads):
    """Its threads are there and never begin: whoever waits is quicker than they."""

    def thread(self, target: Callable[[], None], name: str) -> Thread:
        return SystemThread(lambda: None, name)


def test_who_flushes_sends_in_his_own_thread_what_no_thread_has_begun() -> None:
    slow = Case(in_process=False, threads=NeverRun())
    slow.tell(ack(1, 4))
    assert slow.port.calls == []
    assert slow.reporter.flush()
    assert [c.acknowledgements for c in slow.port.calls] == [(ack(1, 4),)]


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), RuntimeError("DataLoader worker was killed")])
@pytest.mark.parametrize("in_process", [True, False], ids=["embedded", "remote"])
def test_an_interrupted_report_is_sent_again(in_process: bool, interruption: BaseException) -> None:
    case = Case(in_process=in_process, threads=NeverRun())
    case.port.errors = [interruption]
    with pytest.raises(type(interruption)):
        case.tell_and_wait(ack(1, 4))
    assert case.port.calls == []
    assert case.reporter.flush()
    assert [(c.request, c.acknowledgements) for c in case.port.calls] == [(1, (ack(1, 4),))]


def test_what_the_thread_could_not_send_is_kept_and_sent_by_another(remote: Case) -> None:
    remote.port.errors = [KeyError("bug")]
    remote.tell(ack(1, 4))
    with pytest.raises(KeyError, match="bug"):
        remote.reporter.flush(5)
    assert remote.reporter.flush(5)
    assert [c.acknowledgements for c in remote.port.calls] == [(ack(1, 4),)]


class Late(SystemThreads):
    """Its threads begin when the test says so."""

    def __init__(self) -> None:
        self.made: list[SystemThread] = []

    def thread(self, target: Callable[[], None], name: str) -> Thread:
        self.made.append(SystemThread(target, name))
        return SystemThread(lambda: None, name)


def test_a_thread_that_begins_while_another_sends_goes_on_afterwards() -> None:
    late = Late()
    case = Case(in_process=False, threads=late)
    case.port.gate.clear()
    case.tell(ack(1, 4))
    impatient = threading.Thread(target=case.reporter.flush, daemon=True)
    impatient.start()
    wait_until(lambda: case.reporter._sending)
    case.tell(ack(2, 1))
    thread, condition = late.made[0], case.reporter._changed
    thread.start()
    wait_until(lambda: condition._waiters or not thread.is_alive())  # type: ignore[attr-defined]
    case.port.gate.set()
    impatient.join(10)
    case.tell(ack(1, 8))  # nobody flushes: the thread has to send it
    wait_until(lambda: case.port.calls[-1].acknowledgements == (ack(1, 8),))
    case.reporter.close(5)
    thread.join(10)
    assert not thread.is_alive()
