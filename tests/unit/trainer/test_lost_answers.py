"""A call for leases that ends without its answer, as by Ctrl-C, costs no record its outcome."""

from __future__ import annotations

from typing import Any

import pytest
from trainer_kit import Master, Shell

from edl_torch.errors import MasterUnavailable
from edl_torch.trainer.vocabulary import Call


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


def test_a_pass_that_goes_on_after_a_lost_answer_reads_what_it_brought() -> None:
    shell = Shell(Cut(2, MasterUnavailable("no answer")))
    grants = [shell.fetch()]
    with pytest.raises(MasterUnavailable):
        shell.fetch()
    grants.append(shell.fetch())
    assert [grant and grant.slice.shard for grant in grants] == [0, 1]


def test_a_call_is_repeated_under_its_number_until_it_is_answered() -> None:
    master = Cut(1, MasterUnavailable("no answer"))
    shell = Shell(master)
    with pytest.raises(MasterUnavailable):
        shell.fetch()
    shell.fetch()
    shell.fetch()
    assert [call.request for call in master.of("lease")] == [1, 1, 2]
    assert [call.asked for call in master.of("lease")] == [0, 0, 1]


def test_what_an_older_pass_was_lent_goes_back_when_its_answer_comes() -> None:
    master = Cut(1, MasterUnavailable("no answer"))
    shell = Shell(master)
    with pytest.raises(MasterUnavailable):
        shell.fetch()
    assert master.status.leases == 1
    shell.begin_plain()
    grant = shell.draw()
    assert shell.state.inflight.leases() == ((grant.task, grant.attempt),)
    assert master.status.leases == 1
    assert grant.task == 2
