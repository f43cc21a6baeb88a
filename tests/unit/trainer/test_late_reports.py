"""Reports that come late, wait, or whose answer is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from trainer_kit import DATASET, Master, Shell, ack, reports_of

from edl_torch.core.calls import Grant
from edl_torch.errors import EdlError, MasterUnavailable, StaleLease
from edl_torch.trainer.vocabulary import Call

RECORDS, SHARD = 64, 4


def another_lineage(master: Master) -> None:
    """Somebody went back to a checkpoint: every report of this trainer is refused."""
    master.dispatcher.go_back(DATASET, None)


def nobody_there(master: Master) -> None:
    master.is_away = True


@pytest.fixture
def master() -> Master:
    return Master(records=RECORDS, shard=SHARD)


def report_in_vain(shell: Shell, what_happens: Callable[[Master], None]) -> None:
    """Train on a batch, and have its report come to nothing; a remote trainer has leases ahead then."""
    assert shell.fetch() is not None
    if not shell.state.config.in_process:
        shell.work()
        assert shell.state.inflight.records > 4
    what_happens(shell.master)
    with suppress(EdlError):
        shell.report()
    if not shell.state.config.in_process:
        shell.work()
        assert shell.state.outbox.error is not None


@pytest.mark.parametrize(
    ("what_happens", "error"), [(another_lineage, StaleLease), (nobody_there, MasterUnavailable)]
)
@pytest.mark.parametrize("in_process", [True, False], ids=["embedded", "remote"])
def test_a_trainer_whose_reports_are_not_taken_closes_all_the_same(
    master: Master, in_process: bool, what_happens: Callable[[Master], None], error: type[EdlError]
) -> None:
    shell = Shell(master, in_process=in_process)
    report_in_vain(shell, what_happens)
    with suppress(error):
        shell.run(shell.trainer.close(5.0))
    assert shell.state.closed
    assert not shell.state.inflight
    shell.work()
    assert shell._worker is not None
    assert shell._worker.is_done


def test_a_batch_in_hand_goes_back_though_the_end_of_its_pass_meets_an_error(master: Master) -> None:
    """Else the next pass would take it for trained on."""
    shell = Shell(master, in_process=False)
    number = shell.begin_elastic()
    for _ in range(2):
        grant = shell.draw()
        shell.request()
        assert shell.hand(grant)
    shell.work()
    assert shell.state.inflight.records > 4, "a lease was fetched ahead"
    shell.state.outbox.error = MasterUnavailable("as it was a while ago")
    with pytest.raises(MasterUnavailable):
        shell.run(shell.elastic.close(number))
    shell.run(shell.elastic.close(shell.run(shell.trainer.open())))
    shell.run(shell.trainer.reporter.flush())
    assert master.status.acknowledged == 4, "the batch before the one in hand"


# A call for leases that ends without its answer, as by Ctrl-C, costs no record its outcome ------------------


class Cut(Master):
    """Its call for leases number `cut` is answered, and the answer lost on the way."""

    def __init__(self, cut: int, error: BaseException) -> None:
        super().__init__()
        self._cut = cut
        self._error = error

    def answer(self, call: Call) -> Any:
        answer = super().answer(call)
        if call.request.name() == "lease":
            self._cut -= 1
            if not self._cut:
                assert answer.grants
                raise self._error
        return answer


@pytest.mark.parametrize("cut", [1, 3])
@pytest.mark.parametrize(
    ("in_process", "error"),
    [
        (True, KeyboardInterrupt()),
        (True, RuntimeError("DataLoader worker (pid 7) is killed by signal")),
        (True, MasterUnavailable("no answer")),
        (False, MasterUnavailable("no answer")),
    ],
    ids=["ctrl-c", "dead worker", "silence", "silence from afar"],
)
def test_leases_whose_answer_was_lost_are_given_back(
    in_process: bool, error: BaseException, cut: int
) -> None:
    master = Cut(cut, error)
    shell = Shell(master, in_process=in_process)
    with pytest.raises(type(error)):
        shell.train_through()
    assert not master.status.finished
    assert shell.train_through() > 0
    shell.run(shell.trainer.reporter.flush())
    assert master.status.finished
    master.outcomes.check_complete(1)


def test_a_call_is_repeated_under_its_number_until_it_is_answered() -> None:
    master = Cut(1, MasterUnavailable("no answer"))
    shell = Shell(master)
    with pytest.raises(MasterUnavailable):
        shell.fetch()
    shell.fetch()
    shell.fetch()
    assert [call.request for call in master.of("lease")] == [1, 1, 2]
    assert [call.asked for call in master.of("lease")] == [0, 0, 1]


# Acknowledgements for a master that lives and dies with its trainer wait a moment for more of them ----------


DELAY_S = 0.005


class Case(Shell):
    """A trainer whose optimizer steps on batches of 2 records, from leases of 8."""

    def __init__(self, larger: Master, session: str = "s") -> None:
        super().__init__(larger, session, batch_size=2, report_delay_s=DELAY_S, audited=False, attended=False)
        self.optimizer = self.state.batches.attach()

    def begin(self) -> Iterator[None]:
        """Begin a pass. Each `next` trains on one more batch of its first lease."""
        self.number = self.begin_elastic()
        self.grant = self.draw()
        return self._batches(self.grant)

    def _batches(self, grant: Grant) -> Iterator[None]:
        for first in range(grant.slice.skip, grant.slice.stop, 2):
            assert self.at_once(self.elastic.request(self.number)) is True
            assert self.at_once(self.elastic.hand(((grant.task, first, first + 2),))), (
                "nothing has to be waited for"
            )
            self.step()
            yield

    def step(self) -> None:
        self.run(self.elastic.stepped(self.optimizer))


@pytest.fixture
def larger() -> Master:
    return Master()


@pytest.fixture
def case(larger: Master) -> Case:
    return Case(larger)


def test_batches_of_a_moment_are_reported_together(larger: Master, case: Case) -> None:
    batches = case.begin()
    next(batches)
    assert larger.status.acknowledged == 2, "the first has nothing to wait for"
    next(batches)
    larger.now += DELAY_S / 2
    next(batches)
    assert larger.status.acknowledged == 2
    larger.now += DELAY_S
    next(batches)
    assert [call.acknowledgements for call in reports_of(larger)] == [(ack(1, 2),), (ack(1, 8, 2),)]
    assert larger.status.acknowledged == 8


def test_a_loop_without_optimizer_waits_with_what_it_is_done_with_too(larger: Master) -> None:
    shell = Shell(larger, batch_size=2, report_delay_s=DELAY_S, audited=False, attended=False)
    number = shell.begin_elastic()
    grant = shell.draw()
    asked = []
    for first in (0, 2, 4):
        assert shell.at_once(shell.elastic.hand(((grant.task, first, first + 2),)))
        asking = shell.start(shell.elastic.request(number))
        asked.append(asking.is_done)
        assert asking.finish() is True
    assert asked == [False, True, True]
    assert larger.status.acknowledged == 2
    shell.run(shell.elastic.close(number))
    assert larger.status.acknowledged == 6


def test_what_waits_is_told_with_a_record_that_cannot_be_read(larger: Master, case: Case) -> None:
    batches = case.begin()
    next(batches), next(batches)
    case.run(case.trainer.fail_record(case.grant.task, 7, "torn"))
    assert larger.status.acknowledged == 4
    assert larger.status.quarantined == 1


def test_nothing_waits_while_another_trainer_does(larger: Master) -> None:
    """Whether the larger says so with an answer, or calls back."""
    larger.__init__(records=16)  # type: ignore[misc]
    case, other = Case(larger), Case(larger, "other")
    batches = case.begin()
    next(batches), next(batches)
    other.begin_elastic()
    while other.next() is not None:  # in the end it waits for what the first one holds
        pass
    assert larger.status.acknowledged == 2
    case.run(case.trainer.wanted())
    assert larger.status.acknowledged == 4
    next(batches)
    assert larger.status.acknowledged == 6, "the answer before said that somebody waits"
    larger.now += 10.0  # it does not wait any more
    next(batches)
    assert larger.status.acknowledged == 8
