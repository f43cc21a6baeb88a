"""Acknowledgements for a master that lives and dies with its trainer wait a moment for more of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from trainer_kit import Master, Shell, ack, reports_of

from edl_torch.core.calls import Grant
from edl_torch.errors import StaleLease

DELAY_S = 0.005


class Case(Shell):
    """A trainer whose optimizer steps on batches of 2 records, from leases of 8."""

    def __init__(self, master: Master, session: str = "s") -> None:
        super().__init__(master, session, batch_size=2, report_delay_s=DELAY_S, audited=False, attended=False)
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
def master() -> Master:
    return Master()


@pytest.fixture
def case(master: Master) -> Case:
    return Case(master)


def test_batches_of_a_moment_are_reported_together(master: Master, case: Case) -> None:
    batches = case.begin()
    next(batches)
    assert master.status.acknowledged == 2, "the first has nothing to wait for"
    next(batches)
    master.now += DELAY_S / 2
    next(batches)
    assert master.status.acknowledged == 2
    master.now += DELAY_S
    next(batches)
    assert [call.acknowledgements for call in reports_of(master)] == [(ack(1, 2),), (ack(1, 8, 2),)]
    assert master.status.acknowledged == 8


def test_batches_that_take_longer_are_reported_one_by_one(master: Master, case: Case) -> None:
    for told, _ in enumerate(case.begin(), start=1):
        assert master.status.acknowledged == 2 * told
        master.now += DELAY_S


def test_a_loop_without_optimizer_waits_with_what_it_is_done_with_too(master: Master) -> None:
    shell = Shell(master, batch_size=2, report_delay_s=DELAY_S, audited=False, attended=False)
    number = shell.begin_elastic()
    grant = shell.draw()
    asked = []
    for first in (0, 2, 4):
        assert shell.at_once(shell.elastic.hand(((grant.task, first, first + 2),)))
        asking = shell.start(shell.elastic.request(number))
        asked.append(asking.is_done)
        assert asking.finish() is True
    assert asked == [False, True, True]
    assert master.status.acknowledged == 2
    shell.run(shell.elastic.close(number))
    assert master.status.acknowledged == 6


def test_what_waits_is_told_before_a_token_is_taken_and_at_the_end(master: Master, case: Case) -> None:
    batches = case.begin()
    next(batches), next(batches)
    case.run(case.trainer.position.snapshot())
    assert master.status.acknowledged == 4
    next(batches)
    case.run(case.trainer.close(1.0))
    assert master.status.acknowledged == 6
    assert master.status.leased == 0


def test_what_waits_is_told_with_a_record_that_cannot_be_read(master: Master, case: Case) -> None:
    batches = case.begin()
    next(batches), next(batches)
    case.run(case.trainer.fail_record(case.grant.task, 7, "torn"))
    assert master.status.acknowledged == 4
    assert master.status.quarantined == 1


def test_nothing_waits_while_another_trainer_does(master: Master) -> None:
    """Whether the master says so with an answer, or calls back."""
    master.__init__(records=16)  # type: ignore[misc]
    case, other = Case(master), Case(master, "other")
    batches = case.begin()
    next(batches), next(batches)
    other.begin_elastic()
    while other.next() is not None:  # in the end it waits for what the first one holds
        pass
    assert master.status.acknowledged == 2
    case.run(case.trainer.wanted())
    assert master.status.acknowledged == 4
    next(batches)
    assert master.status.acknowledged == 6, "the answer before said that somebody waits"
    master.now += 10.0  # it does not wait any more
    next(batches)
    assert master.status.acknowledged == 8


def test_a_batch_is_not_handed_out_after_a_report_that_failed(master: Master, case: Case) -> None:
    batches = case.begin()
    next(batches), next(batches)
    master.now += DELAY_S
    master.errors = [StaleLease("another history")]
    with pytest.raises(StaleLease):
        next(batches)
    case.trainer.fail(StaleLease("another history"))
    assert case.at_once(case.elastic.request(case.number)) is True
    with pytest.raises(StaleLease):
        case.run(case.elastic.hand(((case.grant.task, 6, 8),)))
