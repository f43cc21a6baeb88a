"""What became of an earlier report comes up late: at the end of a pass, of a session, or before a restore."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
from trainer_kit import DATASET, Master, Shell

from edl_torch.errors import EdlError, MasterUnavailable, StaleLease

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


@pytest.mark.parametrize("in_process", [True, False], ids=["embedded", "remote"])
def test_a_trainer_whose_reports_are_of_another_lineage_may_not_go_back_to_a_token_but_a_new_one_may(
    master: Master, in_process: bool
) -> None:
    superseded = Shell(master, "superseded", in_process=in_process)
    superseded.run(superseded.trainer.registrar.plan())
    token = superseded.run(superseded.trainer.position.snapshot())
    report_in_vain(superseded, another_lineage)
    with pytest.raises(StaleLease, match="lineage 2; the call is of lineage 1"):
        superseded.run(superseded.trainer.position.restore(token))
    shell = Shell(master, in_process=in_process)
    shell.run(shell.trainer.position.restore(token))
    seen = 0
    while (grant := shell.fetch()) is not None:
        seen += grant.slice.limit
        shell.report()
    assert seen == RECORDS
    shell.run(shell.trainer.reporter.flush())
    assert master.status.finished
